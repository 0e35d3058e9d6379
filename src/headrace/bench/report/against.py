"""Two comparisons beside each other: first what differs between them, then their figures. Reads both directories."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.bench.evidence import TARGETS, target_name
from headrace.bench.report.figures import Figures, figures_of


def compared(one: Path, other: Path) -> str:
    """For a terminal. Raises InputError."""
    before, after = figures_of(one)[0], figures_of(other)[0]
    lines = [f"{one}: {before.verdict.words}", f"{other}: {after.verdict.words}", ""]
    differing = list(_conditions(before, after))
    lines += ["not the same in both:", *(f"  {text}" for text in differing)] if differing else ["the same conditions"]
    rows = [("arm, workload, rate", "kept", "TTFT p90, ms", "TPOT p90, ms"), *_rows(before, after)]
    widths = [max(len(row[nth]) for row in rows) for nth in range(4)]
    lines += [
        "",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    return "\n".join([*lines, "", *_goodputs(before, after), ""])


def _conditions(before: Figures, after: Figures) -> Iterator[str]:
    a, b = before.comparison, after.comparison
    told = (
        ("machine", a.machine.partition(", load")[0], b.machine.partition(", load")[0]),
        *((name, a.versions.get(name), b.versions.get(name)) for name in dict.fromkeys((*a.versions, *b.versions))),
        ("model", a.model, b.model),
        ("budgets", a.slo, b.slo),
        ("link", a.link, b.link),
        ("seed", a.seed, b.seed),
    )
    for name, ours, theirs in told:
        if ours != theirs:
            yield f"{name}: {ours} and {theirs}"
    ours_of = {(run.workload, run.rate, run.repetition): run.digest for run in before.evidence.runs}
    theirs_of = {(run.workload, run.rate, run.repetition): run.digest for run in after.evidence.runs}
    shared = ours_of.keys() & theirs_of.keys()
    num_other = sum(ours_of[key] != theirs_of[key] for key in shared)
    if not shared:
        yield "arrivals: no list of one workload, rate and repetition is in both"
    elif num_other:
        yield f"arrivals: {num_other} of {len(shared)} lists of the same workload, rate and repetition are other ones"


def _rows(before: Figures, after: Figures) -> Iterator[Sequence[str]]:
    for one in before.evidence.figures:
        other = after.evidence.of(one.arm, one.workload)
        for nth, rate in enumerate(one.rates):
            if other is None or rate not in other.rates:
                continue
            its = other.rates.index(rate)
            yield (
                f"{one.arm}, {one.workload}, {rate:.3g}/s",
                f"{one.kept[nth]:.0%} -> {other.kept[its]:.0%}",
                f"{_ms(one.ttft_p90_s[nth])} -> {_ms(other.ttft_p90_s[its])}",
                f"{_ms(one.tpot_p90_s[nth])} -> {_ms(other.tpot_p90_s[its])}",
            )


def _goodputs(before: Figures, after: Figures) -> Iterator[str]:
    name = target_name(TARGETS[0])
    for one in before.evidence.figures:
        other = after.evidence.of(one.arm, one.workload)
        if other is not None:
            yield (
                f"goodput at {name}, {one.arm}, {one.workload}: {one.goodput[name].rate:.3g} -> "
                f"{other.goodput[name].rate:.3g} requests/s"
            )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"
