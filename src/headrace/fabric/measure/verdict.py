"""Whether what was measured is good enough. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.fabric.measure.records import PageRates, TransportMeasured

FLOOR = 0.5
"""Of a bare loop's rate. Far below what the engine reaches on a quiet machine: on a shared one even medians of pairs
swing, and what this is to find is a link that is broken or set up wrongly, which costs much more than half."""

MOST_AT_REST = 0.01
"""Of one core, of a process with peers and nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Good enough where there are no problems. A doubt is a median below the floor that may be chance: the interval
    reaches above it."""

    transport: str
    problems: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        return not self.problems


def judge(measured: TransportMeasured, floor: float = FLOOR) -> Verdict:
    return Verdict(
        transport=measured.transport,
        problems=tuple(_problems(measured, floor)),
        doubts=tuple(_doubts(measured, floor)),
    )


def _problems(measured: TransportMeasured, floor: float) -> Iterator[str]:
    if measured.error is not None:
        yield f"failed: {measured.error}"
    for rates in measured.pages:
        if not rates.is_whole:
            yield f"{_pages(rates)}: wrong bytes arrived"
        if rates.limits[0].share.high < floor:
            yield f"{_shortfall(rates)}, below the floor of {floor:g}"
    if measured.rest is not None and measured.rest.process > MOST_AT_REST:
        yield f"at rest: {measured.rest.process:.1%} of a core, above the {MOST_AT_REST:.0%} that is allowed"


def _doubts(measured: TransportMeasured, floor: float) -> Iterator[str]:
    for rates in measured.pages:
        share = rates.limits[0].share
        if share.median < floor <= share.high:
            yield f"{_shortfall(rates)}: too noisy to be held against the floor of {floor:g}"


def _shortfall(rates: PageRates) -> str:
    limit = rates.limits[0]
    interval = f"{limit.share.low:.2f}-{limit.share.high:.2f}"
    return f"{_pages(rates)}: {limit.share.median:.2f} ({interval}) of the bare {limit.name}"


def _pages(rates: PageRates) -> str:
    size, unit = rates.page_bytes, "B"
    for larger in ("KiB", "MiB"):
        if size % 1024 == 0:
            size, unit = size // 1024, larger
    return f"pages of {size} {unit}"
