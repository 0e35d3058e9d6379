"""How a request ends at a decoder before its text does: one last word each, and nothing is held after it."""

import asyncio
from pathlib import Path

import pytest
from role_world import NUM_PAGES, Running, World, in_world, over_each_transport
from scripted_gateway import Asked, until
from tiny_checkpoint import VOCABULARY, Reference, prompt

from headrace.protocol.control import Abort, Finished, NoRoom, PrefillFrom, Rejected, Reserve, Tokens
from headrace.roles import decoder as decoder_module
from headrace.roles import links as links_module
from headrace.roles.options import Transport

STATES = ("fetching", "prefilling", "decoding", "parked", "waiting")


async def in_state(state: str, world: World) -> tuple[Asked, Running]:
    """A request that stays there until it is ended."""
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller, num_pages=16)
    gateway, token_ids = world.gateway, prompt(20)
    if state == "fetching":
        prefiller.model.hold_after(0)
        asked = await gateway.generate_remotely(decoder.uuid, prefiller.uuid, token_ids, 30)
        await until(lambda: prefiller.model.num_waiting == 1, "half of its first pages are sent")
        assert decoder.gauge("tickets_open") == 1
        return asked, decoder
    if state == "prefilling":
        decoder.model.hold()
        asked = gateway.generate(decoder.uuid, token_ids, 30)
        await until(lambda: decoder.model.num_waiting == 1, "its step runs")
        return asked, decoder
    if state == "decoding":
        asked = gateway.generate(decoder.uuid, token_ids, 30)
        await asked.wait(Tokens)
        decoder.model.hold()
        await until(lambda: decoder.model.num_waiting == 1, "its step runs")
        return asked, decoder
    world.patch.setattr(decoder_module, "NEED_PREFILL_PATIENCE_S", 60)
    asked = gateway.generate(decoder.uuid, token_ids, 30, prefill=no_lease_at(prefiller))
    await gateway.parked(asked)
    assert decoder.status.num_waiting == 1
    if state == "waiting":
        decoder.model.hold()
        other = gateway.generate(decoder.uuid, prompt(14, seed=1), 40)
        await gateway.accepted(other)
        asked.use(None)
        await until(lambda: decoder.role._groups.statistics().num_waiting == 1, "there is no room for it")
    return asked, decoder


def no_lease_at(prefiller: Running) -> PrefillFrom:
    """It refuses the ticket."""
    return PrefillFrom(prefiller=prefiller.uuid, lease="none")


@pytest.mark.parametrize(
    ("state", "transport"), [("fetching", "mapped"), ("fetching", "tcp"), *((state, "tcp") for state in STATES[1:])]
)
@pytest.mark.parametrize("end", ["abort", "deadline", "gateway"])
def test_a_request_ends_in_every_state(
    state: str, end: str, *, transport: Transport, checkpoint: Path, tmp_path: Path, reference: Reference
) -> None:
    @over_each_transport
    async def play(world: World) -> None:
        asked, decoder = await in_state(state, world)
        role = decoder.role
        if end == "abort":
            asked.abort()
            asked.abort()
            expected = "abort"
        elif end == "deadline":
            role._served[asked.request_id].deadline_timer.cancel()
            role._on_deadline(asked.request_id)
            expected = "error"
        else:
            world.patch.setattr(links_module, "SILENCE_S", 0.3)
            world.gateway.is_silent = True
            expected = "abort"
        finished = await asked.finished()
        assert finished.reason == expected
        assert ("deadline" in finished.text) == (end == "deadline")
        world.gateway.is_silent = False
        for one in world.running:
            one.model.open()
        await decoder.idle()
        await until(lambda: world.gateway.uuid == role._links._links[0].gateway, "they know each other")
        again = world.gateway.generate(decoder.uuid, prompt(5), 3)
        assert await again.text() == world.reference.text(prompt(5), 3)
        assert len(asked.of(Finished)) == 1

    play(checkpoint, tmp_path, reference, transport)


@in_world
async def test_the_deadline_of_a_request_passes_by_itself(world: World) -> None:
    decoder = await world.decoder()
    decoder.model.hold()
    finished = await world.gateway.generate(decoder.uuid, prompt(20), 30, remaining_s=0.05).finished()
    assert finished.reason == "error" and "deadline" in finished.text


@in_world
async def test_a_request_for_which_there_is_no_room_holds_nothing_and_may_come_again(world: World) -> None:
    decoder = await world.decoder(num_pages=16)
    decoder.model.hold()
    first = world.gateway.generate(decoder.uuid, prompt(14), 40)
    await world.gateway.accepted(first)
    second = world.gateway.generate(decoder.uuid, prompt(14, seed=1), 40)
    assert (await second.wait(NoRoom)).num_free_pages == decoder.status.num_free_pages < 16 - 13
    decoder.model.open()
    await first.finished()
    again = world.gateway.generate(decoder.uuid, prompt(14, seed=1), 4, request_id=second.request_id)
    assert await again.wait(Finished)


@in_world
async def test_what_can_never_run_is_rejected_naming_the_field_and_the_others_go_on(world: World) -> None:
    decoder = await world.decoder(max_model_len=64)
    running = world.gateway.generate(decoder.uuid, prompt(9), 40, request_id="taken")
    for token_ids, max_tokens, field in (
        ([1, VOCABULARY], 4, "token_ids"),
        (prompt(60), 5, "max_tokens"),
        (prompt(65), 1, "max_tokens"),
    ):
        rejected = await world.gateway.generate(decoder.uuid, token_ids, max_tokens).wait(Rejected)
        assert rejected.field == field
    assert await running.text() == world.reference.text(prompt(9), 40)


@in_world
async def test_an_id_that_another_gateway_uses_is_rejected_and_a_repeated_generate_is_not_answered_twice(
    world: World,
) -> None:
    other = world.open_gateway("other")
    decoder = await world.decoder(gateways=(world.gateway, other))
    decoder.model.hold()
    asked = world.gateway.generate(decoder.uuid, prompt(9), 4, request_id="one")
    await world.gateway.accepted(asked)
    world.gateway.generate(decoder.uuid, prompt(9), 4, request_id="one")
    assert (await other.generate(decoder.uuid, prompt(5), 4, request_id="one").wait(Rejected)).field == "request_id"
    other.say(decoder.uuid, Abort(sender=other.uuid, request_id="one"))  # is not its to end
    decoder.model.open()
    assert await asked.text() == world.reference.text(prompt(9), 4)
    assert await world.gateway.accepted(asked) is False


@over_each_transport
async def test_an_id_comes_again_at_once_after_the_abort_of_its_ticket(world: World) -> None:
    """In one batch of messages: the ticket of the first is not over for the engine when the second comes."""
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    prefiller.model.hold()
    asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(20), 4)
    await world.gateway.accepted(asked)
    role = decoder.role
    generate = role._served[asked.request_id].generate
    role._on_message(world.gateway.uuid, Abort(sender=world.gateway.uuid, request_id=asked.request_id))
    role._on_message(world.gateway.uuid, generate)
    assert (await asked.wait(Rejected)).field == "request_id"
    assert len(asked.of(Finished)) == 1


@in_world
async def test_a_step_that_fails_ends_what_is_in_it_and_nothing_else(world: World) -> None:
    decoder = await world.decoder()
    decoder.model.hold()
    decoder.model.fail_next = True
    asked = world.gateway.generate(decoder.uuid, prompt(9), 4)
    await until(lambda: decoder.model.num_waiting == 1, "its step runs")
    other = world.gateway.generate(decoder.uuid, prompt(7), 4)
    await world.gateway.accepted(other)
    decoder.model.open()
    finished = await asked.finished()
    assert finished.reason == "error" and "out of order" in finished.text
    assert await other.text() == world.reference.text(prompt(7), 4)


@in_world
async def test_a_gateway_that_takes_over_the_endpoint_of_another_is_served_and_the_others_requests_end(
    world: World,
) -> None:
    decoder = await world.decoder()
    decoder.model.hold()
    asked = world.gateway.generate(decoder.uuid, prompt(9), 40)
    await world.gateway.accepted(asked)
    await world.gateway.close()
    successor = world.open_gateway("control")
    await until(lambda: decoder.uuid in successor.announced, "it is known there")
    await until(lambda: successor.status[decoder.uuid].num_running == 0, "the request has ended")
    decoder.model.open()
    assert await successor.generate(decoder.uuid, prompt(7), 4).text() == world.reference.text(prompt(7), 4)


@in_world
async def test_two_gateways_are_served_and_the_loss_of_one_leaves_the_other_alone(world: World) -> None:
    other = world.open_gateway("other")
    decoder = await world.decoder(gateways=(world.gateway, other))
    decoder.model.hold()
    asked = [gateway.generate(decoder.uuid, prompt(9), 12) for gateway in (world.gateway, other)]
    for one in asked:
        await one.gateway.accepted(one)
    world.patch.setattr(links_module, "SILENCE_S", 0.4)
    other.is_silent = True
    assert (await asked[1].finished()).reason == "abort"
    decoder.model.open()
    assert await asked[0].text() == world.reference.text(prompt(9), 12)


@over_each_transport
async def test_messages_that_make_no_sense_change_nothing(world: World) -> None:
    decoder = await world.decoder()
    gateway = world.gateway
    gateway.say_bytes(decoder.uuid, b"\xc1 no message")
    gateway.say_bytes(decoder.uuid, b"")
    gateway.say(decoder.uuid, Abort(sender=gateway.uuid, request_id="nobody's"))
    gateway.say(decoder.uuid, Reserve(sender=gateway.uuid, request_id="r", num_tokens=1, tier="flex", remaining_s=1.0))
    gateway.name_prefillers(
        decoder.uuid, "1" * 32, "2" * 32, "3" * 32, addresses=[b"", b"no address", b"\x02\x00" + bytes(14)]
    )
    unreachable = PrefillFrom(prefiller="2" * 32, lease="1")
    asked = gateway.generate(decoder.uuid, prompt(9), 4, prefill=unreachable)
    assert not await gateway.accepted(asked)
    assert await asked.text() == world.reference.text(prompt(9), 4)
    assert decoder.role._links.num_strange_messages == 2


@over_each_transport
async def test_a_decoder_that_leaves_says_goodbye_in_the_middle_of_a_step(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    prefiller.model.hold()
    await world.gateway.accepted(await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(20), 30))
    decoder.model.hold()
    asked = world.gateway.generate(decoder.uuid, prompt(9), 100)
    await world.gateway.accepted(asked)
    await until(lambda: decoder.model.num_waiting == 1, "a step runs")
    decoder.task.cancel()
    await asyncio.wait([decoder.task])
    await until(lambda: decoder.uuid in world.gateway.said_goodbye, "goodbye")
    prefiller.model.open()
    await prefiller.idle()
    assert prefiller.counter("tickets_closed_total") == 0
    assert prefiller.status.num_free_pages == NUM_PAGES
