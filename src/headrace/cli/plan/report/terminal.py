"""A plan on one screen. Pure."""

import textwrap
from collections.abc import Iterator

from headrace.cli.plan.report.told import DeploymentTold, PlanTold

WIDTH = 78


def screen(told: PlanTold, page: str | None) -> str:
    """`page`: where the report is, if one was written."""
    lines = ["", f"  {told.verdict.words.upper()}", *_wrapped(told.verdict.why)]
    if told.verdict.decide:
        lines += _wrapped(f"to decide: {told.verdict.decide}")
    lines.append("")
    for clause in told.verdict.clauses:
        mark = "yes" if clause.holds else "no "
        lines += textwrap.wrap(clause.text, WIDTH, initial_indent=f"  {mark}  ", subsequent_indent="       ")
    lines.append("")
    for name, deployment in (("colocated", told.colocated), ("split", told.split)):
        lines += _deployment(name, deployment)
    if told.cases:
        lines += ["", *_cases(told)]
    lines += ["", *_wrapped(wanted_text(told)), *_wrapped(error_text(told))]
    if told.verdict.kind == "stay colocated" and told.colocated is not None and told.is_measured:
        pool = told.colocated.pools[0]
        lines.append(
            f"  start it: headrace serve --colocated --decoders {pool.count} --chunk-tokens {pool.chunk_tokens}"
        )
    if page is not None:
        lines.append(f"  report: {page}")
    return "\n".join([*lines, ""])


def wanted_text(told: PlanTold) -> str:
    beside = ", also with one instance of each pool gone" if told.is_with_one_less else ""
    return (
        f"wanted: first token {told.slo.ttft_s * 1e3:.0f} ms, further ones {told.slo.tpot_s * 1e3:.0f} ms, kept for "
        f"{told.target:.0%} of {told.rate:g} requests/s{beside}; the fewest {_objective(told)} that do"
    )


def error_text(told: PlanTold) -> str:
    return f"step times are wrong by {told.error:.0%}: {told.error_source}"


def power_text(watts: float) -> str:
    return f"{watts:.0f} W" if watts < 1000 else f"{watts / 1e3:.1f} kW"


def _objective(told: PlanTold) -> str:
    return {"devices": "devices", "cost": "dollars an hour", "power": "watts"}[told.objective]


def _deployment(name: str, told: DeploymentTold | None) -> Iterator[str]:
    if told is None:
        yield f"  {name:<10} nothing that was tried holds"
        return
    held = told.held
    figures = (
        f"{told.devices} devices, {told.price_hour:.2f} an hour, {power_text(told.watts)}; "
        f"kept {held.attainment:.0%}, first token {_ms(held.ttft_p50_s)} / {_ms(held.ttft_p90_s)}, "
        f"further {_ms(held.tpot_p50_s)} / {_ms(held.tpot_p90_s)} (p50 / p90), longest gap {_ms(held.stall_s)}"
    )
    yield from textwrap.wrap(f"{name:<10} {told.words}", WIDTH, initial_indent="  ", subsequent_indent=" " * 13)
    yield from textwrap.wrap(figures, WIDTH, initial_indent=" " * 13, subsequent_indent=" " * 13)


def _cases(told: PlanTold) -> Iterator[str]:
    text = "; ".join(f"{case.name} {case.held.attainment:.0%}" for case in told.cases)
    yield from _wrapped(f"kept by what the verdict is for: {text}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"
