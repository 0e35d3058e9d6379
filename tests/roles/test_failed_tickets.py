"""A ticket that fails: what the decoder asks, what it makes of each answer, and who wakes it when room comes back."""

import asyncio

import pytest
from role_world import CHUNK, Running, World, in_world, over_each_transport
from scripted_gateway import Asked, until
from tiny_checkpoint import prompt

from headrace.errors import FabricError
from headrace.protocol.control import Finished, NeedPrefill, PrefillFrom, ReturnLease
from headrace.roles import decoder as decoder_module

NUM_TOKENS = 5


def no_lease_at(prefiller: Running) -> PrefillFrom:
    """It refuses the ticket."""
    return PrefillFrom(prefiller=prefiller.uuid, lease="none")


async def parked_request(world: World, decoder: Running, prefiller: Running, *, seed: int = 0) -> Asked:
    asked = world.gateway.generate(decoder.uuid, prompt(20, seed=seed), NUM_TOKENS, prefill=no_lease_at(prefiller))
    assert await world.gateway.accepted(asked)
    need = await world.gateway.parked(asked)
    assert need.prefiller == prefiller.uuid
    assert need.reason.startswith("refused: lease") and not need.is_fault
    return asked


def patient(world: World) -> None:
    """No answer is too late."""
    world.patch.setattr(decoder_module, "NEED_PREFILL_PATIENCE_S", 60)


@over_each_transport
async def test_another_prefiller_takes_the_request_over(world: World) -> None:
    patient(world)
    first, second = await world.prefiller(), await world.prefiller()
    decoder = await world.decoder(first, second)
    asked = await parked_request(world, decoder, first)
    assert decoder.gauge("pages_held") == 0
    asked.use(await world.gateway.lease(second.uuid, asked.request_id, 20))
    assert await world.gateway.accepted(asked, 2)
    assert await asked.text() == world.reference.text(prompt(20), NUM_TOKENS)
    assert decoder.counter("prefill_tokens_total") == 0
    assert second.counter("prefill_tokens_total") == 19


@pytest.mark.parametrize("answer", ["local", "none", "nobody known", "no room"])
def test_else_it_is_prefilled_here(answer: str, checkpoint, tmp_path, reference) -> None:  # noqa: ANN001
    @in_world
    async def play(world: World) -> None:
        prefiller = await world.prefiller()
        decoder = await world.decoder(prefiller, num_pages=16)
        if answer != "none":
            patient(world)
        asked = await parked_request(world, decoder, prefiller)
        if answer == "local":
            asked.use(None)
        elif answer == "nobody known":
            asked.use(PrefillFrom(prefiller="f" * 32, lease="1"))
            assert not await world.gateway.accepted(asked, 2)
        elif answer == "no room":
            decoder.model.hold()
            await world.gateway.accepted(world.gateway.generate(decoder.uuid, prompt(14, seed=1), 40))
            asked.use(await world.gateway.lease(prefiller.uuid, asked.request_id, 20))
            assert not await world.gateway.accepted(asked, 2)
            assert decoder.status.num_waiting == 1
            decoder.model.open()
        assert await asked.text() == world.reference.text(prompt(20), NUM_TOKENS)
        assert asked.of(Finished)[0].waterfall.local_prefill_s > 0
        assert prefiller.counter("tickets_accepted_total") == 0

    play(checkpoint, tmp_path, reference)


@in_world
async def test_an_answer_that_comes_too_late_gives_its_lease_back(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    world.patch.setattr(decoder_module, "NEED_PREFILL_PATIENCE_S", 0)
    decoder.model.hold()
    asked = await parked_request(world, decoder, prefiller)
    await until(lambda: not decoder.role._served[asked.request_id].is_parked, "it is prefilled here")
    asked.use(await world.gateway.lease(prefiller.uuid, asked.request_id, 20))
    assert not await world.gateway.accepted(asked, 2)
    decoder.model.open()
    assert await asked.text() == world.reference.text(prompt(20), NUM_TOKENS)


@over_each_transport
async def test_after_three_tickets_it_is_prefilled_here_unasked(world: World) -> None:
    patient(world)
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    asked = await parked_request(world, decoder, prefiller)
    for number in (2, 3):
        asked.use(no_lease_at(prefiller))
        assert await world.gateway.accepted(asked, number)
        if number == 2:
            await world.gateway.parked(asked, 2)
    assert await asked.text() == world.reference.text(prompt(20), NUM_TOKENS)
    assert len(asked.of(NeedPrefill)) == 2
    assert decoder.counter("tickets_failed_refused_total") == 3


@in_world
async def test_each_question_has_its_own_patience(world: World) -> None:
    """That of the first one must not end the second."""
    patient(world)
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    asked = await parked_request(world, decoder, prefiller)
    served = decoder.role._served[asked.request_id]
    first = served.patience_timer
    asked.use(no_lease_at(prefiller))
    await world.gateway.parked(asked, 2)
    assert first.cancelled() and served.patience_timer is not first
    second = served.patience_timer
    asked.use(None)
    await asked.text()
    assert second.cancelled() and served.patience_timer is None
    assert served.deadline_timer.cancelled()


@over_each_transport
async def test_a_prompt_that_no_prefiller_of_this_kind_holds_is_prefilled_here_at_once(world: World) -> None:
    patient(world)
    small = await world.prefiller(num_pages=4, chunk_tokens=64)
    decoder = await world.decoder(small)
    asked = await world.gateway.generate_remotely(decoder.uuid, small.uuid, prompt(40), NUM_TOKENS)
    assert await world.gateway.accepted(asked)
    assert await asked.text() == world.reference.text(prompt(40), NUM_TOKENS)
    assert asked.of(NeedPrefill) == []
    assert small.counter("tickets_refused_too_long_total") == 1


@over_each_transport
async def test_a_prefiller_that_drops_out_of_the_list_is_given_up_and_taken_back_when_it_wakes(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    prefiller.model.hold_after(0)
    asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(20), NUM_TOKENS)
    await until(lambda: prefiller.model.num_waiting == 1, "it sends")
    world.gateway.name_prefillers(decoder.uuid)
    need = await world.gateway.parked(asked)
    assert need.reason.startswith("peer_lost") and need.is_fault, "it speaks against the prefiller"
    await until(lambda: decoder.gauge("pages_quarantined") == 0, "its access has ended: nothing lands any more")
    asked.use(None)
    assert await asked.text() == world.reference.text(prompt(20), NUM_TOKENS)
    prefiller.model.open()
    world.gateway.name_prefillers(decoder.uuid, prefiller.uuid)
    await world.met(decoder, prefiller)
    again = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(20, seed=1), NUM_TOKENS)
    assert await again.text() == world.reference.text(prompt(20, seed=1), NUM_TOKENS)
    assert decoder.counter("revokes_total") == 1
    assert decoder.counter("tickets_ready_total") == 1
    assert decoder.counter("wrong_bytes_total") == 0


@in_world
async def test_one_gateways_word_gives_no_prefiller_up_that_another_one_names(world: World) -> None:
    other = world.open_gateway("other")
    both = (world.gateway, other)
    prefiller = await world.prefiller(gateways=both)
    decoder = await world.decoder(prefiller, gateways=both)
    other.name_prefillers(decoder.uuid, prefiller.uuid)
    await until(lambda: len(decoder.remote._named_by) == 2, "both name it")
    prefiller.model.hold()
    asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(20), NUM_TOKENS)
    await world.gateway.accepted(asked)
    other.name_prefillers(decoder.uuid)
    await until(lambda: not decoder.remote._named_by[other.uuid], "one names it no more")
    assert decoder.gauge("tickets_open") == 1
    assert decoder.counter("revokes_total") == 0
    world.gateway.name_prefillers(decoder.uuid)
    await world.gateway.parked(asked)
    assert decoder.counter("revokes_total") == 1
    assert not decoder.remote._peers
    assert await asked.text() == world.reference.text(prompt(20), NUM_TOKENS)


@over_each_transport
async def test_pages_that_come_back_from_quarantine_wake_a_request_that_waits_for_them(world: World) -> None:
    """Nothing else happens then: no answer, no message, no step."""
    patient(world)
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller, num_pages=16)
    waiting = await parked_request(world, decoder, prefiller)
    prefiller.model.hold_after(0)
    leaving = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(42, seed=1), NUM_TOKENS)
    await until(lambda: prefiller.model.num_waiting == 1, "it sends")
    turn = prefiller.role._pump.turn
    world.patch.setattr(prefiller.role._pump, "turn", lambda: None)  # its loop hangs
    leaving.abort()
    await leaving.finished()
    waiting.use(None)
    await until(lambda: decoder.status.num_waiting == 1, "it waits")
    assert decoder.gauge("pages_quarantined") == 11
    await asyncio.sleep(0.1)
    assert decoder.gauge("pages_held") == 0
    world.patch.setattr(prefiller.role._pump, "turn", turn)
    prefiller.role._pump.poke()
    assert await waiting.text() == world.reference.text(prompt(20), NUM_TOKENS)


@in_world
async def test_a_prefiller_that_cannot_be_greeted_now_is_greeted_with_the_next_request(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder()
    messenger = decoder.remote._messenger
    greet = messenger.greet

    def no_memory(address: bytes, now: float) -> None:
        raise FabricError("fi_mr_reg", 12, "no memory")

    world.patch.setattr(messenger, "greet", no_memory)
    world.gateway.name_prefillers(decoder.uuid, prefiller.uuid)
    await until(lambda: bool(decoder.remote._named_by), "it is named")
    world.patch.setattr(messenger, "greet", greet)
    asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(9), NUM_TOKENS)
    assert not await world.gateway.accepted(asked)
    assert await asked.text() == world.reference.text(prompt(9), NUM_TOKENS)
    await world.met(decoder, prefiller)


@over_each_transport
async def test_a_step_that_fails_at_the_prefiller_fails_its_tickets_and_the_next_one_is_computed(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    prefiller.model.fail_next = True
    asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(20), NUM_TOKENS)
    need = await world.gateway.parked(asked)
    assert "out of order" in need.reason
    assert await asked.text() == world.reference.text(prompt(20), NUM_TOKENS)
    again = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(20, seed=1), NUM_TOKENS)
    assert await world.gateway.accepted(again)
    assert await again.text() == world.reference.text(prompt(20, seed=1), NUM_TOKENS)
    assert decoder.counter("tickets_ready_total") == 1


@over_each_transport
async def test_a_prefiller_that_leaves_fails_what_it_has_not_computed(world: World) -> None:
    """The one in the running step, and the one behind it; nobody waits for a time-out, on whichever host."""
    patient(world)
    prefiller = await world.prefiller(chunk_tokens=CHUNK)
    decoder = await world.decoder(prefiller)
    prefiller.model.hold_after(0)
    asked = [
        await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(length), NUM_TOKENS)
        for length in (CHUNK + 1, 8)
    ]
    for one in asked:
        assert await world.gateway.accepted(one)
    await until(lambda: prefiller.model.num_waiting == 1, "a step runs")
    await until(lambda: prefiller.role._queue.num_queued == 2, "both are there")
    world.patch.setattr(decoder.remote._messenger, "peer_exited", lambda peer, now: None)
    prefiller.task.cancel()
    for one in asked:
        assert (await world.gateway.parked(one)).reason.startswith("failed: the prefiller is told to end")
    await asyncio.wait([prefiller.task])
    await until(lambda: prefiller.uuid in world.gateway.said_goodbye, "goodbye")
    for one, length in zip(asked, (CHUNK + 1, 8), strict=True):
        one.use(None)
        assert await one.text() == world.reference.text(prompt(length), NUM_TOKENS)


@in_world
async def test_a_lease_that_is_returned_is_room_for_the_next(world: World) -> None:
    prefiller = await world.prefiller()
    lease = await world.gateway.lease(prefiller.uuid, "one", 2 * CHUNK)
    assert prefiller.status.num_queued_tokens == 2 * CHUNK
    world.gateway.say(prefiller.uuid, ReturnLease(sender=world.gateway.uuid, lease=lease.lease))
    await until(lambda: prefiller.status.num_queued_tokens == 0, "the lease is returned")
