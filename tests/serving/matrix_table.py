"""What the whole matrix showed, as a table in Markdown: a row for each pair of degrees, a column for each transport.

In a cell: clear prompts that were right, of all that were clear; KiB that each rank of the prefiller sent; seconds.
"""

from collections.abc import Sequence

from between_shardings import Shown

Shows = dict[tuple[str, str, str], Shown | None]
"""By model, degrees and transport; None of what failed."""


def table(shows: Shows) -> list[str]:
    transports = list(dict.fromkeys(transport for _, _, transport in shows))
    pairs = list(dict.fromkeys((model, degrees) for model, degrees, _ in shows))
    rows = [_row(["prefiller to decoder", *transports]), f"|{'---|' * (1 + len(transports))}"]
    for model, degrees in pairs:
        cells = [_cell(shows[model, degrees, transport]) for transport in transports]
        rows.append(_row([f"{model}, {degrees}", *cells]))
    return rows


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(shown: Shown | None) -> str:
    if shown is None:
        return "**failed**"
    sent = " + ".join(f"{num_bytes / 1024:.0f}" for num_bytes in shown.bytes_by_rank)
    return f"{shown.num_right} of {shown.num_clear}; {sent}; {shown.seconds:.0f} s"
