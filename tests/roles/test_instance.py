"""What every process with a model has, and how it describes itself."""

import asyncio
from pathlib import Path

import pytest
from role_world import CHUNK, NUM_PAGES, PAGE, World, in_world
from scripted_gateway import until
from tiny_checkpoint import LONGEST, prompt

from headrace.engine.step import StepRow
from headrace.model.batch import Row
from headrace.protocol.control import Role, decode_from_instance, encode_control
from headrace.roles.instance import described_fabric
from headrace.roles.options import InstanceOptions, Transport


def rows() -> list[StepRow]:
    row = Row(token_ids=prompt(3), begin=0, page_table=(0,), wants_logits=False)
    return [StepRow(row=row, draw=None)]


@in_world
async def test_a_step_that_nobody_waits_for_any_more_ends_with_its_layer(world: World) -> None:
    running = await world.colocated()
    model, layers = running.model, []
    model.hold_after(0)
    computing = asyncio.create_task(running.instance.compute([rows()], layers.append))
    await until(lambda: model.num_waiting == 1, "the first layer is done")
    computing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await computing
    model.open()
    assert await running.instance.compute([rows()], lambda layer: layers.append(10 + layer)) == [[]]
    assert layers == [0, 10, 11]


@in_world
async def test_steps_are_computed_one_after_the_other(world: World) -> None:
    running = await world.colocated()
    layers: list[int] = []
    steps = (running.instance.compute([rows()], lambda layer, n=n: layers.append(10 * n + layer)) for n in range(3))
    await asyncio.gather(*steps)
    assert layers == [0, 1, 10, 11, 20, 21]


@in_world
async def test_it_announces_what_it_is_and_what_it_holds(world: World) -> None:
    prefiller, colocated = await world.prefiller(), await world.colocated(max_running=5, num_pages=20)
    for running, role in ((prefiller, "prefiller"), (colocated, "colocated")):
        announce = world.gateway.announced[running.uuid]
        assert decode_from_instance(encode_control(announce)) == announce
        assert (announce.role, announce.model, announce.fingerprint) == (role, "tiny", running.instance.salt.decode())
    first, second = (world.gateway.announced[running.uuid].limits for running in (prefiller, colocated))
    assert (first.max_model_len, first.pool_tokens, first.page_size) == (LONGEST, NUM_PAGES * PAGE, PAGE)
    assert (second.max_model_len, second.pool_tokens, second.max_running) == (20 * PAGE, 20 * PAGE, 5)
    assert world.gateway.announced[colocated.uuid].fabric_address == b""
    assert first.max_model_len > CHUNK
    assert world.gateway.announced[prefiller.uuid].fabric_address == prefiller.role._fabric.address


@pytest.mark.parametrize(
    ("role", "transports", "hosts", "told"),
    [
        ("prefiller", ("mapped", "tcp"), ("127.0.0.1",), "mapped, tcp at 127.0.0.1"),
        ("decoder", ("efa", "tcp"), ("10.0.0.1", "10.0.1.1"), "efa, tcp at 10.0.0.1, 10.0.1.1"),
        ("decoder", ("mapped",), ("127.0.0.1",), "mapped"),
        ("colocated", ("mapped", "tcp"), ("127.0.0.1",), "no fabric"),
    ],
)
def test_it_says_how_it_is_reached(
    role: Role, transports: tuple[Transport, ...], hosts: tuple[str, ...], told: str
) -> None:
    options = InstanceOptions(
        role=role, name="x", gateways=(), model_dir=Path(), model="x", transports=transports, fabric_hosts=hosts
    )
    assert described_fabric(options) == told
