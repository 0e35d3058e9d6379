"""The search for a deployment: its candidates, the least that holds, the verdict, what is drawn of it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.bench.metrics import Slo
from headrace.bench.synthetic import drawn
from headrace.bench.workload import Arrival, ArrivalList
from headrace.deploy.check import check_deployment
from headrace.deploy.fields import Fields
from headrace.deploy.file import parse_deployment
from headrace.deploy.known import known_config
from headrace.engine.cost import StepCost
from headrace.model.families import FAMILIES
from headrace.model.shape import ModelShape
from headrace.planner.costs.hardware import read_hardware
from headrace.planner.costs.roofline import Sharding
from headrace.planner.scenario import KvModel, LinearSteps, LinkModel
from headrace.planner.search.answer import Question, answered
from headrace.planner.search.candidate import Candidate, Kind, Pool, Surroundings
from headrace.planner.search.frontier import frontier, highest_rate
from headrace.planner.search.least import fewest, least
from headrace.planner.search.region import OUTPUTS, PROMPTS, colocated_rate, region, split_rate
from headrace.planner.search.sensitivity import cases
from headrace.planner.search.site import Lengths, Site, most_rows
from headrace.planner.search.wanted import Wanted, held

FAST, SLOW = LinkModel(bytes_s=40e9), LinkModel(bytes_s=1e6)
STEPS = LinearSteps(StepCost(step_s=8e-3, row_s=1e-4, token_s=2e-4, key_s=2e-8, pair_s=0.0))
"""A prompt of 1,000 tokens takes 0.2 s; a decode step 8 to 12 ms."""
KV = KvModel(num_layers=32, page_bytes=2 << 20, page_messages=64)
LONG = Lengths(mean_prompt=2000, mean_output=64, p90_prompt=2000, longest=2064)
SHORT = Lengths(mean_prompt=100, mean_output=64, p90_prompt=100, longest=164)


def around(link: LinkModel) -> Surroundings:
    return Surroundings(routed=link, same_host=None, gateway_s=1e-3, hand_over_s=1e-3)


def kind(role: str, chunk_tokens: int, **more: object) -> Kind:
    values: dict[str, object] = {
        "role": role,
        "device": "one",
        "sharding": Sharding(),
        "steps": STEPS,
        "num_pages": 4000,
        "page_size": 16,
        "chunk_tokens": chunk_tokens,
        "max_running": 64,
        "tpot_s": None,
        "price_hour": 2.0,
        "watts": 500.0,
        "per_host": 8,
    }
    return Kind(**{**values, **more})  # type: ignore[arg-type]


def colocated(chunk_tokens: int, link: LinkModel = FAST, **more: object) -> Candidate:
    pool = Pool(kind=kind("colocated", chunk_tokens, **more), count=1)
    return Candidate(pools=(pool,), kv=KV, around=around(link))


def split(link: LinkModel = FAST, **more: object) -> Candidate:
    pools = tuple(Pool(kind=kind(role, 2048, **more), count=1) for role in ("prefiller", "decoder"))
    return Candidate(pools=pools, kv=KV, around=around(link))


def lists(lengths: Lengths) -> Callable[[float], ArrivalList]:
    def of(rate: float) -> ArrivalList:
        process = drawn("short", rate=rate, num_requests=300, seed=1)
        arrivals = tuple(
            Arrival(at_s=one.at_s, prompt_tokens=int(lengths.mean_prompt), max_tokens=int(lengths.mean_output))
            for one in process.arrivals
        )
        return ArrivalList(name="test", seed=1, arrivals=arrivals)

    return of


def wanted(lengths: Lengths, *, rate: float, ttft_s: float = 2.0, tpot_s: float = 0.02) -> Wanted:
    return Wanted(slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s), target=0.9, rate=rate, lists=lists(lengths))


def question(lengths: Lengths, asked: Wanted, *, link: LinkModel = FAST, error: float = 0.08) -> Question:
    return Question(
        colocated=[colocated(chunk, link) for chunk in (64, 256, 1024)],
        split=[split(link)],
        wanted=asked,
        lengths=lengths,
        objective="devices",
        error=error,
        workload="test",
    )


# ---- candidates ------------------------------------------------------------------------------------------------


def test_a_candidate_costs_what_its_devices_cost() -> None:
    two = split(sharding=Sharding(tp=4)).of_counts((2, 3))
    assert (two.num_devices, two.price_hour, two.watts) == (20, 40.0, 10_000.0)
    assert two.amount("cost") == 40.0 and str(two) == "2 prefillers TP4 + 3 decoders TP4"


def test_groups_of_an_instance_go_together_and_pairs_share_hosts() -> None:
    wide = split(sharding=Sharding(tp=1, dp=4)).of_counts((1, 2))
    assert len(wide.scenario().instances) == 12 and len(wide.scenario(without="decoder").instances) == 8
    apart = {one.host for one in wide.scenario().instances}
    assert apart == {"prefiller-host-0", "decoder-host-0"}
    paired = {one.host for one in replace(wide, is_paired=True).scenario().instances}
    assert paired == {"host-0", "host-1"}  # the second decoder of four does not fit beside the prefiller's half


def test_all_devices_of_an_instance_carry_a_prompt_together() -> None:
    one, four = split(), split(sharding=Sharding(tp=4))
    assert one.transfer_s(1600) == pytest.approx(100 * KV.page_bytes / 40e9)
    assert four.transfer_s(1600) == pytest.approx(one.transfer_s(1600) / 4)
    assert four.with_link(0.5).transfer_s(1600) == pytest.approx(2 * four.transfer_s(1600))


@pytest.mark.parametrize(("model", "tp"), [("meta-llama/Llama-3.1-70B", 4), ("deepseek-ai/DeepSeek-R1", 8)])
def test_pages_are_those_that_check_finds(model: str, tp: int) -> None:
    """The same deployment, counted from the names and shapes of tensors; ours takes the small products that make a
    latent as shared, which every rank has whole."""
    shape = ModelShape.from_config(known_config(model))
    device = read_hardware().device("h200")
    site = Site(
        shape=shape,
        dtype="bf16",
        prefill=device,
        decode=device,
        around=around(FAST),
        lengths=SHORT,
        slo=Slo(ttft_s=1.0, tpot_s=0.05),
    )
    pool = {"count": 1, "tp": tp}
    text = {
        "model": model,
        "page_size": 64,
        "device": {"kind": "cuda", "memory": "141GB", "per_host": 8},
        "link": {"transports": ["efa"], "nics": 1, "nic_gbps": 400, "latency_us": 20},
        "prefillers": pool,
        "decoders": pool,
    }
    checked = check_deployment(
        parse_deployment(Fields(text), folder=Path()), shape, FAMILIES[shape.architecture].tensor_shapes
    )
    ours = site.num_pages(device, Sharding(tp=tp), 64)
    assert ours == pytest.approx(checked.pools["decoders"].num_pages, rel=0.03)


def test_shapes_are_as_heads_and_memory_allow() -> None:
    shape = ModelShape.from_config(known_config("meta-llama/Llama-3.1-70B"))
    device = read_hardware().device("h100")
    site = Site(
        shape=shape,
        dtype="bf16",
        prefill=device,
        decode=device,
        around=around(FAST),
        lengths=LONG,
        slo=Slo(ttft_s=2.0, tpot_s=0.05),
    )
    degrees = {one.pools[0].kind.sharding.tp for one in site.colocated()}
    assert degrees == {4, 8}  # 141 GB of weights
    for one in site.split():
        assert all(pool.kind.num_pages * pool.kind.page_size >= 2 * LONG.longest for pool in one.pools)
        assert one.pools[0].kind.page_size == one.pools[1].kind.page_size


# ---- the least that holds --------------------------------------------------------------------------------------


def test_a_batch_is_as_large_as_the_budget_allows() -> None:
    rows = most_rows(STEPS, LONG, 0.02, most=512)
    cost = STEPS.cost
    step_s = cost.step_s + rows * (cost.row_s + cost.key_s * LONG.mean_keys)
    assert step_s <= 0.02 < step_s + cost.row_s + cost.key_s * LONG.mean_keys
    assert most_rows(STEPS, LONG, 0.001, most=512) == 0


def test_the_least_holds_and_one_less_of_any_pool_does_not() -> None:
    asked = wanted(LONG, rate=4.0)
    for shape in (split(), colocated(256)):
        found = least(shape, asked, LONG, objective="devices")
        assert found is not None and found.held.attainment >= 0.9
        counts = [pool.count for pool in found.candidate.pools]
        for place in range(len(counts)):
            fewer = [number - (nth == place) for nth, number in enumerate(counts)]
            if fewer[place]:
                short = held(shape.of_counts(fewer), asked.lists(4.0), asked.slo)
                assert short.attainment < 0.9, fewer


def test_what_costs_more_than_is_known_already_is_not_looked_for() -> None:
    asked = wanted(LONG, rate=4.0)
    simulated: list[str] = []
    assert least(split(), asked, LONG, objective="devices", below=1.0, note=simulated.append) is None
    assert not simulated and fewest(split(), 4.0, LONG) == (2, 1)


def test_with_headroom_an_instance_of_each_pool_may_be_gone() -> None:
    asked = wanted(LONG, rate=2.0)
    plain = least(split(), asked, LONG, objective="devices")
    safe = least(split(), asked, LONG, objective="devices", with_one_less=True)
    assert plain is not None and safe is not None and min(pool.count for pool in safe.candidate.pools) >= 2
    assert safe.candidate.num_devices > plain.candidate.num_devices
    for role in ("prefiller", "decoder"):
        assert held(safe.candidate, asked.lists(2.0), asked.slo, without=role).attainment >= 0.9


# ---- verdicts --------------------------------------------------------------------------------------------------


def test_long_prompts_against_a_tight_pace_are_split() -> None:
    answer = answered(question(LONG, wanted(LONG, rate=6.0, tpot_s=0.0115)))
    assert answer.verdict.kind in {"disaggregate", "disaggregate from"}, answer.verdict
    assert answer.best is answer.split and answer.split is not None
    assert [clause.name for clause in answer.verdict.clauses][-1] == "rival"


def test_short_prompts_over_a_slow_link_stay_colocated() -> None:
    answer = answered(question(SHORT, wanted(SHORT, rate=6.0, ttft_s=0.5, tpot_s=0.03), link=SLOW))
    assert answer.verdict.words.startswith("stay colocated with chunk") and answer.best is answer.colocated
    assert answer.split is None and answer.verdict.why == "split, nothing holds"


def test_what_costs_the_same_stays_colocated() -> None:
    answer = answered(question(SHORT, wanted(SHORT, rate=50.0, ttft_s=2.0, tpot_s=0.1)))
    assert answer.verdict.kind == "stay colocated"


def test_a_rival_within_the_error_of_step_times_leaves_it_open() -> None:
    asked = wanted(LONG, rate=6.0, tpot_s=0.0115)
    answer = answered(question(LONG, asked, error=1.0))
    assert answer.verdict.kind == "cannot tell" and "headrace compare" in answer.verdict.decide


def test_budgets_that_nobody_keeps_are_told() -> None:
    answer = answered(question(LONG, wanted(LONG, rate=1.0, ttft_s=0.01)))
    assert answer.verdict.kind == "cannot tell" and "--ttft-ms" in answer.verdict.decide and answer.best is None


# ---- what is drawn ---------------------------------------------------------------------------------------------


def test_a_change_of_what_was_thought_is_a_case() -> None:
    asked = wanted(LONG, rate=2.0)
    found = {case.name: case.held.attainment for case in cases(split().of_counts((2, 1)), asked)}
    assert list(found) == [
        *("as planned", "rate -30%", "rate +30%", "link halved", "prompts doubled", "one prefiller gone"),
    ]
    assert found["as planned"] >= 0.9 > found["one prefiller gone"]


def test_a_longer_budget_never_makes_a_device_do_less() -> None:
    asked = wanted(LONG, rate=2.0)
    points = list(frontier(colocated(256), split().of_counts((2, 1)), asked, LONG, lambda text: None))
    rates = [point.split for point in points]
    assert all(early is not None and late is not None and early <= 1.05 * late for early, late in pairwise(rates))
    assert points[0].tpot_s == 0.5 * asked.slo.tpot_s


@pytest.mark.parametrize("lengths", [LONG, SHORT], ids=["long", "short"])
def test_the_closed_form_of_a_region_is_within_its_stated_factor_of_a_simulated_instance(lengths: Lengths) -> None:
    asked = wanted(lengths, rate=1.0, ttft_s=5.0, tpot_s=0.03)
    told = colocated_rate(colocated(256).pools[0].kind, lengths, asked.slo)
    assert 0.5 < told / highest_rate(colocated(256), asked, lengths) < 2.2


def test_over_a_slow_link_long_prompts_are_never_better_split() -> None:
    assert split_rate(split(), LONG, Slo(ttft_s=5.0, tpot_s=0.03)) > 0
    assert split_rate(split(SLOW), LONG, Slo(ttft_s=5.0, tpot_s=0.03)) == 0


def test_a_region_has_a_point_for_each_pair_of_lengths() -> None:
    points = list(region([colocated(64), colocated(256)], [split()], Slo(ttft_s=5.0, tpot_s=0.015)))
    assert len(points) == len(PROMPTS) * len(OUTPUTS)
    long = next(point for point in points if (point.prompt_tokens, point.output_tokens) == (4096, 64))
    assert long.split > 1.2 * long.colocated > 0
