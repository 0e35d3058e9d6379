"""A run as a person reads it: a line for each cell as it ends, a table at the end, and what was wrong. Pure."""

from collections.abc import Iterator, Sequence

from headrace.cli.chaos.cell import Cell
from headrace.cli.chaos.faults import FAULTS
from headrace.cli.chaos.matrix import Run
from headrace.cli.tables import aligned

HEAD = ("fault, state", "requests", "hit", "wrong", "errors", "asked again", "left", "recovery s", "pages leaked", "")


def line(cell: Cell) -> str:
    """As it ends."""
    verdict = cell.note or ("; ".join(cell.wrongs) if cell.wrongs else "right")
    return f"{cell.fault}, {cell.state}: {cell.num_requests} requests, {verdict} ({cell.took_s:.0f} s)\n"


def rendered(run: Run) -> str:
    told = [f"{run.deployment}; {run.num_left_out} requests without a right answer left out", ""]
    told += aligned([HEAD, *(_row(cell) for cell in run.cells)])
    told += ["", *(f"{name}: {FAULTS[name].text}" for name in dict.fromkeys(cell.fault for cell in run.cells))]
    wrongs = [*(f"{cell.fault}, {cell.state}: {text}" for cell in run.cells for text in cell.wrongs), *run.wrongs]
    told += [
        "",
        f"{_totals(run.cells)}; {'nothing wrong' if not wrongs else 'wrong:'}",
        *(f"  {one}" for one in wrongs),
    ]
    return "\n".join(told) + "\n"


def _row(cell: Cell) -> Sequence[str]:
    verdict = cell.note or ("wrong" if cell.wrongs else "right")
    return (
        f"{cell.fault}, {cell.state}",
        *(str(number) for number in (cell.num_requests, cell.num_hit, cell.num_different, cell.num_errors)),
        str(cell.num_broken),
        str(cell.kinds.get("left", 0)),
        "-" if cell.recovery_s is None else f"{cell.recovery_s:.2f}",
        str(cell.leaked_pages),
        verdict,
    )


def _totals(cells: Sequence[Cell]) -> str:
    done = [cell for cell in cells if not cell.note]
    slowest = max((cell.recovery_s for cell in done if cell.recovery_s is not None), default=0.0)
    parts: Iterator[str] = iter(
        (
            f"{len(done)} of {len(cells)} cells done",
            f"{sum(cell.num_requests for cell in cells)} requests",
            f"{sum(cell.num_different for cell in cells)} wrong, lost or repeated",
            f"{sum(cell.leaked_pages for cell in cells)} pages leaked",
            f"slowest recovery {slowest:.2f} s",
        )
    )
    return ", ".join(parts)
