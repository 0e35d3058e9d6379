"""What a decoder writes, wherever the prompt was computed, and how it tells where the time went."""

from collections.abc import Sequence

import numpy as np
import pytest
from role_world import CHUNK, NUM_PAGES, PAGE, Running, World, in_world, over_each_transport
from scripted_gateway import Asked, until
from tiny_checkpoint import prompt

from headrace.engine.requests import SamplingParams
from headrace.kvcache.prefix import page_hashes
from headrace.protocol.control import Accepted, Prefilled, PrefillFrom, ReturnLease, Sampling

LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, PAGE + 2, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK, 3 * CHUNK + 5)
NUM_TOKENS = 6
FIELDS = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 7}


async def remotely(world: World, prefiller: Running, decoder: Running, token_ids: Sequence[int]) -> Asked:
    return await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, token_ids, NUM_TOKENS)


@over_each_transport
async def test_split_text_is_the_models_for_prompts_around_pages_and_chunks(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    for length in LENGTHS:
        token_ids = prompt(length)
        request_id = f"of {length}"
        lease = await world.gateway.lease(prefiller.uuid, request_id, length)
        asked = world.gateway.generate(decoder.uuid, token_ids, NUM_TOKENS, request_id=request_id, prefill=lease)
        uses_lease = await world.gateway.accepted(asked)
        assert uses_lease == (length > 1)  # the last token is the decoder's own
        if not uses_lease:
            world.gateway.say(prefiller.uuid, ReturnLease(sender=world.gateway.uuid, lease=lease.lease))
        assert await asked.text() == world.reference.text(token_ids, NUM_TOKENS), f"{length} tokens"
    assert decoder.counter("prefill_tokens_total") == 0
    assert decoder.counter("tickets_ready_total") == len(LENGTHS) - 1
    assert prefiller.counter("prefill_tokens_total") == sum(length - 1 for length in LENGTHS)
    assert prefiller.counter("tickets_accepted_total") == prefiller.counter("tickets_closed_total") == len(LENGTHS) - 1


@pytest.mark.parametrize("role", ["decoder", "colocated"])
def test_text_prefilled_where_it_is_decoded_is_the_models(role: str, checkpoint, tmp_path, reference) -> None:  # noqa: ANN001
    @in_world
    async def play(world: World) -> None:
        instance = await (world.decoder() if role == "decoder" else world.colocated())
        for length in LENGTHS:
            asked = world.gateway.generate(instance.uuid, prompt(length), NUM_TOKENS)
            assert not await world.gateway.accepted(asked)
            assert await asked.text() == world.reference.text(prompt(length), NUM_TOKENS), f"{length} tokens"

    play(checkpoint, tmp_path, reference)


@over_each_transport
async def test_a_prompt_that_is_all_cached_here_opens_no_ticket(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    token_ids = prompt(2 * PAGE + 1)
    first = await remotely(world, prefiller, decoder, token_ids)
    assert (await first.finished()).cached_tokens == 0
    again = await remotely(world, prefiller, decoder, token_ids)
    assert not await world.gateway.accepted(again)
    assert [asked.of(Accepted)[0].cached_tokens for asked in (first, again)] == [0, 2 * PAGE]
    assert decoder.status.prefilling is None  # it has prefilled nothing
    finished = await again.finished()
    assert finished.cached_tokens == 2 * PAGE
    assert finished.waterfall.fetch_s == 0
    assert again.token_ids == first.token_ids
    assert decoder.counter("tickets_ready_total") == 1
    assert decoder.counter("prefill_tokens_total") == 0


@over_each_transport
async def test_a_hit_at_the_prefiller_counts_as_cached_and_a_longer_prompt_fetches_only_its_rest(world: World) -> None:
    prefiller = await world.prefiller()
    decoder, other = await world.decoder(prefiller), await world.decoder(prefiller)
    beginning = prompt(5 * PAGE)
    await (await remotely(world, prefiller, decoder, [*beginning, 1])).text()
    computed = prefiller.counter("prefill_tokens_total")
    elsewhere = await remotely(world, prefiller, other, [*beginning, 1])
    assert (await elsewhere.finished()).cached_tokens == 5 * PAGE
    assert prefiller.counter("prefill_tokens_total") == computed  # sent, not computed
    longer = [*beginning, *prompt(7)]
    sent = prefiller.counter("fabric_bytes_posted_total")
    asked = await remotely(world, prefiller, decoder, longer)
    assert await asked.text() == world.reference.text(longer, NUM_TOKENS)
    assert asked.of(type(await asked.finished()))[0].cached_tokens == 5 * PAGE
    page_bytes = decoder.instance.layout.kv.page_bytes * decoder.instance.layout.kv.num_layers
    assert prefiller.counter("fabric_bytes_posted_total") - sent < 3 * page_bytes
    num_pages = 5 + 5 + -(-6 // PAGE)
    await until(
        lambda: prefiller.counter("kv_bytes_sent_rank0_total") == num_pages * page_bytes, "every page is counted once"
    )


@over_each_transport
async def test_sampled_text_is_the_same_split_colocated_and_resumed(world: World) -> None:
    prefiller = await world.prefiller()
    decoder, colocated = await world.decoder(prefiller), await world.colocated()
    for seed in (2, 3, 4):
        token_ids = prompt(CHUNK + 3, seed=seed)
        expected = world.reference.text(token_ids, 12, SamplingParams(choice=seed, **FIELDS))
        sampling = Sampling(choice=seed, **FIELDS)
        split = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, token_ids, 12, sampling)
        assert await split.text() == expected
        assert await world.gateway.generate(colocated.uuid, token_ids, 12, sampling=sampling).text() == expected
        resumed = [*token_ids, *expected[:5]]
        for there in (
            await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, resumed, 7, sampling),
            world.gateway.generate(colocated.uuid, resumed, 7, sampling=sampling),
        ):
            assert await there.text() == expected[5:]


@over_each_transport
async def test_many_at_once_write_what_each_writes_alone(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    prompts = [prompt(length, seed=9) for length in (3, 9, 17, 24, 31, 40, 12, 50)]
    asked = []
    for number, token_ids in enumerate(prompts):
        if number % 2:
            asked.append(world.gateway.generate(decoder.uuid, token_ids, NUM_TOKENS))
        else:
            asked.append(await remotely(world, prefiller, decoder, token_ids))
    for one, token_ids in zip(asked, prompts, strict=True):
        assert await one.text() == world.reference.text(token_ids, NUM_TOKENS), f"{len(token_ids)} tokens"


@in_world
async def test_a_stop_token_ends_the_text_is_counted_and_is_not_part_of_it(world: World) -> None:
    decoder = await world.decoder()
    text = world.reference.text(prompt(9), NUM_TOKENS)
    place = next(place for place in range(1, NUM_TOKENS) if text[place] not in text[:place])
    asked = world.gateway.generate(decoder.uuid, prompt(9), NUM_TOKENS, stop_token_ids=(text[place],))
    finished = await asked.finished()
    assert (finished.reason, finished.num_tokens) == ("stop", place + 1)
    assert asked.token_ids == text[:place]


@over_each_transport
async def test_in_bf16_what_was_fetched_is_bit_for_bit_what_is_computed_here(world: World) -> None:
    """With the same chunks, one prompt at a time: the same rows in the same steps."""
    prefiller = await world.prefiller(dtype="bf16")
    fetches, computes = await world.decoder(prefiller, dtype="bf16"), await world.decoder(dtype="bf16")
    for length in (2, 7, CHUNK, CHUNK + 1, 2 * CHUNK + 9, 6 * CHUNK):
        token_ids = prompt(length, seed=1)
        fetched = await world.gateway.generate_remotely(fetches.uuid, prefiller.uuid, token_ids, 32)
        assert await world.gateway.accepted(fetched)
        computed = world.gateway.generate(computes.uuid, token_ids, 32)
        assert await fetched.text() == await computed.text()
        assert np.array_equal(cached_bytes(fetches, token_ids), cached_bytes(computes, token_ids))


def cached_bytes(running: Running, token_ids: Sequence[int]) -> np.ndarray:
    """KV of the prompt's whole pages, layer by layer."""
    instance = running.instance
    pages = instance.pools[0].prefix.lookup(page_hashes(token_ids[:-1], PAGE, instance.salt))
    assert len(pages) == (len(token_ids) - 1) // PAGE
    layout = instance.layout
    places = [layout.page_offset(layer, page) for layer in range(layout.kv.num_layers) for page in pages]
    return np.array([instance.memory.bytes[place : place + layout.kv.page_bytes] for place in places])


@over_each_transport
async def test_the_waterfall_of_a_fetched_prompt_and_of_one_computed_here(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    prefiller.model.hold()
    asked = await remotely(world, prefiller, decoder, prompt(20))
    await world.gateway.accepted(asked)
    await until(lambda: prefiller.model.num_waiting == 1, "the step waits")
    assert decoder.gauge("tickets_open") == 1
    assert decoder.status.num_running == 1
    prefiller.model.open()
    fetched = (await asked.finished()).waterfall
    prefilled = await asked.wait(Prefilled)
    assert prefilled.num_computed == 19
    assert fetched.fetch_s > 0 and prefilled.prefill_s > 0  # the last byte may land before the step is committed
    assert fetched.local_prefill_s == 0
    assert fetched.hand_over_s > 0 and fetched.first_step_s > 0
    here = (await world.gateway.generate(decoder.uuid, prompt(20, seed=5), NUM_TOKENS).finished()).waterfall
    assert here.fetch_s == here.hand_over_s == 0
    assert here.local_prefill_s > 0 and here.first_step_s > 0


@in_world
async def test_a_status_says_how_it_stands(world: World) -> None:
    decoder = await world.decoder()
    decoder.model.hold()
    asked = [world.gateway.generate(decoder.uuid, prompt(20, seed=seed), 4) for seed in (1, 2)]
    for one in asked:
        await world.gateway.accepted(one)
    status = decoder.status
    assert (status.num_running, status.num_waiting) == (2, 0)
    assert status.num_queued_tokens == status.num_interactive_tokens == 2 * 19
    assert status.decoding is None  # nothing was measured yet
    assert status.num_free_pages == NUM_PAGES - 2 * 6
    assert status.gauges["pages_held"] == 2 * 6
    decoder.model.open()
    for one in asked:
        await one.finished()
    await decoder.idle()
    await until(lambda: world.gateway.status[decoder.uuid] == decoder.status, "the gateway hears of it")
    status = decoder.status
    assert status.num_free_pages == NUM_PAGES == status.gauges["pages"]
    assert status.counters["requests_finished_total"] == 2
    assert status.counters["prefill_tokens_total"] == 2 * 19
    assert status.counters["decode_tokens_total"] == 2 * 4
    assert status.counters["steps_total"] >= 4
    for seed in range(3, 6):
        await world.gateway.generate(decoder.uuid, prompt(20, seed=seed), 4).finished()
    decoding = decoder.status.decoding
    assert decoding is not None and decoding.step_s + decoding.row_s + decoding.key_s > 0
    assert (decoding.num_rows, decoding.num_keys, decoding.num_interactive) == (0, 0, 0)


@in_world
async def test_texts_that_outgrow_the_pool_are_preempted_and_go_on(world: World) -> None:
    """Ten short texts first, so that little growth is reserved for the long ones."""
    decoder = await world.decoder(num_pages=16)
    for seed in range(10):
        await world.gateway.generate(decoder.uuid, prompt(3, seed=seed), 1).finished()
    prompts = [prompt(14, seed=seed) for seed in (21, 22, 23)]
    asked = [world.gateway.generate(decoder.uuid, token_ids, 30) for token_ids in prompts]
    for one, token_ids in zip(asked, prompts, strict=True):
        assert not await world.gateway.accepted(one)
        assert await one.text() == world.reference.text(token_ids, 30)
    assert decoder.counter("preemptions_total") > 0


@in_world
async def test_a_prefiller_that_nobody_knows_is_not_waited_for(world: World) -> None:
    decoder = await world.decoder()
    unknown = PrefillFrom(prefiller="0" * 32, lease="1")
    asked = world.gateway.generate(decoder.uuid, prompt(20), NUM_TOKENS, prefill=unknown)
    assert not await world.gateway.accepted(asked)
    assert await asked.text() == world.reference.text(prompt(20), NUM_TOKENS)
