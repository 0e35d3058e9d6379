"""Where requests go as the gateway learns: prefixes, rates, queues, transfers. What instances tell is scripted."""

import asyncio
from dataclasses import replace
from pathlib import Path

from gateway_fleet import QUICK, Fleet, ask, fleet, generation, is_answered
from scripted_instance import ScriptedDecoder, ScriptedInstance, on_loop, until

from headrace.gateway.generation import Generation
from headrace.protocol.control import Generate, Prefilling

SHARED = tuple(range(100, 260))  # ten pages
SHORT = tuple(range(8))


def asked(request_id: str, *, prefix: tuple[int, ...] = SHARED, last: int = 0, num_own: int = 20) -> Generation:
    """A prefix, and some tokens of its own."""
    return generation(request_id, token_ids=(*prefix, *[last] * num_own))


async def tells(around: Fleet, *instances: ScriptedInstance, rate: float | None = None, queued: int = 0) -> None:
    """These say so from now on, and the gateway has heard it."""
    for instance in instances:
        instance.prefill_rate, instance.num_queued_tokens = rate, queued

    def is_heard() -> bool:
        stand = {alive.uuid: alive.status for alive in around.dispatcher.alive()}
        said = [stand[instance.uuid] for instance in instances]
        speed = None if rate is None else Prefilling(step_s=0.0, rate=rate, chunk_tokens=64)
        return all(one is not None and (one.prefilling, one.num_queued_tokens) == (speed, queued) for one in said)

    await until(is_heard, "the gateway has heard of it")


def where(decoder: ScriptedDecoder) -> list[str]:
    return [generate.request_id for generate in decoder.all_heard(Generate)]


def is_local(decoder: ScriptedDecoder, request_id: str) -> bool:
    (generate,) = [one for one in decoder.all_heard(Generate) if one.request_id == request_id]
    return generate.prefill is None


@on_loop
async def test_the_same_prefix_goes_to_the_same_decoder(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=0, decoders=2, role="colocated") as around:
        await is_answered(around.dispatcher, asked("first"))
        with_it = next(decoder for decoder in around.decoders if decoder.all_heard(Generate))
        with_it.hit_tokens = 160
        for nth in range(4):
            await is_answered(around.dispatcher, asked(f"r{nth}", last=nth))
        assert where(with_it) == ["first", "r0", "r1", "r2", "r3"]


@on_loop
async def test_the_same_prefix_goes_to_the_same_prefiller(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=2) as around:
        for nth in range(5):
            await is_answered(around.dispatcher, asked(f"r{nth}", last=nth))
        assert sorted(len(prefiller.used) for prefiller in around.prefillers) == [0, 5]


@on_loop
async def test_what_a_prefiller_was_just_given_counts_before_it_says_so(tmp_path: Path) -> None:
    quiet = replace(QUICK, silence_s=60.0)
    async with fleet(tmp_path, prefillers=2, timings=quiet, status_s=60.0) as around:
        around.decoder.is_stalled = True
        for prefiller in around.prefillers:
            prefiller.tells_prefilled = False
        both = [ask(around.dispatcher, asked(f"r{nth}", prefix=(nth, *SHARED))) for nth in range(2)]
        await around.decoder.hears(Generate, 2)
        around.decoder.is_stalled = False
        await asyncio.gather(*both)
        assert [len(prefiller.used) for prefiller in around.prefillers] == [1, 1]


@on_loop
async def test_a_stale_prefix_is_corrected_by_what_the_decoder_found(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=0, decoders=2, role="colocated") as around:
        await tells(around, *around.decoders, rate=1000.0)
        await is_answered(around.dispatcher, asked("first"))
        had_it = next(decoder for decoder in around.decoders if decoder.all_heard(Generate))
        other = next(decoder for decoder in around.decoders if decoder is not had_it)
        had_it.is_stalled = True  # it has lost the prefix, and says so with Accepted
        second = ask(around.dispatcher, asked("second"))
        await had_it.hears(Generate, 2)
        await is_answered(around.dispatcher, asked("third"))
        assert where(other) == ["third"]
        had_it.is_stalled = False
        await second


@on_loop
async def test_a_busy_decoder_is_left_for_an_idle_one_when_recomputing_is_cheaper_than_waiting(tmp_path: Path) -> None:
    async with fleet(tmp_path, prefillers=0, decoders=2, role="colocated") as around:
        await tells(around, *around.decoders, rate=1000.0)
        await is_answered(around.dispatcher, asked("first"))
        has_it = next(decoder for decoder in around.decoders if decoder.all_heard(Generate))
        has_it.hit_tokens = 160
        await tells(around, has_it, rate=1000.0, queued=50)
        await is_answered(around.dispatcher, asked("second"))
        assert where(has_it) == ["first", "second"]
        await tells(around, has_it, rate=1000.0, queued=500)
        await is_answered(around.dispatcher, asked("third"))
        assert where(has_it) == ["first", "second"]


@on_loop
async def test_short_prompts_stay_at_a_decoder_that_has_measured_and_long_ones_go(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.decoder.token_s = 0.02  # the prefiller's word is here first: the transfer took 2 ms more
        await is_answered(around.dispatcher, asked("unmeasured", prefix=SHORT, num_own=1))
        await tells(around, around.decoder, around.prefiller, rate=10_000.0)
        await is_answered(around.dispatcher, asked("short", prefix=SHORT, num_own=1))
        await is_answered(around.dispatcher, asked("long", prefix=(7, *SHARED)))
        await tells(around, around.decoder, rate=0.0)  # it would break its budget
        await is_answered(around.dispatcher, asked("over", prefix=SHORT, num_own=1))
        local = {request_id: is_local(around.decoder, request_id) for request_id in where(around.decoder)}
        assert local == {"unmeasured": False, "short": True, "long": False, "over": False}


@on_loop
async def test_a_long_prompt_stays_when_the_prefillers_queue_is_longer_still(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        await tells(around, around.decoder, rate=1000.0)
        await tells(around, around.prefiller, rate=1000.0, queued=100)
        await is_answered(around.dispatcher, asked("goes"))
        await tells(around, around.prefiller, rate=1000.0, queued=1000)
        await is_answered(around.dispatcher, asked("stays", prefix=(7, *SHARED)))
        assert (is_local(around.decoder, "goes"), is_local(around.decoder, "stays")) == (False, True)


@on_loop
async def test_one_prefiller_feeds_its_decoders_evenly(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=3) as around:
        for decoder in around.decoders:
            decoder.token_s = 0.01
        await is_answered(around.dispatcher, asked("first"))
        await asyncio.gather(*(is_answered(around.dispatcher, asked(f"r{nth}", last=nth)) for nth in range(12)))
        counts = sorted(decoder.counts["accepted"] for decoder in around.decoders)
        assert counts[0] >= 4 and sum(counts) == 13


@on_loop
async def test_a_decoder_that_comes_back_has_nothing(tmp_path: Path) -> None:
    async with fleet(tmp_path, timings=QUICK) as around:
        await is_answered(around.dispatcher, asked("first"))
        affinity = around.dispatcher._exchange.observed.affinity
        assert repr(affinity) == "Affinity(2 instances, 22 pages)"
        around.decoder.is_hung = True
        await around.knows(1)
        around.decoder.is_hung = False
        await around.knows(2)
        assert repr(affinity) == "Affinity(1 instances, 11 pages)"
