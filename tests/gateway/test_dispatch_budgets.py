"""Budgets kept by a whole gateway: who is refused at the door, who goes first, which background work waits for whom."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from gateway_fleet import Fleet, ask, fleet, generation, is_answered, progress_of
from prometheus_client.parser import text_string_to_metric_families
from scripted_instance import on_loop, until

from headrace.gateway.budgets import Budget, Tiers
from headrace.gateway.generation import BudgetExceeded, Generation, Overloaded
from headrace.protocol.control import Generate, Reserve
from headrace.protocol.messages import Tier

TIERS = Tiers(budgets={"interactive": Budget(ttft_s=2.0, tpot_s=0.025)})


def of_tier(request_id: str, tier: Tier = "interactive", **changes: object) -> Generation:
    return generation(request_id, tier=tier, budget=TIERS.budget_of(tier), **changes)


async def stands(around: Fleet, *, rate: float | None = None, queued: int = 0, row_s: float | None = None) -> None:
    """Its instances say so from now on, and the gateway has heard it."""
    for prefiller in around.prefillers:
        prefiller.prefill_rate, prefiller.num_queued_tokens = rate, queued
    for decoder in around.decoders:
        decoder.row_s = row_s
    told = {instance.uuid: instance.status() for instance in (*around.prefillers, *around.decoders)}

    def is_heard() -> bool:
        return all(instance.status == told[instance.uuid] for instance in around.dispatcher.alive())

    await until(is_heard, "the gateway has heard of it")


def counted(around: Fleet) -> Mapping[tuple[str, ...], float]:
    """Counters and counts of the gateway's metrics, by name and label values."""
    families = text_string_to_metric_families(around.dispatcher.metrics.render().decode())
    samples = [sample for family in families for sample in family.samples if "bucket" not in sample.name]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def order(around: Fleet) -> list[str]:
    return [generate.request_id for generate in around.decoder.all_heard(Generate)]


# ---- at the door -----------------------------------------------------------------------------------------------


@on_loop
async def test_a_request_that_would_come_late_is_refused_and_one_with_time_is_served(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        await stands(around, rate=1000.0, queued=3000)
        with pytest.raises(BudgetExceeded, match=r"would take about 3,\d\d\d ms, of a budget of 2,000 ms") as refused:
            await progress_of(around.dispatcher, generation(budget=Budget(ttft_s=2.0)))
        assert refused.value.retry_after_s == pytest.approx(1.0, abs=0.2)
        with pytest.raises(BudgetExceeded, match="on an idle fleet too"):
            await progress_of(around.dispatcher, generation(budget=Budget(ttft_s=0.01)))
        assert around.prefiller.all_heard(Reserve) == []
        await is_answered(around.dispatcher, generation(budget=Budget(ttft_s=5.0)))
        await is_answered(around.dispatcher, generation())
        counts = counted(around)
        assert counts["headrace_refusals_total", "ttft", "interactive"] == 1
        assert counts["headrace_refusals_total", "ttft_out_of_reach", "interactive"] == 1
        assert counts["headrace_requests_total", "overloaded", "interactive"] == 2
        assert counts["headrace_budgets_total", "ttft", "held", "interactive"] == 1
        assert counts["headrace_admission_ttft_prediction_error_seconds_count", "sooner"] == 1


@on_loop
async def test_those_who_wait_in_the_line_count_for_those_who_come(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        await stands(around, rate=100.0)
        around.prefiller.num_waits = 10**6
        waiting = [ask(around.dispatcher, generation(f"r{nth}", budget=Budget(ttft_s=2.1))) for nth in range(5)]
        await until(lambda: around.dispatcher.statistics().num_queued["interactive"] == 5, "they wait")
        with pytest.raises(BudgetExceeded, match=r"take about 2,3\d\d ms, .* 5 requests wait before it"):
            await progress_of(around.dispatcher, generation("late", budget=Budget(ttft_s=2.2)))
        with pytest.raises(BudgetExceeded):
            await progress_of(around.dispatcher, generation("behind", tier="flex", budget=Budget(ttft_s=2.2)))
        around.prefiller.num_waits = 0
        await asyncio.gather(*waiting)


@on_loop
async def test_a_budget_that_was_missed_is_counted_and_the_request_served(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.token_s = 0.03
        await stands(around, row_s=0.001)
        await is_answered(around.dispatcher, generation(budget=Budget(ttft_s=0.01, tpot_s=0.01)))
        counts = counted(around)
        assert counts["headrace_budgets_total", "ttft", "missed", "interactive"] == 1
        assert counts["headrace_budgets_total", "tpot", "missed", "interactive"] == 1
        assert counts["headrace_tpot_prediction_error_seconds_count", "later"] == 1


@on_loop
async def test_a_flood_of_background_work_leaves_the_interactive_line_as_it_is(tmp_path: Path) -> None:
    async with fleet(tmp_path, max_queued=2) as around:
        around.prefiller.num_waits = 10**6
        waiting = [ask(around.dispatcher, generation(f"flex-{nth}", tier="flex")) for nth in range(2)]
        await until(lambda: around.dispatcher.statistics().num_queued["flex"] == 2, "they wait")
        with pytest.raises(Overloaded, match="2 requests wait already, of at most 2"):
            await progress_of(around.dispatcher, generation("flex-2", tier="flex"))
        waiting += [ask(around.dispatcher, generation(f"r{nth}")) for nth in range(2)]
        await until(lambda: around.dispatcher.statistics().num_queued["interactive"] == 2, "they wait too")
        around.prefiller.num_waits = 0
        await asyncio.gather(*waiting)
        assert counted(around)["headrace_refusals_total", "queue", "flex"] == 1


# ---- in the line -----------------------------------------------------------------------------------------------


@on_loop
async def test_who_is_due_first_is_placed_first(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.max_running = 0
        budgets = {"first": None, "late": 9.0, "early": 4.0}
        waiting = [
            ask(around.dispatcher, generation(name, budget=Budget(ttft_s=ttft_s))) for name, ttft_s in budgets.items()
        ]
        # Each of them was the first when it came, and was offered.
        await until(lambda: order(around)[-3:] == ["early"] * 3, "only the first in line is offered again")
        around.decoder.max_running = 64
        await asyncio.gather(*waiting)
        assert order(around)[-3:] == ["early", "late", "first"]


@on_loop
async def test_background_prompts_leave_the_next_lease_to_those_that_are_to_come_in_time(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.prefiller.num_waits = 10**6
        first = ask(around.dispatcher, generation("interactive", budget=Budget(ttft_s=2.0)))
        await around.prefiller.hears(Reserve)
        await until(lambda: around.dispatcher._exchange.line._lacks_room("interactive"), "it lacks a lease")
        second = ask(around.dispatcher, generation("flex", tier="flex"))
        await around.prefiller.hears(Reserve, 5)
        assert {reserve.request_id for reserve in around.prefiller.all_heard(Reserve)} == {"interactive"}
        around.prefiller.num_waits = 0
        await asyncio.gather(first, second)


# ---- beside others ---------------------------------------------------------------------------------------------


@on_loop
async def test_background_work_waits_while_it_would_break_the_pace_of_interactive_streams(tmp_path: Path) -> None:
    async with fleet(tmp_path, tiers=TIERS) as around:
        await stands(around, row_s=0.01)  # two rows keep 25 ms
        around.decoder.token_s = 0.03
        long = ask(around.dispatcher, of_tier("interactive", max_tokens=10))
        await until(lambda: around.dispatcher.statistics().num_running == 1, "it runs")
        flex = ask(around.dispatcher, of_tier("flex", "flex"))
        beside = ask(around.dispatcher, of_tier("beside"))
        await beside
        assert order(around) == ["interactive", "beside"]
        await asyncio.gather(long, flex)
        assert order(around) == ["interactive", "beside", "flex"]


@on_loop
async def test_background_work_that_is_alone_runs_however_slow_it_is_and_alone_it_stays(tmp_path: Path) -> None:
    async with fleet(tmp_path, tiers=TIERS) as around:
        await stands(around, row_s=5.0)
        around.decoder.token_s = 0.01
        await asyncio.gather(*(is_answered(around.dispatcher, of_tier(f"r{nth}", "flex")) for nth in range(3)))
        assert order(around) == ["r0", "r1", "r2"]
        assert around.decoder.counts["accepted"] == 3


@on_loop
async def test_an_interactive_request_waits_for_a_decoder_that_keeps_its_tiers_pace(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2, tiers=TIERS) as around:
        await stands(around, row_s=0.01)
        for decoder in around.decoders:
            decoder.token_s = 0.02
        running = [ask(around.dispatcher, of_tier(f"r{nth}", max_tokens=20)) for nth in range(6)]
        await until(lambda: sum(len(decoder.running) for decoder in around.decoders) == 4, "two run at each")
        await asyncio.sleep(0.1)
        assert [decoder.counts["accepted"] for decoder in around.decoders] == [2, 2]
        await asyncio.gather(*running)
        assert [decoder.counts["accepted"] for decoder in around.decoders] == [3, 3]


@on_loop
async def test_a_stream_that_lost_its_decoder_goes_on_whatever_the_pace(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2, tiers=TIERS) as around:
        await stands(around, row_s=0.01)
        for decoder in around.decoders:
            decoder.token_s = 0.03
        running = [ask(around.dispatcher, of_tier(f"r{nth}", max_tokens=12)) for nth in range(4)]
        await until(lambda: all(len(decoder.running) == 2 for decoder in around.decoders), "two run at each")
        await around.decoders[0].die()
        await until(lambda: len(around.decoders[1].running) == 4, "four run at the other one")
        around.decoders[0].running.clear()
        await asyncio.gather(*running)
