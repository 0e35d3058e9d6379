"""The engine and its limits in turns: engine, limit, limit, engine, limit, .. over the same pages. All of it blocks.

Whatever disturbs the machine for longer than a run then disturbs all of them, and falls out of their ratio.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from headrace.fabric.limits.placement import scattered
from headrace.fabric.limits.records import LinkRun, RoundTrips
from headrace.fabric.measure.limits import CarriesPages, CarriesWords
from headrace.fabric.measure.link import EngineLink
from headrace.fabric.measure.plan import (
    ASLEEP_PAUSE_S,
    ASLEEP_SHARE,
    NUM_SUBMITS,
    SUBMIT_PAGE_BYTES,
    SUBMIT_PAGES,
    Plan,
)
from headrace.fabric.measure.questions import RoundsBy
from headrace.fabric.measure.ratios import median_ratio, spread
from headrace.fabric.measure.records import PageLimit, PageRates, Spread, TimeKind, TimeLimit, Times

Tick = Callable[[str], None]
"""Told after each run what it was of."""


def compare_pages(
    engine: EngineLink, limits: Sequence[CarriesPages], plan: Plan, page_bytes: int, tick: Tick
) -> PageRates:
    placements = scattered(
        page_bytes=page_bytes, num_bytes=plan.num_bytes, region_bytes=plan.region_bytes, seed=plan.seed
    )
    is_whole = engine.carries_whole(placements[0])
    for placement in placements:  # connections stand, and every page has been touched on both sides
        for carrier in (engine, *limits):
            carrier.run(placement)
    tick(what := f"pages of {page_bytes} bytes")
    ours: list[LinkRun] = []
    theirs: list[list[LinkRun]] = [[] for _ in limits]
    for pair in range(plan.num_pairs):
        placement = placements[pair % len(placements)]
        ours.append(engine.run(placement))
        for runs, limit in zip(theirs, limits, strict=True):
            runs.append(limit.run(placement))
        tick(what)
    return PageRates(
        page_bytes=page_bytes,
        num_bytes=placements[0].num_bytes,
        num_pairs=plan.num_pairs,
        is_whole=is_whole,
        bytes_per_s=spread(_rates(ours)),
        cpu_s_per_gb=_cpu_s_per_gb(ours),
        limits=tuple(
            PageLimit(
                name=limit.name,
                bytes_per_s=spread(_rates(runs)),
                cpu_s_per_gb=_cpu_s_per_gb(runs),
                share=median_ratio(_rates(ours), _rates(runs)),
            )
            for limit, runs in zip(limits, theirs, strict=True)
        ),
    )


def _rates(runs: Sequence[LinkRun]) -> list[float]:
    return [run.num_bytes / run.seconds for run in runs]


def _cpu_s_per_gb(runs: Sequence[LinkRun]) -> float:
    return median((run.sender_cpu_s + run.receiver_cpu_s) * 1e9 / run.num_bytes for run in runs)


ROUNDS: Mapping[TimeKind, tuple[RoundsBy, float]] = {
    "owner": ("owner", 0.0),
    "owner_asleep": ("owner", ASLEEP_PAUSE_S),
    "python": ("python", 0.0),
    "message": ("message", 0.0),
}
"""Who plays, and the pause before each."""


def compare_rounds(
    kind: TimeKind, engine: EngineLink, limits: Mapping[TimeKind, CarriesWords], plan: Plan, tick: Tick
) -> Times:
    by, pause_s = ROUNDS[kind]
    limit = limits.get(kind)
    num_rounds = max(1, plan.num_rounds // ASLEEP_SHARE) if pause_s else plan.num_rounds
    ours: list[RoundTrips] = []
    theirs: list[RoundTrips] = []
    for _ in range(plan.num_time_pairs):
        ours.append(engine.rounds(by, num_rounds, pause_s))
        if limit is not None:
            theirs.append(limit.round_trips(num_rounds, pause_s=pause_s))
        tick("round trips")
    return _times(kind, ours, limit, theirs, pause_s=pause_s)


def compare_submits(
    engine: EngineLink, limits: Mapping[TimeKind, CarriesWords], plan: Plan, tick: Tick
) -> tuple[Times, Times]:
    """1,000 pages: the call, and the way to the coroutine."""
    (placement, *_) = scattered(
        page_bytes=SUBMIT_PAGE_BYTES,
        num_bytes=SUBMIT_PAGES * SUBMIT_PAGE_BYTES,
        region_bytes=plan.region_bytes,
        seed=plan.seed,
    )
    num_rounds = min(NUM_SUBMITS, plan.num_rounds)
    limit = limits.get("coroutine")
    calls: list[RoundTrips] = []
    waits: list[RoundTrips] = []
    theirs: list[RoundTrips] = []
    for _ in range(plan.num_time_pairs):
        call, wait = engine.submits(placement, num_rounds)
        calls.append(call)
        waits.append(wait)
        if limit is not None:
            theirs.append(limit.round_trips(num_rounds))
        tick("1,000 pages")
    return _times("submit", calls, None, []), _times("coroutine", waits, limit, theirs)


def _times(
    kind: TimeKind,
    ours: Sequence[RoundTrips],
    limit: CarriesWords | None,
    theirs: Sequence[RoundTrips],
    *,
    pause_s: float = 0.0,
) -> Times:
    beside = None
    if limit is not None:
        beside = TimeLimit(
            name=limit.name, p50_ns=_p50(theirs), p99_ns=_p99(theirs), share=median_ratio(_p50s(theirs), _p50s(ours))
        )
    return Times(
        kind=kind,
        num_rounds=ours[0].num_rounds,
        num_pairs=len(ours),
        pause_s=pause_s,
        p50_ns=_p50(ours),
        p99_ns=_p99(ours),
        limit=beside,
    )


def _p50s(runs: Sequence[RoundTrips]) -> list[float]:
    """At least 1, so that ratios are numbers."""
    return [float(max(run.p50_ns, 1)) for run in runs]


def _p50(runs: Sequence[RoundTrips]) -> Spread:
    return spread(_p50s(runs))


def _p99(runs: Sequence[RoundTrips]) -> Spread:
    return spread([float(run.p99_ns) for run in runs])
