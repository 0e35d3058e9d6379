"""What `selftest` and `bench` show: tables for people, JSON values for machines. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from headrace.cli.tables import aligned
from headrace.cli.values import in_units
from headrace.fabric.measure.plan import Plan
from headrace.fabric.measure.records import PageRates, Spread, TimeKind, Times, TransportMeasured
from headrace.fabric.measure.verdict import Verdict

JSON_VERSION = 1

SIZES_IN_A_ROW = 4
"""So that a table has 80 columns."""

KINDS: Mapping[TimeKind, str] = {
    "owner": "imm, thread to thread, awake",
    "owner_asleep": "imm, thread to thread, asleep",
    "python": "imm, Python to Python",
    "message": "message, Python to Python",
    "submit": "submitting 1,000 pages",
    "coroutine": "1,000th page to coroutine",
}
LIMITS: Mapping[str, str] = {
    "tcp": "raw socket",
    "tcp;ofi_rxm": "bare tcp;ofi_rxm",
    "spin": "bare spinning",
    "futex": "bare futex",
    "eventfd": "bare eventfd",
    "eventfd one way": "bare eventfd, one way",
}


def limit_name(name: str) -> str:
    return LIMITS.get(name, f"bare {name}")


def head(plan: Plan, *, machine: str, peer: str) -> str:
    drawn = f"{in_units(plan.num_bytes)} of pages a run, scattered over {in_units(plan.region_bytes)}"
    return "\n".join(
        (
            f"machine: {machine}",
            f"link: {'both sides on this machine' if peer == 'local' else f'from here to {peer}'}",
            f"workload: {drawn}, an imm on each",
            f"medians of {plan.num_pairs} runs in turn, times of {plan.num_time_pairs}",
            "",
        )
    )


def rendered(measured: TransportMeasured) -> str:
    """Markdown, readable as it is."""
    lines = [f"## {measured.transport}", ""]
    for begin in range(0, len(measured.pages), SIZES_IN_A_ROW):
        lines += [*aligned(list(_page_rows(measured.pages[begin : begin + SIZES_IN_A_ROW]))), ""]
    if measured.times:
        lines += [*aligned(list(_time_rows(measured.times))), ""]
    if measured.rest is not None:
        rest = measured.rest
        shares = f"{rest.process:.2%} of a core for the process, {rest.owner:.2%} for its owner thread"
        lines += [f"At rest: {shares}.", ""]
    if measured.error is not None:
        lines += [f"It failed there: {measured.error}", ""]
    return "\n".join(lines)


def _page_rows(pages: Sequence[PageRates]) -> Iterator[list[str]]:
    yield ["GB/s", *(in_units(rates.page_bytes) for rates in pages)]
    yield ["engine", *(_gbps(rates.bytes_per_s.median) for rates in pages)]
    yield ["  lowest-highest", *(_range(rates.bytes_per_s, 1e-9) for rates in pages)]
    for index, limit in enumerate(pages[0].limits):
        name, beside = limit_name(limit.name), [rates.limits[index] for rates in pages]
        yield [name, *(_gbps(each.bytes_per_s.median) for each in beside)]
        yield ["  lowest-highest", *(_range(each.bytes_per_s, 1e-9) for each in beside)]
        yield [f"engine / {name}", *(_short(each.share.median) for each in beside)]
        yield ["  95 % interval", *(_range(each.share) for each in beside)]
    yield ["CPU s/GB: engine", *(_short(rates.cpu_s_per_gb) for rates in pages)]
    for index, limit in enumerate(pages[0].limits):
        costs = (_short(rates.limits[index].cpu_s_per_gb) for rates in pages)
        yield [f"CPU s/GB: {limit_name(limit.name)}", *costs]
    if not all(rates.is_whole for rates in pages):
        yield ["bytes", *("right" if rates.is_whole else "WRONG" for rates in pages)]


def _gbps(bytes_per_s: float) -> str:
    return _short(bytes_per_s / 1e9)


def _range(of: Spread, factor: float = 1.0) -> str:
    return f"{_short(of.low * factor)}-{_short(of.high * factor)}"


def _short(number: float) -> str:
    """Three digits, or as many as stand before the point."""
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"


def _time_rows(times: Sequence[Times]) -> Iterator[list[str]]:
    yield ["us", "p50", "of the runs", "p99", "bare / p50"]
    for each in times:
        share = "" if each.limit is None else _short(each.limit.share.median)
        yield [KINDS[each.kind], *_microseconds(each.p50_ns, each.p99_ns), share]
        if each.limit is not None:
            yield [f"  {limit_name(each.limit.name)}", *_microseconds(each.limit.p50_ns, each.limit.p99_ns), ""]


def _microseconds(p50_ns: Spread, p99_ns: Spread) -> tuple[str, str, str]:
    return _short(p50_ns.median / 1e3), _range(p50_ns, 1e-3), _short(p99_ns.median / 1e3)


def rendered_verdicts(verdicts: Sequence[Verdict], floor: float) -> str:
    lines = []
    for verdict in verdicts:
        if verdict.problems:
            lines.append(f"{verdict.transport}: NOT OK")
        elif verdict.doubts:
            lines.append(f"{verdict.transport}: OK as far as can be told")
        else:
            lines.append(f"{verdict.transport}: OK, at least {floor:g} of the bare loop at every page size")
        lines += [f"  {line}" for line in (*verdict.problems, *verdict.doubts)]
    return "\n".join(lines) + "\n"


def described(
    plan: Plan, measured: Sequence[TransportMeasured], *, machine: str, peer: str, steal: float
) -> dict[str, object]:
    """Seconds, bytes and nanoseconds as the records name them; null where there is nothing."""
    return {
        "version": JSON_VERSION,
        "machine": machine,
        "steal": steal,
        "peer": peer,
        "plan": {**asdict(plan), "region_bytes": plan.region_bytes},
        "transports": [asdict(each) for each in measured],
    }


def described_verdicts(verdicts: Sequence[Verdict], floor: float) -> dict[str, object]:
    return {
        "floor": floor,
        "is_ok": all(verdict.is_ok for verdict in verdicts),
        "verdicts": [{**asdict(verdict), "is_ok": verdict.is_ok} for verdict in verdicts],
    }
