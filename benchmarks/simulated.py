"""Simulated against measured: the runs of a comparison, each simulated with the very same arrivals.

    headrace profile --out profile.json
    headrace compare --workload mixed --rates 0.5,1,1.6 --repetitions 5 --chunks 256 --seconds 20 --out DIR
    python benchmarks/simulated.py profile.json DIR

On the same machine, one soon after the other. For each arm, workload and rate: the mean of the repetitions with its
95 % interval (Student's t), the mean of their simulations, and what that is off by. `ok`: by at most a tenth, or within
the interval, whichever is wider. The interval is of drawn arrivals, and wide; both were asked the same, so how many are
within a tenth alone says more. Percentiles and attainments are of each run's requests but its warm-up, linear between
two.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, nan, sqrt
from pathlib import Path
from statistics import fmean, stdev

import msgspec

from headrace.bench.comparison import Arm, Comparison, arrivals_file, read_comparison, runs_of
from headrace.bench.metrics import Slo, attainment, goodput, percentile, student_t, tpot_s, ttft_s
from headrace.bench.records import RequestRecord, Run
from headrace.bench.workload import ArrivalList
from headrace.cli.tables import aligned
from headrace.planner.profile import Profile, read_profile, scenario_of
from headrace.planner.scenario import Scenario
from headrace.planner.simulate import simulate

TARGET = 0.9
NEAR = 0.1

Records = Sequence[RequestRecord]
Point = tuple[str, str, float]  # arm, workload, rate


def figures(slo: Slo) -> dict[str, Callable[[Records], float]]:
    return {
        "ttft p50, ms": lambda records: 1e3 * percentile([ttft_s(one) for one in records], 0.5),
        "ttft p90, ms": lambda records: 1e3 * percentile([ttft_s(one) for one in records], 0.9),
        "tpot mean, ms": lambda records: 1e3 * fmean(_paces(records)),
        "tpot p90, ms": lambda records: 1e3 * percentile(_paces(records), 0.9),
        "attainment, %": lambda records: 100 * attainment(records, slo),
    }


def _paces(records: Records) -> list[float]:
    return [pace for one in records if (pace := tpot_s(one)) is not None] or [nan]


def scenario_of_arm(profile: Profile, arm: Arm) -> Scenario:
    if arm.kind == "colocated":
        return scenario_of(profile, colocated=arm.num_decoders, chunk_tokens=arm.chunk_tokens)
    return scenario_of(
        profile,
        prefillers=arm.num_prefillers,
        decoders=arm.num_decoders,
        chunk_tokens=arm.chunk_tokens,
        prefills=arm.is_local_prefill,
    )


def arrivals_of(directory: Path, run: Run) -> ArrivalList:
    head = run.head
    file = arrivals_file(directory, head.workload, head.rate, head.repetition)
    arrivals = msgspec.json.decode(file.read_bytes(), type=ArrivalList)
    assert arrivals.digest == head.digest, f"{file} is not what the run was asked"
    return arrivals


def simulated(scenario: Scenario, arrivals: ArrivalList, *, num_warm: int) -> Records:
    return simulate(scenario, arrivals)[num_warm:]


def both(directory: Path, profile: Profile, comparison: Comparison) -> dict[Point, list[tuple[Records, Records]]]:
    """Of each run the requests that count, measured and simulated."""
    found: dict[Point, list[tuple[Records, Records]]] = {}
    scenarios = {arm.name: scenario_of_arm(profile, arm) for arm in comparison.arms if arm.kind != "target"}
    for run in runs_of(directory):
        if run.head.arm in scenarios:
            came = simulated(scenarios[run.head.arm], arrivals_of(directory, run), num_warm=run.head.num_warm)
            point = run.head.arm, run.head.workload, run.head.rate
            found.setdefault(point, []).append((run.counted, came))
    return found


def half_width(values: Sequence[float]) -> float:
    """Of the mean's 95 % interval."""
    return inf if len(values) < 2 else student_t(len(values) - 1) * stdev(values) / sqrt(len(values))


def compared(measured: Sequence[float], came: Sequence[float]) -> tuple[list[str], bool, bool]:
    """-> a row's numbers, and whether the simulation is near, and within a tenth."""
    mean, width, other = fmean(measured), half_width(measured), fmean(came)
    off = other - mean
    is_near = abs(off) <= max(NEAR * abs(mean), width)
    share = f"{off / mean:+.0%}" if mean else "-"
    told = [f"{mean:.1f}", f"± {width:.1f}", f"{other:.1f}", share, "ok" if is_near else "NO"]
    return told, is_near, abs(off) <= NEAR * abs(mean)


def rows(
    found: Mapping[Point, list[tuple[Records, Records]]], slo: Slo
) -> Iterator[tuple[list[str], tuple[bool, bool] | None]]:
    yield ["arm, workload, requests/s", "figure", "measured", "95 %", "simulated", "off by", ""], None
    for (arm, workload, rate), runs in sorted(found.items()):
        for name, figure in figures(slo).items():
            told, *judged = compared([figure(one) for one, _ in runs], [figure(other) for _, other in runs])
            yield [f"{arm}, {workload}, {rate:g}", name, *told], (judged[0], judged[1])
    for arm, workload in sorted({point[:2] for point in found}):
        each = [
            goodput(
                [
                    (point[2], attainment(run[side], slo))
                    for point, runs in found.items()
                    if point[:2] == (arm, workload)
                    for run in runs
                ],
                TARGET,
            )
            for side in (0, 1)
        ]
        told = [f"{'≥ ' if one.is_bound else ''}{one.rate:.2f}" for one in each]
        off = f"{each[1].rate / each[0].rate - 1:+.0%}" if each[0].rate else "-"
        yield [f"{arm}, {workload}", "goodput, 1/s", told[0], "", told[1], off, ""], None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, help="of headrace profile")
    parser.add_argument("directory", type=Path, help="of headrace compare")
    given = parser.parse_args()
    profile, comparison = read_profile(given.profile), read_comparison(given.directory)
    told = list(rows(both(given.directory, profile, comparison), comparison.slo))
    print(f"measured: {comparison.machine}, {comparison.began}; profile of {profile.measured}")
    print(f"budgets: ttft {comparison.slo.ttft_s * 1e3:g} ms, tpot {comparison.slo.tpot_s * 1e3:g} ms\n")
    print("\n".join(aligned([row for row, _ in told])))
    judged = [one for _, one in told if one is not None]
    num_near, num_within = sum(near for near, _ in judged), sum(within for _, within in judged)
    print(f"\n{num_near} of {len(judged)} within a tenth, or the interval of what was measured; a tenth: {num_within}")


if __name__ == "__main__":
    main()
