"""Many steps at once are the same as one after the other, and whatever happens, everything ends and is given back."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from deployments import COST, KV, instance, scenario
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace.bench import metrics
from headrace.bench.workload import Arrival, ArrivalList
from headrace.engine.cost import StepCost, StepSize
from headrace.planner.outcome import Simulation
from headrace.planner.scenario import Failure, Scenario, StepModel
from headrace.planner.simulate import simulate
from headrace.planner.spans import plan_span

PAGE = 16


class Roofline:
    """The slower of computing and reading, as a chip is: a bend in the keys."""

    def step_s(self, size: StepSize) -> float:
        return max(3e-3 + 1e-4 * size.rows + 5e-5 * size.chunk_tokens, 2.9e-3 + 2e-6 * size.keys)


class Apart:
    """A model whose steps take a little longer at each instance: of two that are in step, either may come first."""

    def __init__(self, model: StepModel, nth: int) -> None:
        self._model = model
        self._factor = 1 + 0.0137 * nth

    def step_s(self, size: StepSize) -> float:
        return self._factor * self._model.step_s(size)


@st.composite
def lists(draw: st.DrawFn) -> ArrivalList:
    apart, at_s, listed = random.Random(1), 0.0, []
    for _ in range(draw(st.integers(1, 25))):
        at_s += draw(st.floats(0, 0.2)) + 1e-3 * apart.random()
        listed.append(
            Arrival(
                at_s=at_s,
                prompt_tokens=draw(st.integers(1, 500)),
                max_tokens=draw(st.integers(1, 150)),
                blocks=tuple(draw(st.lists(st.integers(0, 2), max_size=4))),
                tier=draw(st.sampled_from(["interactive", "interactive", "flex"])),
            )
        )
    return ArrivalList(name="drawn", seed=1, arrivals=tuple(listed), block_tokens=draw(st.sampled_from([64, 100])))


@st.composite
def deployments(draw: st.DrawFn) -> Scenario:
    """Pools that hold one of the longest requests, or many."""
    beside: dict[str, Any] = {
        "num_pages": draw(st.sampled_from([48, 60, 100, 1000])),
        "max_running": draw(st.sampled_from([2, 8, 32])),
        "chunk_tokens": draw(st.sampled_from([64, 256])),
        "told": COST,
    }
    model = Roofline() if draw(st.booleans()) else instance("any", "decoder").steps
    if draw(st.booleans()):
        budgets = {"tpot_s": draw(st.sampled_from([None, 7e-3])), "max_stall_s": draw(st.sampled_from([None, 1e-2]))}
        several = [instance(f"c{nth}", "colocated", **beside, **budgets) for nth in range(draw(st.integers(1, 3)))]
    else:
        several = [instance(f"p{nth}", "prefiller", **beside) for nth in range(draw(st.integers(1, 2)))]
        prefills = draw(st.booleans())
        several += [instance(f"d{nth}", "decoder", prefills=prefills, **beside) for nth in range(2)]
    several = [replace(one, steps=Apart(model, nth)) for nth, one in enumerate(several)]
    failures = st.builds(
        Failure,
        instance=st.sampled_from([one.name for one in several]),
        at_s=st.floats(0, 2),
        down_s=st.floats(0.3, 1),
        noticed_s=st.floats(0, 0.3),
    )
    return scenario(*several, failures=draw(st.lists(failures, max_size=2)), ttft_s=draw(st.sampled_from([None, 0.3])))


@settings(max_examples=40, deadline=None)
@given(deployments(), lists())
def test_both_ways_come_to_the_same_tokens(deployment: Scenario, asked: ArrivalList) -> None:
    whole, step_by_step = (list(simulate(deployment, asked, closed_form=closed)) for closed in (True, False))
    for one, other in zip(whole, step_by_step, strict=True):
        assert (one.error, one.cached_tokens) == (other.error, other.cached_tokens)
        assert one.token_s == pytest.approx(other.token_s, abs=1e-9)
    event(f"refused or lost: {any(record.error for record in whole)}")


@settings(max_examples=40, deadline=None)
@given(deployments(), lists())
def test_every_request_ends_once_with_its_tokens_in_order(deployment: Scenario, asked: ArrivalList) -> None:
    done = simulate(deployment, asked)
    event(f"preempted: {any(did.num_preemptions for did in done.did)}")
    event(f"evicted: {any(did.num_evicted for did in done.did)}")
    assert [record.index for record in done] == list(range(len(asked.arrivals)))
    for record, arrival in zip(done, asked.arrivals, strict=True):
        assert record.error is not None or metrics.is_whole(record)
        assert all(early < late for early, late in pairwise((arrival.at_s, *record.token_s)))
        if record.waterfall is not None:
            parts = [part for part in record.waterfall.__struct_fields__ if getattr(record.waterfall, part) is not None]
            seconds = [getattr(record.waterfall, part) for part in parts]
            assert min(seconds) >= -1e-12
            assert sum(seconds) == pytest.approx(metrics.ttft_s(record), abs=1e-9)
    _sent_is_received(done)
    assert done.num_tokens == sum(len(record.token_s) for record in done)


def _sent_is_received(done: Simulation) -> None:
    sent = sum(did.way_bytes for did in done.did if did.role == "prefiller")
    received = sum(did.way_bytes for did in done.did if did.role == "decoder")
    assert sent == received and sent % KV.page_bytes == 0


@settings(max_examples=15, deadline=None)
@given(deployments(), lists(), st.floats(1e-3, 1), st.floats(1e-3, 2e-2))
def test_figures_of_arrays_are_those_of_the_records(
    deployment: Scenario, asked: ArrivalList, ttft_s: float, tpot_s: float
) -> None:
    done, slo = simulate(deployment, asked), metrics.Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    records = list(done)
    assert done.ttft_s == pytest.approx([metrics.ttft_s(record) for record in records])
    paces = [metrics.tpot_s(record) for record in records]
    assert done.tpot_s == pytest.approx([np.nan if pace is None else pace for pace in paces], nan_ok=True)
    assert done.attainment(slo) == metrics.attainment(records, slo)
    assert done.stall_s == pytest.approx(metrics.stall_s(records))


@given(st.integers(1, 64), st.integers(1, 5000), st.integers(1, 400))
def test_a_span_ends_before_its_steps_leave_the_line(rows: int, keys: int, most: int) -> None:
    size = StepSize(rows=rows, keys=keys)
    span = plan_span(Roofline(), size, 1.0, most)
    each = [Roofline().step_s(StepSize(rows=rows, keys=keys + nth * rows)) for nth in range(span.num_steps)]
    assert 1 <= span.num_steps <= most
    assert span.ends() == pytest.approx(1.0 + np.cumsum(each), abs=1e-12)
    assert span.ends_at == pytest.approx(span.ends()[-1])


def test_a_span_of_what_grows_evenly_goes_all_the_way() -> None:
    linear = instance("any", "decoder").steps
    assert isinstance(COST, StepCost)
    assert plan_span(linear, StepSize(rows=7, keys=1000), 0.0, 900).num_steps == 900
