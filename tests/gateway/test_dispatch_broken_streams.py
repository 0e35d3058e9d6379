"""Streams whose decoder dies, hangs, leaves or contradicts itself: no token is lost, none comes twice."""

import asyncio
import random
from contextlib import aclosing
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
from scripted_instance import on_loop, token_at, tokens_after, until

from headrace.gateway.generation import GenerationFailed, Overloaded
from headrace.protocol.control import (
    Abort,
    Generate,
)


@on_loop
async def test_a_stream_goes_on_at_another_decoder_when_its_own_dies(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as around:
        dying, other = around.decoders
        deaths: list[asyncio.Task[None]] = []

        def die_at_the_third(generate: Generate, index: int) -> None:
            if index == 2 and not deaths:
                deaths.append(asyncio.create_task(dying.die()))

        dying.before_token = die_at_the_third
        dying.token_s = other.token_s = 0.01
        await is_answered(around.dispatcher, generation(max_tokens=8))
        resumed = other.all_heard(Generate)[0]
        num_before = len(resumed.token_ids) - len(A_PROMPT)
        assert num_before in (2, 3) and resumed.max_tokens == 8 - num_before
        assert resumed.token_ids[len(A_PROMPT) :] == tuple(tokens_after(len(A_PROMPT), num_before))
        assert resumed.num_prompt_tokens == len(A_PROMPT)
        dying.running.clear()
        await deaths[0]


@on_loop
async def test_a_decoder_that_says_goodbye_is_left_at_once(tmp_path: Path) -> None:
    patient = replace(QUICK, silence_s=60.0, beat_s=60.0)
    async with fleet(tmp_path, decoders=2, timings=patient) as around:
        leaving, other = around.decoders
        leaving.token_s = 0.01
        asked = ask(around.dispatcher, generation(max_tokens=30))
        await until(lambda: bool(leaving.running))
        await asyncio.sleep(0.05)
        await leaving.leave()
        tokens, last = await asyncio.wait_for(asked, 2)
        assert tokens == tokens_after(len(A_PROMPT), 30) and last.num_tokens == 30
        assert len(other.all_heard(Generate)) == 1
        leaving.running.clear()


@on_loop
async def test_a_decoder_that_hangs_is_left_after_its_silence_and_may_come_back(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as around:
        hanging = around.decoders[0]
        hanging.is_stalled = True
        asked = ask(around.dispatcher, generation(max_tokens=8))
        await until(lambda: bool(hanging.running))
        hanging.is_hung = True
        tokens, _ = await asked
        assert tokens == tokens_after(len(A_PROMPT), 8)
        await around.knows(2)
        hanging.is_hung = hanging.is_stalled = False
        await around.knows(3)
        await hanging.hears(Abort)  # what it still ran when it woke is nobody's any more
        await until(lambda: not hanging.running)


@on_loop
async def test_a_restarted_decoder_takes_the_stream_of_the_one_before(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=0) as around:
        around.decoder.token_s = 0.01
        asked = ask(around.dispatcher, generation(max_tokens=20))
        await until(lambda: around.decoder.counts["accepted"] == 1)
        await asyncio.sleep(0.05)
        await around.decoder.die()
        around.decoder.running.clear()
        await around.knows(0)
        assert not around.dispatcher.is_ready()
        await around.add_decoder()
        assert (await asked)[0] == tokens_after(len(A_PROMPT), 20)


@on_loop
async def test_when_no_decoder_comes_back_the_stream_fails_in_time(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.token_s = 0.01
        async with aclosing(around.dispatcher.generate(generation(max_tokens=100))) as stream:
            assert (await anext(stream)).token_ids == (token_at(len(A_PROMPT)),)
            await around.decoder.die()
            around.decoder.running.clear()
            with pytest.raises(GenerationFailed, match="no decoder came back within 0.4 s"):
                async for _ in stream:
                    pass


@on_loop
async def test_those_who_had_no_token_yet_are_told_to_come_back(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.max_running = 0
        waiting = [ask(around.dispatcher, generation(f"r{nth}")) for nth in range(3)]
        await around.decoder.hears(Generate)
        await around.decoder.die()
        for answer in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(answer, Overloaded) and answer.status == 503


@on_loop
async def test_a_stream_is_resumed_twice_and_no_more(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=4) as around:
        for decoder in around.decoders:
            decoder.skips = 1
        with pytest.raises(GenerationFailed, match="given up after 3 attempts") as failed:
            await progress_of(around.dispatcher, generation(max_tokens=10))
        assert failed.value.status == 500
        assert sum(decoder.counts["accepted"] for decoder in around.decoders) == 3


@on_loop
async def test_a_decoder_that_dies_after_its_last_token_costs_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        decoder, hold = around.decoder, asyncio.Event()

        async def say_all_but_finished(generate: Generate) -> None:
            for index in range(generate.max_tokens):
                decoder._say_tokens(generate.request_id, len(generate.token_ids), index)
            await hold.wait()

        decoder._generate = say_all_but_finished  # type: ignore[method-assign]
        stream, tokens = around.dispatcher.generate(generation()), []
        while len(tokens) < 5:
            tokens += (await anext(stream)).token_ids
        await decoder.die()
        decoder.running.clear()
        (last,) = [progress async for progress in stream]
        assert tokens == tokens_after(len(A_PROMPT), 5)
        assert (last.token_ids, last.finish_reason, last.num_tokens) == ((), "length", 5)


@on_loop
async def test_tokens_that_are_said_twice_are_passed_on_once(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.repeats = True
        await is_answered(around.dispatcher, generation(max_tokens=20))


@on_loop
async def test_a_gap_in_the_tokens_is_filled_by_another_decoder(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as around:
        around.decoders[0].skips = 3
        around.decoders[0].token_s = 0.01
        await is_answered(around.dispatcher, generation(max_tokens=10))
        await around.decoders[0].hears(Abort)
        assert len(around.decoders[1].all_heard(Generate)[0].token_ids) == len(A_PROMPT) + 3


@on_loop
async def test_a_last_token_that_never_came_is_noticed(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as around:
        around.decoders[0].skips = 4
        await is_answered(around.dispatcher, generation(max_tokens=5))
        assert around.decoders[1].all_heard(Generate)[0].max_tokens == 1


@on_loop
async def test_an_error_of_the_decoder_reaches_the_client_after_its_tokens(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.ends_with = ("error", "the step failed: out of numbers")
        told: list[int] = []
        stream = around.dispatcher.generate(generation())
        while len(told) < 5:
            told += (await anext(stream)).token_ids
        with pytest.raises(GenerationFailed, match="the step failed: out of numbers") as failed:
            await anext(stream)
        assert told == tokens_after(len(A_PROMPT), 5)
        assert failed.value.status == 500


@on_loop
async def test_an_abort_that_nobody_asked_for_is_a_lost_decoder(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as around:
        around.decoders[0].ends_with = ("abort", "")
        around.decoders[0].stops_after = 2
        await is_answered(around.dispatcher, generation())
        assert around.decoders[1].counts["accepted"] == 1


@on_loop
async def test_an_abort_after_the_last_token_costs_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.ends_with = ("abort", "")
        await is_answered(around.dispatcher, generation())
        assert around.decoder.counts["accepted"] == 1


@on_loop
async def test_a_stalled_stream_ends_at_its_deadline_and_is_aborted(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.is_stalled = True
        with pytest.raises(GenerationFailed, match="the deadline of 0.15 s passed") as failed:
            await progress_of(around.dispatcher, generation(deadline_s=0.15))
        assert failed.value.status == 504
        await around.decoder.hears(Abort)
        await until(lambda: not around.decoder.running)


@on_loop
async def test_in_a_storm_of_deaths_every_request_ends_once_and_most_end_well(tmp_path: Path) -> None:
    rng = random.Random(5)
    async with fleet(tmp_path, prefillers=2, decoders=3) as around:
        living = list(around.decoders)
        for decoder in living:
            decoder.token_s, decoder.num_failing_tickets = 0.003, 3

        async def one(nth: int) -> bool:
            await asyncio.sleep(rng.random())
            try:
                await is_answered(around.dispatcher, generation(f"r{nth}", max_tokens=1 + nth % 40))
            except (GenerationFailed, Overloaded):
                return False
            return True

        async def storm() -> None:
            for _ in range(6):
                await asyncio.sleep(0.15)
                victim = living.pop(rng.randrange(len(living)))
                await victim.die()
                victim.running.clear()
                living.append(await around.add_decoder())
                living[-1].token_s = 0.003

        storming = asyncio.create_task(storm())
        ends = await asyncio.gather(*(one(nth) for nth in range(80)))
        await storming
        assert ends.count(True) > 60
        for decoder in living:
            await until(lambda heard=decoder: not heard.running)  # type: ignore[misc]
        await around.knows(5)
        await is_answered(around.dispatcher, generation())
