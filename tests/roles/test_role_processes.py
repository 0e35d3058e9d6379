"""Roles as processes: killed, stopped and told to end, while they load and while they work."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from role_world import CHUNK, NUM_PAGES, PAGE, Running, World, in_world, over_each_transport
from scripted_gateway import until
from tiny_checkpoint import prompt

SCRIPT = Path(__file__).with_name("role_process.py")
START_S = 40.0
LENGTH = 2 * CHUNK  # a lease is never longer


class RoleProcess:
    def __init__(self, world: World, process: asyncio.subprocess.Process, uuid: str) -> None:
        self._world = world
        self.process = process
        self.uuid = uuid

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> tuple[int, str]:
        """-> its exit status, and what it said about it."""
        assert self.process.stderr is not None
        said = await self.process.stderr.read()
        return await self.process.wait(), said.decode()


async def spawned(
    world: World, role: str, *, layer_s: float = 0.0, loading_s: float = 0.0
) -> asyncio.subprocess.Process:
    words = [role, world.gateway.endpoint, str(world.checkpoint), world.transport, str(layer_s), str(loading_s)]
    pipe = asyncio.subprocess.PIPE
    # What all rooms' tests share is found by pytest alone.
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), *words), stdout=pipe, stderr=pipe, env=environment
    )

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.communicate()

    world.exits.push_async_callback(end)
    return process


async def started(world: World, role: str, *, layer_s: float) -> RoleProcess:
    process = await spawned(world, role, layer_s=layer_s)

    def uuids() -> list[str]:
        return [one.sender for one in world.gateway.announced.values() if one.name == role]

    await until(lambda: bool(uuids()), f"the {role} has started", START_S)
    return RoleProcess(world, process, uuids()[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads_ends_the_process_quietly(
    number: signal.Signals, checkpoint: Path, tmp_path: Path, reference: object
) -> None:
    @in_world
    async def play(world: World) -> None:
        process = await spawned(world, "prefiller" if number == signal.SIGINT else "decoder", loading_s=60.0)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), START_S) == b"loading\n"
        process.send_signal(number)
        assert await RoleProcess(world, process, "").ended() == (0, "")

    play(checkpoint, tmp_path, reference)  # type: ignore[arg-type]


@over_each_transport
async def test_a_signal_in_the_middle_of_a_step_ends_the_process_with_a_goodbye(world: World) -> None:
    roles = await asyncio.gather(*(started(world, role, layer_s=0.5) for role in ("prefiller", "decoder")))
    await world.gateway.accepted(world.gateway.generate(roles[1].uuid, prompt(9), 4))
    for one in roles:
        one.send(signal.SIGTERM)
    assert [await one.ended() for one in roles] == [(0, ""), (0, "")]
    await until(lambda: world.gateway.said_goodbye == {one.uuid for one in roles}, "goodbye")


@over_each_transport
async def test_a_prefiller_killed_while_it_sends_is_replaced_by_the_decoder_itself(world: World) -> None:
    prefiller = await started(world, "prefiller", layer_s=0.3)
    decoder = await world.decoder()
    world.gateway.name_prefillers(decoder.uuid, prefiller.uuid)
    await until(lambda: decoder.remote._messenger._prefillers.num_ready == 1, "it is ready")
    asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(LENGTH), 5)
    assert await world.gateway.accepted(asked)
    await until(lambda: decoder.counter("fabric_arrivals_total") > 0, "its first pages are here")
    prefiller.send(signal.SIGKILL)
    need = await world.gateway.parked(asked)
    whoever_saw_it_first = ("peer_lost: the prefiller has exited", "peer_lost: the prefiller is gone: ")
    assert need.reason.startswith(whoever_saw_it_first)
    await until(lambda: decoder.gauge("pages_quarantined") == 0, "nothing of it can land")
    assert await asked.text() == world.reference.text(prompt(LENGTH), 5)


def bytes_of(running: Running, pages: Sequence[int]) -> np.ndarray:
    layout = running.instance.layout
    places = [layout.page_offset(layer, page) for layer in range(layout.kv.num_layers) for page in pages]
    return np.array([running.instance.memory.bytes[place : place + layout.kv.page_bytes] for place in places])


@over_each_transport
async def test_a_prefiller_stopped_while_it_sends_writes_into_nobodys_page_when_it_wakes(world: World) -> None:
    prefiller = await started(world, "prefiller", layer_s=0.3)
    decoder = await world.decoder()
    world.gateway.name_prefillers(decoder.uuid, prefiller.uuid)
    await until(lambda: decoder.remote._messenger._prefillers.num_ready == 1, "it is ready")
    asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(LENGTH), 5)
    await until(lambda: decoder.counter("fabric_arrivals_total") > 0, "its first pages are here")
    os.kill(prefiller.process.pid, signal.SIGSTOP)
    world.gateway.name_prefillers(decoder.uuid)
    await world.gateway.parked(asked)
    asked.use(None)
    assert await asked.text() == world.reference.text(prompt(LENGTH), 5)
    await until(lambda: decoder.gauge("pages_held") == 0, "it has ended")
    # Where it has our memory mapped it lets go of it when it wakes; until then its pages are nobody's.
    num_quarantined = len(decoder.instance.pools[0]._quarantined)
    assert num_quarantined == (LENGTH // PAGE if world.transport == "mapped" else 0)
    others = sorted(set(range(NUM_PAGES)) - decoder.instance.pools[0]._quarantined)
    before = bytes_of(decoder, others)
    os.kill(prefiller.process.pid, signal.SIGCONT)
    world.gateway.name_prefillers(decoder.uuid, prefiller.uuid)
    await until(lambda: decoder.remote._messenger._prefillers.num_ready == 1, "it is ready again")
    await asyncio.sleep(0.8)  # whatever it still computed and sent has come by now
    assert (bytes_of(decoder, others) == before).all()
    await decoder.idle()
    again = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(LENGTH, seed=1), 5)
    assert await again.text() == world.reference.text(prompt(LENGTH, seed=1), 5)
    assert decoder.counter("tickets_ready_total") == 1
