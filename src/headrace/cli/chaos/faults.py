"""What is done to a deployment, by real means: signals, sockets of other processes, bytes in their memory, clients.

A fault is a plain record with an act. The act finds its victims by the request that was seen (`Scene`), does the harm,
says when (`struck`), and returns when the harm is over; whatever it stopped or bent is as before then.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from headrace.cli.chaos.judge import Kind
from headrace.cli.chaos.load import Load, Running
from headrace.cli.chaos.memory import flip_a_landed_byte
from headrace.cli.chaos.sight import Sight
from headrace.cli.chaos.sockets import connections_between, cut, darkened, slowed, try_rob
from headrace.cli.chaos.states import STATES, Sighting, State, serving
from headrace.protocol.messages import FabricRole
from headrace.protocol.operator import InstanceFacts

BACK_WITHIN_S = 90.0
STORM, STAYING_SHARE = 20, 0.1
BURST = 64
SLOW_BYTES_PER_S = 2_000_000
DARK_S, SLOW_S = 5.0, 5.0
STOPPED_S = 1.5
"""Less than the silence after which a gateway takes an instance for gone."""

Bending = Callable[[Sequence[socket.socket]], AbstractContextManager[None]]


class NotPossible(Exception):
    """Here, and why."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """`target` is the request that was seen. `hit`: requests under way that have to do with the victims."""

    sighting: Sighting
    target: Running
    load: Load
    sight: Sight
    struck_at: float | None = None
    hit: list[Running] = field(default_factory=list)

    @property
    def prefiller(self) -> InstanceFacts:
        """The target's, or one where it has none yet. Raises NotPossible."""
        return self.sighting.prefiller or self._one_of("prefiller")

    @property
    def decoder(self) -> InstanceFacts:
        return self.sighting.decoder or self._one_of("decoder", "colocated")

    def _one_of(self, *roles: str) -> InstanceFacts:
        """One that works on something, if any does."""
        found = serving(self.sighting.deployment, *roles)
        if not found:
            raise NotPossible(f"no {' or '.join(roles)} is here")
        busy = {uuid for one in self.sighting.deployment.requests for uuid in (one.prefiller, one.decoder)}
        return next((one for one in found if one.uuid in busy), found[0])

    def struck(self, at: float, *victims: InstanceFacts) -> None:
        """Just now. No victims: everybody is hit."""
        if self.struck_at is not None:
            return
        self.struck_at = at
        uuids = {one.uuid for one in victims}
        ids = {one.request_id for one in self.sighting.deployment.requests if {one.prefiller, one.decoder} & uuids}
        self.hit = [
            one
            for one in self.load.under_way()
            if not victims or one is self.target or any(_is_of(request_id, one) for request_id in ids)
        ]


def _is_of(request_id: str, running: Running) -> bool:
    """A client knows its request's id from the first token on."""
    return any(request_id.startswith(known) for known in running.answer.request_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`allowed` are ends of answers that are right here beside whole ones; `breaks`: connections may break, and clients
    ask again. `is_quiet`: nothing else runs while it strikes. `counter`: of instances, rises where it was noticed, for
    one that may miss."""

    text: str
    act: Callable[[Scene], Awaitable[None]]
    allowed: frozenset[Kind] = frozenset()
    breaks: bool = False
    is_quiet: bool = False
    counter: str | None = None
    states: Sequence[State] = tuple(STATES)


# ---- processes -------------------------------------------------------------------------------------------------


@contextmanager
def _held(pid: int) -> Iterator[int]:
    """A pidfd: no signal of ours reaches a stranger that got its number."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _kill(pid: int) -> None:
    with _held(pid) as pidfd:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


async def _stop(pid: int, for_s: float) -> None:
    with _held(pid) as pidfd:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)


async def _kill_prefiller(scene: Scene) -> None:
    victim = scene.prefiller
    scene.struck(time.monotonic(), victim)
    _kill(victim.pid)


async def _kill_prefiller_twice(scene: Scene) -> None:
    victim = scene.prefiller
    scene.struck(time.monotonic(), victim)
    _kill(victim.pid)
    _kill((await _come_back(scene.sight, victim, victim.name)).pid)


async def _change_role_twice(scene: Scene) -> None:
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


async def _kill_decoder(scene: Scene) -> None:
    victim = scene.decoder
    scene.struck(time.monotonic(), victim)
    _kill(victim.pid)


async def _kill_both(scene: Scene) -> None:
    victims = (scene.prefiller, scene.decoder)
    scene.struck(time.monotonic(), *victims)
    for victim in victims:
        _kill(victim.pid)


def _stop_prefiller(for_s: float) -> Callable[[Scene], Awaitable[None]]:
    async def act(scene: Scene) -> None:
        victim = scene.prefiller
        scene.struck(time.monotonic(), victim)
        await _stop(victim.pid, for_s)

    return act


async def _stop_decoder(scene: Scene) -> None:
    victim = scene.decoder
    scene.struck(time.monotonic(), victim)
    await _stop(victim.pid, 5.0)


async def _kill_gateway(scene: Scene) -> None:
    scene.struck(time.monotonic())
    _kill(scene.sighting.deployment.gateway.pid)


async def _stop_gateway(scene: Scene) -> None:
    scene.struck(time.monotonic())
    await _stop(scene.sighting.deployment.gateway.pid, 4.0)


# ---- links and memory ------------------------------------------------------------------------------------------

NO_TCP = "KV does not travel by TCP here: there is no link to take hold of"


async def _cut_link(scene: Scene) -> None:
    victims = (scene.prefiller, scene.decoder)
    with connections_between(victims[0].pid, victims[1].pid) as ends:
        if not ends:
            raise NotPossible(NO_TCP)
        scene.struck(time.monotonic(), *victims)
        cut(ends)


async def _darken_link(scene: Scene) -> None:
    await _bend_link(scene, darkened, DARK_S)


async def _slow_link(scene: Scene) -> None:
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


async def _lose_write(scene: Scene) -> None:
    """Stopped for a moment, the decoder reads nothing meanwhile, so that a write can be taken from under it."""
    victims = (scene.prefiller, scene.decoder)
    with connections_between(victims[1].pid, victims[0].pid) as ends, _held(victims[1].pid) as pidfd:
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


async def _corrupt_page(scene: Scene) -> None:
    victim = scene.decoder
    if not await asyncio.to_thread(flip_a_landed_byte, victim.pid):
        raise NotPossible("no page landed in time")
    scene.struck(time.monotonic(), victim)


# ---- clients ---------------------------------------------------------------------------------------------------


async def _leave(scene: Scene) -> None:
    scene.struck(time.monotonic(), scene.decoder)
    scene.target.task.cancel()


async def _storm(scene: Scene) -> None:
    """Nine of ten leave, whatever came of theirs."""
    for known in scene.load.draw_short(STORM):
        scene.load.start(known)
    await asyncio.sleep(0.3)
    scene.struck(time.monotonic())
    leaving = scene.load.under_way()
    for one in leaving[: round(len(leaving) * (1 - STAYING_SHARE))]:
        one.task.cancel()


async def _burst(scene: Scene) -> None:
    scene.struck(time.monotonic())
    for known in scene.load.draw_short(BURST):
        scene.load.start(known)


# ---- the table -------------------------------------------------------------------------------------------------

OPEN_TICKET: Final[Sequence[State]] = ("prefilling", "transferring")

FAULTS: Final[Mapping[str, Fault]] = {
    "prefiller-killed": Fault(text="SIGKILL", act=_kill_prefiller),
    "decoder-stopped-5s": Fault(text="SIGSTOP, SIGCONT after 5 s", act=_stop_decoder),
    "link-cut": Fault(text="TCP connections of the pair shut down", act=_cut_link),
    "gateway-killed": Fault(text="SIGKILL; clients ask again", act=_kill_gateway, breaks=True),
    "prefiller-stopped-5s": Fault(text="SIGSTOP, SIGCONT after 5 s", act=_stop_prefiller(5.0)),
    "client-leaves": Fault(text="its connection is closed", act=_leave),
    "decoder-killed": Fault(text="SIGKILL", act=_kill_decoder),
    "link-dark": Fault(text="every segment between the pair dropped for 5 s", act=_darken_link),
    "prefiller-killed-twice": Fault(text="SIGKILL, and again when it is back", act=_kill_prefiller_twice),
    "gateway-stopped-4s": Fault(text="SIGSTOP, SIGCONT after 4 s", act=_stop_gateway),
    "page-corrupted": Fault(
        text="a bit of a landed page flipped, nothing else running",
        act=_corrupt_page,
        is_quiet=True,
        counter="wrong_bytes_total",
        states=OPEN_TICKET,
    ),
    "write-lost": Fault(
        text="one write taken out of the decoder's socket, nothing else running",
        act=_lose_write,
        is_quiet=True,
        counter="tickets_failed_lost_write_total",
        states=OPEN_TICKET,
    ),
    "link-slow": Fault(text="the pair's connections paced to 2 MB/s for 5 s", act=_slow_link),
    "abort-storm": Fault(text="20 more requests, then nine of ten leave", act=_storm),
    "both-killed": Fault(text="prefiller and decoder, SIGKILL", act=_kill_both),
    "overload": Fault(text="64 more at once", act=_burst, allowed=frozenset({"refused"})),
    "role-changed-twice": Fault(text="a prefiller drained, a decoder for a moment, and back", act=_change_role_twice),
    "prefiller-stopped-40s": Fault(text="SIGSTOP, SIGCONT after 40 s", act=_stop_prefiller(40.0)),
}
"""In the order in which a matrix goes through them: whoever is killed has time to come back before the next time."""
