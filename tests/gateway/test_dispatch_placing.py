"""How a request finds a lease and a decoder's pages, with instances that have no room, answer late, or never."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from gateway_fleet import (
    A_PROMPT,
    QUICK,
    ask,
    fleet,
    generation,
    is_answered,
    progress_of,
)
from scripted_instance import on_loop, tokens_after, until

from headrace.gateway.generation import GenerationFailed
from headrace.protocol.control import (
    Abort,
    Generate,
    Reserve,
    ReturnLease,
    UsePrefiller,
)

# ---- leases ------------------------------------------------------------------------------------------------------


@on_loop
async def test_a_prefiller_without_room_is_asked_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.prefiller.num_waits = 3
        await is_answered(around.dispatcher, generation())
        assert len(around.prefiller.all_heard(Reserve)) == 4
        assert around.dispatcher.statistics().num_events["wait"] == 3


@on_loop
async def test_another_prefiller_is_asked_at_once(tmp_path: Path) -> None:
    slow = replace(QUICK, lease_retry_s=5.0)
    async with fleet(tmp_path, prefillers=2, timings=slow) as around:
        for prefiller in around.prefillers:
            prefiller.num_waits = 1
        around.prefillers[1].num_waits = 0
        await asyncio.wait_for(is_answered(around.dispatcher, generation()), 2)
        assert len(around.prefillers[1].granted) == 1


@on_loop
async def test_only_the_head_of_each_tier_asks_for_a_lease(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.prefiller.num_waits = 10**6
        waiting = [
            ask(around.dispatcher, generation(f"{tier}-{nth}", tier=tier))
            for nth in range(3)
            for tier in ("interactive", "flex")
        ]
        await around.prefiller.hears(Reserve, 10)
        assert {reserve.request_id for reserve in around.prefiller.all_heard(Reserve)} == {"interactive-0", "flex-0"}
        around.prefiller.num_waits = 0
        await asyncio.gather(*waiting)


@on_loop
async def test_a_prefiller_that_never_answers_is_left_out(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.prefiller.is_mute = True
        await is_answered(around.dispatcher, generation())
        assert (await around.decoder.hears(Generate)).prefill is None


@on_loop
async def test_a_lease_that_is_granted_too_late_goes_back(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.prefiller.grant_delay_s = 0.5
        await is_answered(around.dispatcher, generation())
        await around.prefiller.hears(ReturnLease)


@on_loop
async def test_when_the_last_prefiller_dies_those_who_wait_for_it_go_on_without(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.prefiller.num_waits = 10**6
        waiting = ask(around.dispatcher, generation())
        await around.prefiller.hears(Reserve)
        await around.prefiller.die()
        assert (await waiting)[0] == tokens_after(len(A_PROMPT), 5)
        assert around.decoder.all_heard(Generate)[0].prefill is None


@on_loop
async def test_a_request_that_waits_too_long_for_a_lease_fails_at_its_deadline(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.prefiller.num_waits = 10**6
        with pytest.raises(GenerationFailed, match="waited for a .*prefiller") as failed:
            await progress_of(around.dispatcher, generation(deadline_s=0.1))
        assert failed.value.status == 504


# ---- room at decoders --------------------------------------------------------------------------------------------


@on_loop
async def test_without_room_the_lease_goes_back_and_the_decoder_is_asked_again(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.num_no_rooms = 3
        await is_answered(around.dispatcher, generation())
        assert len(around.prefiller.returned) == 3 and len(around.prefiller.used) == 1
        assert around.dispatcher.statistics().num_events["no_room"] == 3


@on_loop
async def test_another_decoder_is_asked_at_once(tmp_path: Path) -> None:
    slow = replace(QUICK, room_retry_s=5.0)
    async with fleet(tmp_path, decoders=2, timings=slow) as around:
        around.decoders[0].max_running = 0
        await asyncio.wait_for(is_answered(around.dispatcher, generation()), 2)
        assert around.decoders[1].counts["accepted"] == 1


@on_loop
async def test_nobody_overtakes_in_his_own_tier(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.num_no_rooms = 5
        waiting = [ask(around.dispatcher, generation(f"r{nth}")) for nth in range(3)]
        await asyncio.gather(*waiting)
        order = [generate.request_id for generate in around.decoder.all_heard(Generate)]
        assert order == ["r0"] * 6 + ["r1", "r2"]


@on_loop
async def test_background_work_does_not_take_the_room_that_interactive_work_waits_for(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.num_no_rooms = 10
        first = ask(around.dispatcher, generation("interactive"))
        await until(lambda: around.dispatcher._exchange.line._lacks_room("interactive"))
        second = ask(around.dispatcher, generation("flex", tier="flex"))
        await asyncio.gather(first, second)
        order = [generate.request_id for generate in around.decoder.all_heard(Generate)]
        assert order == ["interactive"] * 11 + ["flex"]


@on_loop
async def test_load_is_spread_over_decoders(tmp_path: Path) -> None:
    # Nobody says how it stands: the gateway counts what it gave to whom.
    quiet = replace(QUICK, silence_s=60.0)
    async with fleet(tmp_path, decoders=2, timings=quiet, status_s=60.0) as around:
        for decoder in around.decoders:
            decoder.token_s = 0.02
        await asyncio.gather(*(is_answered(around.dispatcher, generation(f"r{nth}")) for nth in range(8)))
        assert [decoder.counts["accepted"] for decoder in around.decoders] == [4, 4]


@on_loop
async def test_a_decoder_that_never_answers_is_left_for_another(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as around:
        around.decoders[0].is_mute = True
        await is_answered(around.dispatcher, generation())
        await around.decoders[0].hears(Abort)
        await around.prefiller.hears(ReturnLease)
        assert around.decoders[1].all_heard(Generate)[0].request_id == "request~1"


@on_loop
async def test_when_no_decoder_ever_answers_the_request_fails(tmp_path: Path) -> None:
    async with fleet(tmp_path, timings=replace(QUICK, answer_s=0.05)) as around:
        around.decoder.is_mute = True
        with pytest.raises(GenerationFailed, match="given up after 3 attempts: its decoder does not answer") as failed:
            await progress_of(around.dispatcher, generation())
        assert failed.value.status == 500


# ---- a ticket that failed ----------------------------------------------------------------------------------------


@on_loop
async def test_a_failed_ticket_is_followed_by_one_at_another_prefiller(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=2) as around:
        around.decoder.num_failing_tickets = 1
        await is_answered(around.dispatcher, generation())
        first = around.decoder.all_heard(Generate)[0].prefill
        answer = around.decoder.all_heard(UsePrefiller)[0].prefill
        assert first is not None and answer is not None and answer.prefiller != first.prefiller
        assert [len(prefiller.used) for prefiller in around.prefillers] == [1, 1]


@on_loop
async def test_without_another_prefiller_the_decoder_is_told_to_prefill_by_itself(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.num_failing_tickets = 1
        await is_answered(around.dispatcher, generation())
        assert [answer.prefill for answer in around.decoder.all_heard(UsePrefiller)] == [None]


@on_loop
async def test_a_prefiller_that_has_no_room_for_the_second_ticket_means_local(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=2) as around:
        around.decoder.num_failing_tickets = 1
        asked = generation()
        first = min(around.prefillers, key=lambda prefiller: prefiller.uuid)
        other = next(prefiller for prefiller in around.prefillers if prefiller is not first)
        other.num_waits = 1
        await is_answered(around.dispatcher, asked)
        assert [answer.prefill for answer in around.decoder.all_heard(UsePrefiller)] == [None]


@on_loop
async def test_a_second_lease_that_comes_after_the_decoders_patience_goes_back(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=2) as around:
        around.decoder.num_failing_tickets = 1
        around.decoder.token_s = 0.05
        first = min(around.prefillers, key=lambda prefiller: prefiller.uuid)
        other = next(prefiller for prefiller in around.prefillers if prefiller is not first)
        other.grant_delay_s = 0.15
        await is_answered(around.dispatcher, generation())
        assert around.decoder.counts["need unanswered"] == 1
        await other.hears(ReturnLease)


@on_loop
async def test_a_question_that_was_not_answered_does_not_stand_in_the_way_of_the_next(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=2) as around:
        around.decoder.num_failing_tickets = 2
        first = min(around.prefillers, key=lambda prefiller: prefiller.uuid)
        other = next(prefiller for prefiller in around.prefillers if prefiller is not first)
        other.is_mute = True
        await is_answered(around.dispatcher, generation())
        assert len(other.all_heard(Reserve)) == 2


@on_loop
async def test_the_second_prefiller_dies_while_it_is_asked(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=2, timings=replace(QUICK, need_prefill_s=2.0)) as around:
        around.decoder.num_failing_tickets = 1
        around.decoder.token_s = 0.02
        first = min(around.prefillers, key=lambda prefiller: prefiller.uuid)
        other = next(prefiller for prefiller in around.prefillers if prefiller is not first)
        other.is_mute = True
        asked = ask(around.dispatcher, generation(max_tokens=20))
        await other.hears(Reserve)
        await other.die()
        assert (await asked)[0] == tokens_after(len(A_PROMPT), 20)
        assert (await around.decoder.hears(UsePrefiller)).prefill is None


@on_loop
async def test_a_prefiller_whose_transfers_fail_again_and_again_is_asked_no_more(tmp_path: Path) -> None:
    """Until a while later. A refusal is no fault."""
    async with fleet(tmp_path, prefillers=2) as around:
        first = min(around.prefillers, key=lambda prefiller: prefiller.uuid)
        other = next(prefiller for prefiller in around.prefillers if prefiller is not first)
        for is_fault, num_asked in ((False, 2), (True, 2), (False, 0)):
            before = len(first.all_heard(Reserve))
            for nth in range(2):
                around.decoder.num_failing_tickets, around.decoder.fails_by_faults = min(1, num_asked), is_fault
                await is_answered(around.dispatcher, generation(f"{is_fault}-{num_asked}-{nth}"))
            assert len(first.all_heard(Reserve)) - before == num_asked
        assert len(other.all_heard(Reserve)) == 6


@on_loop
async def test_the_pace_that_a_refused_client_is_told_is_that_of_a_time_in_which_requests_wait(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        placed_at = around.dispatcher._exchange.placed_at
        for nth in range(3):
            await is_answered(around.dispatcher, generation(f"alone-{nth}"))
        assert len(placed_at) == 1
        around.decoder.accept_delay_s = 0.02  # one after the other
        waiting = [ask(around.dispatcher, generation(f"together-{nth}")) for nth in range(8)]
        await until(lambda: len(placed_at) > 1, "several were placed while others waited")
        await asyncio.gather(*waiting)
