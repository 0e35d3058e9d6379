"""What an instance with budgets finds out before it announces itself, and what it says about them."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from role_world import NUM_PAGES, World, in_world
from scripted_gateway import until
from tiny_checkpoint import prompt

from headrace.engine.cost import StepCost, StepSize
from headrace.engine.measured_cost import MeasuredCost
from headrace.kvcache.layout import num_pages_for
from headrace.protocol.control import NoRoom
from headrace.roles.calibration import PATIENCE_S, ROUNDS, calibrate, plan_tables, plan_trials, tell_budgets
from headrace.roles.options import InstanceOptions

# ---- what is tried ---------------------------------------------------------------------------------------------


def test_rows_and_chunks_are_tried_alone_together_small_large_and_deep() -> None:
    num_tables, table_tokens = plan_tables(num_pages=5000, page_size=16, max_model_len=8192, max_running=32)
    assert (num_tables, table_tokens) == (9, 1024)
    trials = plan_trials(num_rows=8, table_tokens=table_tokens, chunk_tokens=256)
    assert [trial.size for trial in trials] == [
        StepSize(rows=1, keys=32),
        StepSize().with_chunk(0, 64),
        StepSize(rows=8, keys=8 * 32),
        StepSize(rows=8, keys=8 * 32).with_chunk(0, 64),
        StepSize().with_chunk(0, 16),
        StepSize(rows=8, keys=8 * 1024),
        StepSize().with_chunk(960, 1024),
        StepSize().with_chunk(0, 256),
    ]


@given(st.integers(2, 5000), st.integers(1, 256), st.integers(2, 9000), st.integers(1, 99), st.integers(1, 5000))
def test_trials_fit_into_any_pool(
    num_pages: int, page_size: int, longest: int, max_running: int, chunk_tokens: int
) -> None:
    max_model_len = min(longest, num_pages * page_size)
    num_tables, table_tokens = plan_tables(
        num_pages=num_pages, page_size=page_size, max_model_len=max_model_len, max_running=max_running
    )
    assert num_tables >= 2 and num_tables * num_pages_for(table_tokens, page_size) <= num_pages
    trials = plan_trials(num_rows=num_tables - 1, table_tokens=table_tokens, chunk_tokens=chunk_tokens)
    assert len(set(trials)) == len(trials) >= 2
    for trial in trials:
        assert 0 <= trial.num_rows <= min(max_running, num_tables - 1)
        assert 0 <= trial.num_keys <= table_tokens and 0 <= trial.begin <= trial.end <= table_tokens
        assert trial.end - trial.begin <= chunk_tokens
        assert trial.num_rows or trial.end
        assert trial.num_keys > 0 or not trial.num_rows


# ---- on a real instance ----------------------------------------------------------------------------------------


class Clock:
    """Each reading is later by `step_s`."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


async def calibrated(world: World, clock: Clock) -> MeasuredCost:
    running = await world.colocated(max_stall_s=None)
    costs = MeasuredCost()
    await calibrate(running.instance, costs, clock=clock)
    assert running.instance.pools[0].num_free_or_cached == NUM_PAGES
    return costs


@in_world
async def test_every_trial_runs_a_few_times_and_leaves_the_pool_as_it_was(world: World) -> None:
    costs = await calibrated(world, Clock(0.001))
    assert costs.cost is not None
    assert f" {ROUNDS * 6} steps" in repr(costs)  # the chunks from 0 are of 16 all three, so they are tried once
    assert costs.statistics().error_p50 is None


@in_world
async def test_a_slow_machine_ends_it_early_with_what_is_known_by_then(world: World) -> None:
    costs = await calibrated(world, Clock(PATIENCE_S / 5))
    assert " 3 steps" in repr(costs)
    assert costs.cost is not None
    assert costs.cost.predict(StepSize(rows=1, keys=32)) == pytest.approx(PATIENCE_S / 5, rel=0.01)


@in_world
async def test_the_pool_is_as_it_was_when_a_step_fails(world: World) -> None:
    running = await world.colocated()
    running.model.fail_next = True
    with pytest.raises(RuntimeError, match="out of order"):
        await calibrate(running.instance, MeasuredCost())
    assert running.instance.pools[0].num_free_or_cached == NUM_PAGES


@in_world
async def test_an_instance_with_a_budget_knows_what_steps_cost_when_it_announces_itself(world: World) -> None:
    bounded, free = await world.colocated(tpot_s=10.0), await world.colocated()
    known = [running.role._groups.costs.cost for running in (bounded, free)]  # type: ignore[union-attr]
    assert known[0] is not None and known[1] is None
    for running in (bounded, free):
        asked = world.gateway.generate(running.uuid, prompt(50), 6)
        assert await asked.text() == world.reference.text(prompt(50), 6)


@in_world
async def test_cancelled_it_gives_its_pages_back(world: World) -> None:
    running = await world.colocated()
    running.model.hold()
    calibrating = asyncio.create_task(calibrate(running.instance, MeasuredCost()))
    await until(lambda: running.model.num_waiting == 1, "a step runs")
    calibrating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calibrating
    assert running.instance.pools[0].num_free_or_cached == NUM_PAGES


@in_world
async def test_beyond_the_tpot_budget_there_is_no_room_until_somebody_leaves(world: World) -> None:
    running = await world.colocated(tpot_s=1e-6)  # so that any second row passes it
    first = world.gateway.generate(running.uuid, prompt(20), 300)
    await world.gateway.accepted(first)
    second = world.gateway.generate(running.uuid, prompt(20, seed=1), 4)
    assert (await second.wait(NoRoom)).num_free_pages > 20
    first.abort()
    await first.finished()
    third = world.gateway.generate(running.uuid, prompt(20, seed=1), 4)
    assert await third.text() == world.reference.text(prompt(20, seed=1), 4)
    assert running.counter("long_steps_planned_total") + running.counter("long_steps_unforeseen_total") > 0


@in_world
async def test_a_status_tells_how_good_predictions_are_once_there_are_some(world: World) -> None:
    running = await world.decoder(max_stall_s=10.0)
    assert "step_prediction_error_p50" not in running.status.gauges
    await world.gateway.generate(running.uuid, prompt(40), 20).text()
    assert 0 <= running.gauge("step_prediction_error_p50") <= running.gauge("step_prediction_error_p90")
    assert running.counter("long_steps_planned_total") == running.counter("long_steps_unforeseen_total") == 0


# ---- what it says ----------------------------------------------------------------------------------------------

OPTIONS = InstanceOptions(role="colocated", name="c", gateways=("ipc://x",), model_dir=Path("x"), model="x")
COST = StepCost(step_s=0.010, row_s=0.002, key_s=1e-6, token_s=0.001, pair_s=0.0)


def told(caplog: pytest.LogCaptureFixture, **bounds: float) -> list[tuple[str, str]]:
    with caplog.at_level(logging.INFO, "headrace.roles.calibration"):
        tell_budgets(replace(OPTIONS, **bounds), COST)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_it_says_what_the_budgets_hold(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, tpot_s=0.05, max_stall_s=0.1)[1:] == [
        ("INFO", "a TPOT of 50 ms is kept with up to 13 rows of 1024 keys"),
        ("INFO", "a stall of 100 ms holds chunks of 80 tokens beside one row"),
    ]


def test_it_warns_of_budgets_that_cannot_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    lines = [line for level, line in told(caplog, tpot_s=0.013, max_stall_s=0.025) if level == "WARNING"]
    assert lines == [
        "a TPOT of 13 ms cannot be kept: one row alone takes 13.0 ms",
        "a stall of 25 ms cannot be kept: one row beside the least chunk takes 29.0 ms",
    ]
