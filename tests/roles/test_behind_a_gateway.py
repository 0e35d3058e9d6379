"""A real gateway's dispatch side and real roles: storms, pools that are too small, who is healthy, what is counted."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gateway_world import GatewayWorld, opened
from role_world import PAGE
from scripted_gateway import until
from tiny_checkpoint import Reference, prompt

from headrace.gateway.options import DEFAULT_TIMINGS
from headrace.protocol.control import Status
from headrace.roles import links

BOUND_S, MARGIN_S = 1.0, 3.0  # docs/protocol.md; what a machine with other things to do may add
NUM_TOKENS = 6


async def texts_of(around: GatewayWorld, name: str, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    asked = (around.gateway.text(f"{name}-{nth}", each, NUM_TOKENS) for nth, each in enumerate(prompts))
    return await asyncio.gather(*asked)


def test_of_500_requests_9_in_10_leave_wherever_they_are_and_nothing_is_left_of_them(
    checkpoint: Path, tmp_path: Path, reference: Reference
) -> None:
    """Of those that leave a third waits, a third has just been admitted, a third decodes."""
    prompts = [prompt(length) for length in (3, 8, 13, 21, 30)]
    right = [reference.text(each, NUM_TOKENS) for each in prompts]
    draw = random.Random(3)

    async def play() -> None:
        async with opened(checkpoint, tmp_path, reference, max_queued=600) as around:
            prefiller = await around.prefiller()
            decoder = await around.decoder(prefiller, num_pages=64)
            free = [one.status.num_free_pages for one in (prefiller, decoder)]

            async def one(nth: int) -> None:
                place, name = nth % len(prompts), f"r{nth}"
                if nth % 10 == 0:
                    assert await around.gateway.text(name, prompts[place], NUM_TOKENS) == right[place]
                elif nth % 3 == 0:
                    leaves_after = 1 + draw.randrange(NUM_TOKENS - 1)
                    text = await around.gateway.text(name, prompts[place], NUM_TOKENS, leaves_after=leaves_after)
                    assert text == right[place][: len(text)]
                else:
                    # A beginning of its own, so that it is fetched.
                    asking = asyncio.create_task(around.gateway.text(name, [nth % 250, *prompts[place]], NUM_TOKENS))
                    if nth % 3 == 1:
                        await asyncio.sleep(draw.random())
                    else:
                        while name not in decoder.role._served and not asking.done():
                            await asyncio.sleep(0.01)
                    asking.cancel()
                    await asyncio.wait([asking])

            await asyncio.gather(*(one(nth) for nth in range(500)))
            await around.all_idle(BOUND_S + MARGIN_S)
            assert [one.status.num_free_pages for one in (prefiller, decoder)] == free
            failed = decoder.counter("tickets_failed_cancelled_total")
            assert failed > 20 and decoder.counter("requests_finished_total") > 250, "it was no storm"
            assert decoder.counter("revokes_total") == 0, "an honest prefiller was given up"
            async with asyncio.timeout(10.0):
                assert await texts_of(around, "afterwards", prompts * 4) == right * 4

    asyncio.run(play())


def test_pools_that_hold_one_request_each_serve_many_one_after_the_other(
    checkpoint: Path, tmp_path: Path, reference: Reference
) -> None:
    """Two prefillers, two decoders, and everybody's pages full all the time: nobody waits for somebody who waits."""
    prompts = [prompt(30, seed=seed) for seed in range(12)]
    right = [reference.text(each, NUM_TOKENS) for each in prompts]

    async def play() -> None:
        async with opened(checkpoint, tmp_path, reference) as around:
            prefillers = [await around.prefiller(num_pages=12) for _ in range(2)]
            decoders = [await around.decoder(*prefillers, num_pages=12) for _ in range(2)]
            assert await texts_of(around, "r", prompts) == right
            assert sum(one.counter("tickets_ready_total") for one in decoders) > 0
            assert around.gateway.dispatcher.statistics().num_events.get("no_room", 0) > 0, (
                "the pools were not too small"
            )

    asyncio.run(play())


def test_a_dead_prefiller_makes_nobody_unhealthy_and_is_seen_not_to_be_reached(
    checkpoint: Path, tmp_path: Path, reference: Reference
) -> None:
    token_ids = prompt(30)
    right = reference.text(token_ids, NUM_TOKENS)

    async def play() -> None:
        async with opened(checkpoint, tmp_path, reference) as around:
            dispatcher = around.gateway.dispatcher
            assert not dispatcher.is_ready(), "nobody is there"
            prefiller = await around.prefiller()
            assert not dispatcher.is_ready(), "nobody decodes"
            decoder = await around.decoder(prefiller)
            assert dispatcher.is_ready() and decoder.gauge("prefillers_ready") == 1
            await prefiller.stop()
            await until(lambda: len(dispatcher.alive()) == 1, "it has left")
            assert dispatcher.is_ready()
            await until(lambda: decoder.gauge("prefillers_ready") == 0, "no byte can be moved from it")
            assert await around.gateway.text("alone", token_ids, NUM_TOKENS) == right
            await until(lambda: told_of(around, decoder.uuid).gauges["prefillers_ready"] == 0, "the gateway knows")

    asyncio.run(play())


def told_of(around: GatewayWorld, uuid: str) -> Status:
    return around.gateway.status[uuid]


def test_a_forward_pass_far_longer_than_the_silence_costs_nobody_his_place(
    checkpoint: Path, tmp_path: Path, reference: Reference
) -> None:
    """As one of 30 s would be with its 2 s: a step hangs at the prefiller and one at the decoder, and meanwhile a
    request comes and is given a lease, pages and a ticket."""
    silence_s = 0.5
    prompts = [prompt(14, seed=seed) for seed in range(3)]  # two have leases at one time
    lengths = (60, NUM_TOKENS, NUM_TOKENS)
    right = [reference.text(each, length) for each, length in zip(prompts, lengths, strict=True)]

    async def play() -> None:
        timings = replace(DEFAULT_TIMINGS, beat_s=0.05, silence_s=silence_s)
        async with opened(checkpoint, tmp_path, reference, timings=timings) as around:
            around.world.patch.setattr(links, "SILENCE_S", silence_s)
            prefiller = await around.prefiller()
            decoder = await around.decoder(prefiller)
            decodes = asyncio.create_task(around.gateway.text("decodes", prompts[0], lengths[0]))
            await until(lambda: decoder.status.counters["decode_tokens_total"] > 0, "it decodes")
            decoder.model.hold()
            prefiller.model.hold_after(0)
            is_prefilled = asyncio.create_task(around.gateway.text("is prefilled", prompts[1], NUM_TOKENS))
            await until(lambda: prefiller.model.num_waiting == decoder.model.num_waiting == 1, "both steps hang")
            comes = asyncio.create_task(around.gateway.text("comes meanwhile", prompts[2], NUM_TOKENS))
            await until(lambda: decoder.gauge("tickets_open") == 2, "it has its ticket")
            await asyncio.sleep(4 * silence_s)
            assert len(around.gateway.dispatcher.alive()) == 2
            for one in (prefiller, decoder):
                one.model.open()
            assert list(await asyncio.gather(decodes, is_prefilled, comes)) == right
            assert not around.gateway.dispatcher.statistics().num_events.keys() & {"lost", "need_prefill"}
            assert decoder.counter("tickets_ready_total") == len(prompts)

    asyncio.run(play())


def test_tokens_by_source_add_up_to_the_prompts(checkpoint: Path, tmp_path: Path, reference: Reference) -> None:
    """All but each prompt's last token, which is a row of the first decode step: found at the decoder or the prefiller,
    computed there, or computed at the decoder. What was sent is computed once."""
    stem = prompt(4 * PAGE)
    prompts = [[*stem, 9], [*stem, 9], [*stem, *prompt(7)], prompt(30, seed=2)]

    async def play() -> None:
        async with opened(checkpoint, tmp_path, reference) as around:
            prefiller = await around.prefiller()
            decoder = await around.decoder(prefiller)

            async def asked(name: str, token_ids: Sequence[int]) -> tuple[float, float, float]:
                before = by_source(around)
                assert await around.gateway.text(name, token_ids, NUM_TOKENS) == reference.text(token_ids, NUM_TOKENS)
                await around.all_idle(BOUND_S + MARGIN_S)
                found, there, here = (now - so_far for now, so_far in zip(by_source(around), before, strict=True))
                assert found + there + here == len(token_ids) - 1, (name, found, there, here)
                return found, there, here

            assert await asked("cold", prompts[0]) == (0, 16, 0)
            assert await asked("found here", prompts[1]) == (16, 0, 0)
            assert await asked("found in part", prompts[2]) == (16, 6, 0)
            await decoder.stop()
            await around.decoder(prefiller)
            await until(lambda: len(around.gateway.status) == 2, "the new one alone is left")
            assert await asked("found there", prompts[0]) == (16, 0, 0)
            await prefiller.stop()
            await until(lambda: len(around.gateway.status) == 1, "nobody else is left")
            assert await asked("alone", prompts[3]) == (0, 0, len(prompts[3]) - 1)

    asyncio.run(play())


def by_source(around: GatewayWorld) -> tuple[float, float, float]:
    """Prompt tokens that were found, computed at a prefiller, and computed at a decoder."""
    counters = defaultdict[tuple[str, str], float](float)
    for one in around.world.running:
        if not one.task.done():
            for name, value in one.status.counters.items():
                counters[one.instance.options.role, name] += value
    found = counters["decoder", "cached_tokens_total"]
    return found, counters["prefiller", "prefill_tokens_total"], counters["decoder", "prefill_tokens_total"]
