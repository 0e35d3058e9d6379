import msgspec
import pytest
from planted import SPLIT, planted

from headrace.bench.comparison import Comparison
from headrace.bench.evidence import Evidence, gather
from headrace.bench.metrics import Slo
from headrace.bench.records import Run
from headrace.bench.verdict import Verdict, judge, overall

SEEDS = range(10)


def verdict_of(comparison: Comparison, runs: list[Run]) -> Verdict:
    (verdict,) = judge(comparison, gather(comparison, runs))
    return verdict


@pytest.mark.parametrize("seed", SEEDS)
def test_short_prompts_over_a_slow_link_stay_where_they_are(seed: int) -> None:
    slo = Slo(ttft_s=0.25, tpot_s=0.05)
    case = planted(prompt_tokens=100, rates=(2.0, 5.0), slo=slo, seed=seed, bytes_per_s=10e6 / 8)
    verdict = verdict_of(*case)
    assert verdict.words in {"stay colocated with chunk 64", "stay colocated with chunk 512"}, verdict
    assert next(clause for clause in verdict.clauses if clause.holds is False).name in {"transfer", "interference"}


@pytest.mark.parametrize("seed", SEEDS)
def test_long_prompts_against_a_tight_pace_are_split(seed: int) -> None:
    slo = Slo(ttft_s=7.0, tpot_s=0.016)
    case = planted(prompt_tokens=2000, rates=(0.35, 0.45), slo=slo, seed=seed, num_requests=50, max_tokens=30)
    verdict = verdict_of(*case)
    assert verdict.kind == "disaggregate", verdict
    assert [clause.holds for clause in verdict.clauses] == [True, True, True]


@pytest.mark.parametrize("seed", SEEDS)
def test_two_equal_arms_are_no_reason_to_split(seed: int) -> None:
    slo = Slo(ttft_s=2.0, tpot_s=0.1)
    verdict = verdict_of(*planted(prompt_tokens=500, rates=(0.5, 1.0), slo=slo, seed=seed, are_equal=True))
    assert verdict.kind == "stay colocated", verdict


def test_where_the_rival_still_keeps_up_at_low_rates_it_says_from_which_on() -> None:
    slo = Slo(ttft_s=3.0, tpot_s=0.03)
    verdict = verdict_of(*planted(prompt_tokens=1000, rates=(0.2, 0.4, 0.8), slo=slo, seed=3))
    assert verdict.kind == "disaggregate from" and verdict.from_rate in {0.4, 0.8}, verdict
    assert verdict.words == f"disaggregate from {verdict.from_rate:g} requests/s on"


def test_one_repetition_is_never_enough_for_a_claim() -> None:
    slo = Slo(ttft_s=6.0, tpot_s=0.02)
    verdict = verdict_of(*planted(prompt_tokens=2000, rates=(0.3, 0.45), slo=slo, seed=1, repetitions=1))
    assert verdict.kind == "cannot tell" and "--repetitions" in verdict.decide, verdict


def test_where_nobody_keeps_a_budget_it_cannot_tell() -> None:
    verdict = verdict_of(*planted(prompt_tokens=500, rates=(1.0, 2.0), slo=Slo(ttft_s=0.01, tpot_s=0.001), seed=1))
    assert verdict.kind == "cannot tell" and "--rates" in verdict.decide


def test_without_a_split_arm_it_says_which_is_missing() -> None:
    comparison, runs = planted(prompt_tokens=500, rates=(1.0,), slo=Slo(ttft_s=2.0, tpot_s=0.1), seed=1)
    verdict = verdict_of(comparison, [run for run in runs if run.head.arm != SPLIT.name])
    assert verdict.kind == "cannot tell" and "--prefillers" in verdict.decide and "no split arm" in verdict.why


def test_only_runs_with_the_same_arrivals_are_paired() -> None:
    comparison, runs = planted(prompt_tokens=500, rates=(1.0,), slo=Slo(ttft_s=2.0, tpot_s=0.1), seed=1)
    strange = [
        msgspec.structs.replace(run, head=msgspec.structs.replace(run.head, digest="another"))
        if run.head.arm == SPLIT.name and run.head.repetition < 2
        else run
        for run in runs
    ]
    (contest,) = gather(comparison, strange).contests
    assert [difference.num_pairs for difference in contest.differences] == [2]


def test_evidence_is_the_same_from_the_same_records_and_survives_a_file() -> None:
    case = planted(prompt_tokens=500, rates=(1.0,), slo=Slo(ttft_s=2.0, tpot_s=0.1), seed=1)
    evidence = gather(*case)
    assert gather(*case) == evidence
    assert msgspec.json.decode(msgspec.json.encode(evidence), type=Evidence) == evidence


def test_verdicts_that_agree_are_one_and_others_are_told_by_workload() -> None:
    stay = Verdict(kind="stay colocated", workload="short", why="w", chunk_tokens=64)
    same = msgspec.structs.replace(stay, workload="long")
    assert overall([stay, same]).words == "stay colocated with chunk 64" and overall([stay]) == stay
    split = Verdict(kind="disaggregate", workload="long", why="w")
    assert overall([stay, split]).why == "short: stay colocated with chunk 64; long: disaggregate"
    froms = [Verdict(kind="disaggregate from", workload=str(rate), why="w", from_rate=rate) for rate in (2.0, 4.0)]
    assert overall(froms).words == "disaggregate from 4 requests/s on"
    assert overall([]).kind == "cannot tell"
