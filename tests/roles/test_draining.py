"""An instance that is told to drain: it takes nothing new, ends what it has, and leaves with a Goodbye."""

import asyncio

from role_world import World, in_world, over_each_transport
from scripted_gateway import until
from tiny_checkpoint import prompt

from headrace.protocol.control import Drain, NoRoom, Reserve, Successor, Tokens, Wait
from headrace.roles.draining import Drained, Draining

AS_PREFILLER = Successor(role="prefiller", name="prefiller-1", tpot_s=None, max_stall_s=None)


@in_world
async def test_a_decoder_ends_its_streams_tells_every_gateway_and_leaves(world: World) -> None:
    other = world.open_gateway("other")
    decoder = await world.decoder(gateways=(world.gateway, other))
    asked = other.generate(decoder.uuid, prompt(20), 30)
    await asked.wait(Tokens)
    decoder.model.hold()
    await until(lambda: decoder.model.num_waiting == 1, "its step runs")
    world.gateway.say(decoder.uuid, Drain(sender=world.gateway.uuid, successor=None))
    for gateway in (world.gateway, other):
        await until(lambda gateway=gateway: gateway.status[decoder.uuid].is_draining, "it tells that it drains")
    late = other.generate(decoder.uuid, prompt(5), 3)
    assert (await late.wait(NoRoom)).num_free_pages == 0
    await asyncio.sleep(0.4)
    assert not decoder.task.done(), "a stream is under way"
    decoder.model.open()
    assert await asked.text() == world.reference.text(prompt(20), 30)
    await asyncio.wait_for(decoder.task, 5)
    for gateway in (world.gateway, other):
        await until(lambda gateway=gateway: decoder.uuid in gateway.said_goodbye, "it says Goodbye")
    assert decoder.role._drain.over == Drained(None)


@over_each_transport
async def test_a_prefiller_serves_its_leases_and_stays_until_its_pages_are_read(world: World) -> None:
    prefiller = await world.prefiller()
    decoder = await world.decoder(prefiller)
    gateway, token_ids = world.gateway, prompt(20)
    lease = await gateway.lease(prefiller.uuid, "leased", len(token_ids))
    gateway.say(prefiller.uuid, Drain(sender=gateway.uuid, successor=AS_PREFILLER))
    gateway.say(prefiller.uuid, Drain(sender=gateway.uuid, successor=None))  # too late: the first word stands
    await until(lambda: gateway.status[prefiller.uuid].is_draining, "it tells that it drains")
    reserve = Reserve(sender=gateway.uuid, request_id="late", num_tokens=5, tier="interactive", remaining_s=5.0)
    gateway.say(prefiller.uuid, reserve)
    await until(lambda: any(isinstance(message, Wait) for message in gateway.heard), "it grants no other lease")
    await asyncio.sleep(0.4)
    assert not prefiller.task.done(), "a lease is out"
    prefiller.model.hold_after(0)
    asked = gateway.generate(decoder.uuid, token_ids, 3, request_id="leased", prefill=lease)
    await until(lambda: prefiller.model.num_waiting == 1, "half of its pages are sent")
    await asyncio.sleep(0.2)
    assert not prefiller.task.done(), "a ticket is open"
    prefiller.model.open()
    assert await asked.text() == world.reference.text(token_ids, 3)
    assert decoder.counter("prefill_tokens_total") == 0
    await asyncio.wait_for(prefiller.task, 5)
    await until(lambda: prefiller.uuid in gateway.said_goodbye, "it says Goodbye")
    assert prefiller.role._drain.over == Drained(AS_PREFILLER)


@in_world
async def test_a_lease_that_nobody_uses_holds_a_prefiller_no_longer_than_it_lasts(world: World) -> None:
    prefiller = await world.prefiller()
    await world.gateway.lease(prefiller.uuid, "unused", 20)
    world.gateway.say(prefiller.uuid, Drain(sender=world.gateway.uuid, successor=None))
    await asyncio.wait_for(prefiller.task, 5)
    assert prefiller.role._drain.over == Drained(None)


def test_who_was_never_told_is_not_drained() -> None:
    assert Draining().over is None and not Draining().has_begun
