"""A comparison on one screen. Pure."""

import textwrap
from collections.abc import Iterator, Sequence

from headrace.bench.evidence import TARGETS, ArmFigures, target_name
from headrace.bench.metrics import Goodput
from headrace.bench.report.figures import Figures

WIDTH = 78
MOST_ARMS = 8


def screen(told: Figures, page: str) -> str:
    """`page`: where the report is."""
    slo, comparison = told.comparison.slo, told.comparison
    lines = [
        "",
        f"  {told.verdict.words.upper()}",
        *_wrapped(told.verdict.why),
        *(_wrapped(f"to decide: {told.verdict.decide}") if told.verdict.decide else ()),
        "",
    ]
    for verdict in told.verdicts:
        if len(told.verdicts) > 1:
            lines.append(f"  {verdict.workload}: {verdict.words}")
        lines += [line for clause in verdict.clauses for line in _clause(clause.holds, clause.text)]
    lines += ["", *_table(told), ""]
    lines += _wrapped(
        f"budgets: first token {slo.ttft_s * 1e3:.0f} ms, further ones {slo.tpot_s * 1e3:.0f} ms "
        f"({comparison.slo_source}); kept: of the requests at each rate; goodput: requests/s at which nine of ten "
        f"keep both"
    )
    if comparison.rejected:
        lines.append(f"  {len(comparison.rejected)} runs failed themselves and are in no figure")
    return "\n".join([*lines, f"  report: {page}", ""])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _clause(holds: bool | None, text: str) -> list[str]:
    mark = {True: "yes", False: "no ", None: "?  "}[holds]
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {mark}  ", subsequent_indent="       ")


def _table(told: Figures) -> Iterator[str]:
    shown = sorted(told.evidence.figures, key=lambda one: (one.workload, -len(one.rates), one.arm))[:MOST_ARMS]
    head = ("arm", "workload", "rates", "kept", "goodput", "longest gap")
    rows = [head, *(_row(one) for one in shown)]
    widths = [max(len(row[nth]) for row in rows) for nth in range(len(head))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(one: ArmFigures) -> Sequence[str]:
    return (
        one.arm,
        one.workload,
        ", ".join(f"{rate:.3g}" for rate in one.rates),
        ", ".join(f"{kept:.0%}" for kept in one.kept),
        goodput_text(one.goodput[target_name(TARGETS[0])], one.rates),
        "-" if one.stall is None else f"{one.stall.longest_s * 1e3:.0f} ms",
    )


def goodput_text(one: Goodput, rates: Sequence[float]) -> str:
    if one.is_bound:
        return f">= {one.rate:.3g}"
    return f"{one.rate:.3g}" if one.rate else f"< {min(rates):.3g}"
