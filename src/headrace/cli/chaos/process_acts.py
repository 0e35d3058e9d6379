"""Processes of a deployment, killed, stopped, or told to change their role.

Signals go by pidfd: none of ours reaches a stranger that got a number.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from headrace.cli.chaos.scene import Scene
from headrace.cli.chaos.sight import Sight
from headrace.cli.chaos.states import serving
from headrace.protocol.messages import FabricRole
from headrace.protocol.operator import InstanceFacts

BACK_WITHIN_S = 90.0


@contextmanager
def held(pid: int) -> Iterator[int]:
    """A pidfd: no signal of ours reaches a stranger that got its number."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _kill(pid: int) -> None:
    with held(pid) as pidfd:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


async def _stop(pid: int, for_s: float) -> None:
    with held(pid) as pidfd:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)


async def kill_prefiller(scene: Scene) -> None:
    victim = scene.prefiller
    scene.struck(time.monotonic(), victim)
    _kill(victim.pid)


async def kill_prefiller_twice(scene: Scene) -> None:
    victim = scene.prefiller
    scene.struck(time.monotonic(), victim)
    _kill(victim.pid)
    _kill((await _come_back(scene.sight, victim, victim.name)).pid)


async def change_role_twice(scene: Scene) -> None:
    """Back again in the end, so that the deployment is whole."""
    victim = scene.prefiller
    scene.struck(time.monotonic(), victim)
    roles: Sequence[FabricRole] = ("decoder", "prefiller")
    for role in roles:
        name = await scene.sight.change_role(victim.uuid, role)
        victim = await _come_back(scene.sight, victim, name)


async def _come_back(sight: Sight, former: InstanceFacts, name: str) -> InstanceFacts:
    """-> who comes after it, in whichever role. Raises TimeoutError."""
    async with asyncio.timeout(BACK_WITHIN_S):
        while True:
            deployment = await sight.look()
            for one in [] if deployment is None else serving(deployment, "prefiller", "decoder", "colocated"):
                if one.name == name and one.pid != former.pid:
                    return one
            await asyncio.sleep(0.1)


async def kill_decoder(scene: Scene) -> None:
    victim = scene.decoder
    scene.struck(time.monotonic(), victim)
    _kill(victim.pid)


async def kill_both(scene: Scene) -> None:
    victims = (scene.prefiller, scene.decoder)
    scene.struck(time.monotonic(), *victims)
    for victim in victims:
        _kill(victim.pid)


def stop_prefiller(for_s: float) -> Callable[[Scene], Awaitable[None]]:
    async def act(scene: Scene) -> None:
        victim = scene.prefiller
        scene.struck(time.monotonic(), victim)
        await _stop(victim.pid, for_s)

    return act


async def stop_decoder(scene: Scene) -> None:
    victim = scene.decoder
    scene.struck(time.monotonic(), victim)
    await _stop(victim.pid, 5.0)


async def kill_gateway(scene: Scene) -> None:
    scene.struck(time.monotonic())
    _kill(scene.sighting.deployment.gateway.pid)


async def stop_gateway(scene: Scene) -> None:
    scene.struck(time.monotonic())
    await _stop(scene.sighting.deployment.gateway.pid, 4.0)
