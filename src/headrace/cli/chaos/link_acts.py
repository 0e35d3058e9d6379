"""The link between a prefiller and a decoder, and what has come over it: cut, darkened, slowed, robbed, corrupted."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from headrace.cli.chaos.memory import flip_a_landed_byte
from headrace.cli.chaos.process_acts import held
from headrace.cli.chaos.scene import NotPossible, Scene
from headrace.cli.chaos.sockets import connections_between, cut, darkened, slowed, try_rob

SLOW_BYTES_PER_S = 2_000_000
DARK_S, SLOW_S = 5.0, 5.0
STOPPED_S = 1.5
"""Less than the silence after which a gateway takes an instance for gone."""

Bending = Callable[[Sequence[socket.socket]], AbstractContextManager[None]]
NO_TCP = "KV does not travel by TCP here: there is no link to take hold of"


async def cut_link(scene: Scene) -> None:
    victims = (scene.prefiller, scene.decoder)
    with connections_between(victims[0].pid, victims[1].pid) as ends:
        if not ends:
            raise NotPossible(NO_TCP)
        scene.struck(time.monotonic(), *victims)
        cut(ends)


async def darken_link(scene: Scene) -> None:
    await _bend_link(scene, darkened, DARK_S)


async def slow_link(scene: Scene) -> None:
    await _bend_link(scene, lambda ends: slowed(ends, SLOW_BYTES_PER_S), SLOW_S)


async def _bend_link(scene: Scene, bent: Bending, for_s: float) -> None:
    """Both directions."""
    victims = (scene.prefiller, scene.decoder)
    one, other = (victim.pid for victim in victims)
    with connections_between(one, other) as here, connections_between(other, one) as there:
        if not here:
            raise NotPossible(NO_TCP)
        with bent(here), bent(there):
            scene.struck(time.monotonic(), *victims)
            await asyncio.sleep(for_s)


async def lose_write(scene: Scene) -> None:
    """Stopped for a moment, the decoder reads nothing meanwhile, so that a write can be taken from under it."""
    victims = (scene.prefiller, scene.decoder)
    with connections_between(victims[1].pid, victims[0].pid) as ends, held(victims[1].pid) as pidfd:
        if not ends:
            raise NotPossible(NO_TCP)
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        try:
            until = time.monotonic() + STOPPED_S
            while not (is_lost := try_rob(ends)) and time.monotonic() < until:
                await asyncio.sleep(0.005)
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        if not is_lost:
            raise NotPossible("no write came in at the head of a connection")
        scene.struck(time.monotonic(), *victims)


async def corrupt_page(scene: Scene) -> None:
    victim = scene.decoder
    if not await asyncio.to_thread(flip_a_landed_byte, victim):
        raise NotPossible("no page landed in time")
    scene.struck(time.monotonic(), victim)
