"""Requests that are closed or cancelled, at every place where they wait: whatever they held is given back."""

import asyncio
import random
from pathlib import Path

import pytest
from gateway_fleet import (
    ask,
    fleet,
    generation,
    is_answered,
)
from scripted_instance import on_loop, until

from headrace.protocol.control import (
    Abort,
    Accepted,
    Generate,
    Granted,
    Reserve,
    ReturnLease,
    Tokens,
)


@pytest.mark.parametrize(
    "place",
    ["in line", "waiting for a lease", "lease in flight", "waiting for room", "offered", "running", "at the last"],
)
def test_whoever_leaves_gives_back_everything_wherever_the_request_is(tmp_path: Path, place: str) -> None:
    async def play() -> None:
        async with fleet(tmp_path) as around:
            prefiller, decoder = around.prefiller, around.decoder
            match place:
                case "in line" | "waiting for a lease":
                    prefiller.num_waits = 10**6
                case "lease in flight":
                    prefiller.grant_delay_s = 0.1
                case "waiting for room":
                    decoder.max_running = 0
                case "offered":
                    decoder.accept_delay_s = 0.1
                case "running":
                    decoder.token_s = 0.02
            ahead = [ask(around.dispatcher, generation("ahead"))] if place == "in line" else []
            asked = ask(around.dispatcher, generation(max_tokens=200))
            match place:
                case "in line":
                    await until(lambda: around.dispatcher.statistics().num_queued["interactive"] == 2)
                case "waiting for a lease" | "lease in flight":
                    await prefiller.hears(Reserve)
                case "waiting for room":
                    await decoder.hears(Generate, 2)
                case "offered":
                    await decoder.hears(Generate)
                case _:
                    await until(lambda: decoder.counts["accepted"] == 1)
            if place == "at the last":
                await asked
            for task in (asked, *ahead):
                task.cancel()
            await asyncio.gather(asked, *ahead, return_exceptions=True)
            assert sum(around.dispatcher.statistics().num_queued.values()) == 0
            assert around.dispatcher.statistics().num_running == 0
            if place in ("offered", "running"):
                await decoder.hears(Abort)
            if place == "lease in flight":
                await prefiller.hears(ReturnLease)

    asyncio.run(play())


@on_loop
async def test_a_stream_that_is_closed_between_two_tokens_is_aborted(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.token_s = 0.01
        stream = around.dispatcher.generate(generation(max_tokens=200))
        await anext(stream)
        await stream.aclose()
        await around.decoder.hears(Abort)


@on_loop
async def test_a_request_that_nobody_iterates_over_does_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        await around.dispatcher.generate(generation()).aclose()
        assert around.prefiller.all_heard(Reserve) == []


@on_loop
async def test_words_about_requests_that_are_over_are_answered_by_closing_what_they_open(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        prefiller, decoder = around.prefiller, around.decoder
        prefiller.granted["9"] = "gone"
        prefiller.say(Granted(sender=prefiller.uuid, request_id="gone", lease="9"))
        assert (await prefiller.hears(ReturnLease)).lease == "9"
        decoder.say(Accepted(sender=decoder.uuid, request_id="gone", uses_lease=True, cached_tokens=0))
        assert (await decoder.hears(Abort)).request_id == "gone"
        decoder.say(Tokens(sender=decoder.uuid, request_id="gone", index=0, token_ids=(1,), cached_tokens=0))
        await decoder.hears(Abort, 2)
        assert around.dispatcher.statistics().num_events["late"] == 3


@on_loop
async def test_two_hundred_requests_with_random_cancels_leave_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(20)
    async with fleet(tmp_path, prefillers=2, decoders=2) as around:
        for prefiller in around.prefillers:
            prefiller.max_leases, prefiller.grant_delay_s = 3, 0.001
        for decoder in around.decoders:
            decoder.max_running, decoder.accept_delay_s, decoder.token_s = 16, 0.001, 0.002
            decoder.num_failing_tickets = 5

        async def one(nth: int) -> str:
            asked = generation(
                f"r{nth}",
                token_ids=tuple(range(1 + nth)),
                max_tokens=1 + nth % 7,
                tier=("interactive", "flex")[nth % 2],
            )
            task = asyncio.create_task(is_answered(around.dispatcher, asked))
            if nth % 3 == 0:
                await asyncio.sleep(rng.random() * 0.8)
                task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
                raise outcome
            return "cancelled" if outcome is not None else "answered"

        outcomes = await asyncio.gather(*(one(nth) for nth in range(200)))
        assert outcomes.count("answered") >= 133 and outcomes.count("cancelled") > 10
