"""From the records of a comparison to the numbers that a verdict stands on. Pure: the same records, the same numbers.

Differences between arms are paired by (workload, rate, repetition): both had the same arrivals and the same tokens.
Intervals are over the repetitions, since requests of one run share whatever happened in it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import fmean, median

import msgspec

from headrace.bench.comparison import Arm, Comparison
from headrace.bench.metrics import (
    Goodput,
    Interval,
    Slo,
    Summary,
    by_length,
    goodput,
    interval,
    summarize,
)
from headrace.bench.records import Run

TARGETS = (0.9, 0.99)
"""Attainments that goodput is told for."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run, without its warm-up: of all prompts, and of short and long ones by themselves."""

    arm: str
    workload: str
    rate: float
    repetition: int
    digest: str
    steal_share: float
    facts: dict[str, float]
    classes: dict[str, Summary]

    @property
    def whole(self) -> Summary:
        return self.classes["all"]


class Stall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What other requests' prefills do to streams, in one arm, seconds: the median over the runs of each run's longest
    gap, of the p99 of gaps in flight, and of the median of all gaps, which no prefill disturbs where they are rare."""

    longest_s: float
    in_flight_p99_s: float
    typical_s: float
    num_runs: int


class ArmFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one arm and one workload. `goodput` by target, from the mean attainment of all runs at each rate;
    `goodput_per_device` with one value for each repetition. `kept`: mean attainment by rate. `ttft_p90_s` and
    `tpot_p90_s`: by rate, means over the repetitions, infinite (null) where too many requests failed."""

    arm: str
    workload: str
    rates: tuple[float, ...]
    kept: tuple[float, ...]
    ttft_p90_s: tuple[float | None, ...]
    tpot_p90_s: tuple[float | None, ...]
    goodput: dict[str, Goodput]
    goodput_per_device: dict[str, Interval]
    stall: Stall | None


class Difference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Split less colocated, of one workload at one rate, over paired repetitions. Attainment is a share, the others
    are seconds of the p90."""

    workload: str
    rate: float
    split: str
    colocated: str
    num_pairs: int
    attainment: Interval
    ttft_p90_s: Interval | None
    tpot_p90_s: Interval | None


class Contest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One workload: the best colocated arm by goodput per device, the best split one, and how they differ.
    `goodput_per_device`: split less colocated, by target, over paired repetitions."""

    workload: str
    colocated: str | None
    split: str | None
    differences: tuple[Difference, ...]
    goodput_per_device: dict[str, Interval]


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a whole comparison."""

    slo: Slo
    runs: tuple[RunSummary, ...]
    figures: tuple[ArmFigures, ...]
    contests: tuple[Contest, ...]

    def of(self, arm: str, workload: str) -> ArmFigures | None:
        return next((one for one in self.figures if one.arm == arm and one.workload == workload), None)


Key = tuple[str, str]
"""Arm and workload."""


def gather(comparison: Comparison, runs: Iterable[Run]) -> Evidence:
    """Of the runs that count."""
    slo = comparison.slo
    kept = [run for run in runs if _counts(comparison, run)]
    summaries = tuple(_summary(run, slo) for run in kept)
    by_arm: dict[Key, list[RunSummary]] = defaultdict(list)
    for one in summaries:
        by_arm[one.arm, one.workload].append(one)
    figures = tuple(_figures(comparison.arm(arm), workload, found) for (arm, workload), found in sorted(by_arm.items()))
    contests = tuple(
        _contest(comparison, workload.name, figures, by_arm)
        for workload in comparison.workloads
        if any(one.workload == workload.name for one in figures)
    )
    return Evidence(slo=slo, runs=summaries, figures=figures, contests=contests)


def _counts(comparison: Comparison, run: Run) -> bool:
    head = run.head
    return not any(
        (one.arm, one.workload, one.rate, one.repetition) == (head.arm, head.workload, head.rate, head.repetition)
        for one in comparison.rejected
    )


def _summary(run: Run, slo: Slo) -> RunSummary:
    head = run.head
    return RunSummary(
        arm=head.arm,
        workload=head.workload,
        rate=head.rate,
        repetition=head.repetition,
        digest=head.digest,
        steal_share=run.end.steal_share,
        facts=run.end.facts,
        classes={name: summarize(records, slo) for name, records in by_length(run.counted).items()},
    )


# ---- one arm ---------------------------------------------------------------------------------------------------


def _figures(arm: Arm, workload: str, runs: Sequence[RunSummary]) -> ArmFigures:
    by_rate: dict[float, list[RunSummary]] = defaultdict(list)
    for run in runs:
        by_rate[run.rate].append(run)
    rates = tuple(sorted(by_rate))
    points = [(run.rate, run.whole.attainment) for run in runs]
    return ArmFigures(
        arm=arm.name,
        workload=workload,
        rates=rates,
        kept=tuple(fmean(run.whole.attainment for run in by_rate[rate]) for rate in rates),
        ttft_p90_s=tuple(_mean([run.whole.ttft.p90 for run in by_rate[rate]]) for rate in rates),
        tpot_p90_s=tuple(_mean([run.whole.tpot.p90 for run in by_rate[rate]]) for rate in rates),
        goodput={target_name(target): goodput(points, target) for target in TARGETS},
        goodput_per_device={
            target_name(target): _within(
                0.0, inf, interval([one / arm.devices for one in _goodputs(runs, target).values()])
            )
            for target in TARGETS
        },
        stall=_stall(runs),
    )


def target_name(target: float) -> str:
    """`90 %`."""
    return f"{target:.0%}".replace("%", " %")


def _goodputs(runs: Sequence[RunSummary], target: float) -> dict[int, float]:
    """By repetition, of those that were asked at most rates: the others have seen too few to be compared."""
    points: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        points[run.repetition].append((run.rate, run.whole.attainment))
    most = max(map(len, points.values()))
    return {nth: goodput(found, target).rate for nth, found in sorted(points.items()) if len(found) == most}


def _stall(runs: Sequence[RunSummary]) -> Stall | None:
    told = [run.whole for run in runs if run.whole.stall_s is not None and run.whole.itl.p50 is not None]
    if not told:
        return None
    in_flight = [one.itl_in_flight.p99 for one in told if one.itl_in_flight.p99 is not None]
    return Stall(
        longest_s=median(one.stall_s or 0.0 for one in told),
        in_flight_p99_s=median(in_flight) if in_flight else 0.0,
        typical_s=median(one.itl.p50 or 0.0 for one in told),
        num_runs=len(told),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """None where any of them is infinite."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


# ---- two arms --------------------------------------------------------------------------------------------------


def _contest(
    comparison: Comparison, workload: str, figures: Sequence[ArmFigures], runs: Mapping[Key, Sequence[RunSummary]]
) -> Contest:
    best = {kind: _best(comparison, workload, figures, kind) for kind in ("colocated", "split")}
    colocated, split = best["colocated"], best["split"]
    if colocated is None or split is None:
        return Contest(workload=workload, colocated=colocated, split=split, differences=(), goodput_per_device={})
    ours, theirs = runs[split, workload], runs[colocated, workload]
    devices = comparison.arm(split).devices, comparison.arm(colocated).devices
    per_device = {}
    for target in TARGETS:
        mine, rivals = _goodputs(ours, target), _goodputs(theirs, target)
        pairs = [mine[nth] / devices[0] - rivals[nth] / devices[1] for nth in mine if nth in rivals]
        if pairs:
            per_device[target_name(target)] = interval(pairs)
    return Contest(
        workload=workload,
        colocated=colocated,
        split=split,
        differences=tuple(_differences(workload, ours, theirs)),
        goodput_per_device=per_device,
    )


def _best(comparison: Comparison, workload: str, figures: Sequence[ArmFigures], kind: str) -> str | None:
    """By goodput per device at nine of ten, then by all attainments, then by the first tokens."""
    own = [one for one in figures if one.workload == workload and comparison.arm(one.arm).kind == kind]

    def rank(one: ArmFigures) -> tuple[float, float, float]:
        goods = one.goodput[target_name(TARGETS[0])].rate / comparison.arm(one.arm).devices
        first: list[float] = [inf if value is None else value for value in one.ttft_p90_s]
        return goods, fmean(one.kept), -fmean(first)

    # Only those that were asked as often as any: a chunk size of the sweep has seen one rate.
    most = max((len(one.rates) for one in own), default=0)
    return max((one for one in own if len(one.rates) == most), key=rank).arm if own else None


def _differences(workload: str, ours: Sequence[RunSummary], theirs: Sequence[RunSummary]) -> Iterable[Difference]:
    rivals = {(run.rate, run.repetition): run for run in theirs}
    pairs: dict[float, list[tuple[RunSummary, RunSummary]]] = defaultdict(list)
    for run in ours:
        rival = rivals.get((run.rate, run.repetition))
        if rival is not None and rival.digest == run.digest:
            pairs[run.rate].append((run, rival))
    for rate, found in sorted(pairs.items()):
        yield Difference(
            workload=workload,
            rate=rate,
            split=found[0][0].arm,
            colocated=found[0][1].arm,
            num_pairs=len(found),
            attainment=_within(-1.0, 1.0, interval([a.whole.attainment - b.whole.attainment for a, b in found])),
            ttft_p90_s=_paired([(a.whole.ttft.p90, b.whole.ttft.p90) for a, b in found]),
            tpot_p90_s=_paired([(a.whole.tpot.p90, b.whole.tpot.p90) for a, b in found]),
        )


def _within(least: float, most: float, told: Interval) -> Interval:
    """Of what can be no less and no more."""
    if told.low is None or told.high is None:
        return told
    return msgspec.structs.replace(told, low=max(least, told.low), high=min(most, told.high))


def _paired(values: Sequence[tuple[float | None, float | None]]) -> Interval | None:
    """None where any is infinite."""
    differences = [a - b for a, b in values if a is not None and b is not None]
    return interval(differences) if len(differences) == len(values) else None
