"""Runs one messenger on an asyncio loop: fabric events in, outcomes out, timers when they are due.

Owns nothing but the wake-up and the pidfds of peers on this host. Its loop is the one that owns the messenger and the
page pool; whatever else calls them runs there too, and pokes the pump afterwards when it opened something with a
deadline. The fabric's owner thread wakes it through the event fd, so it costs nothing while nothing happens.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from headrace.fabric.interface import Event, Fabric, PeerId
from headrace.messenger.outcomes import PeerReady
from headrace.messenger.process import ProcessName

Outcome = TypeVar("Outcome")
Told = TypeVar("Told", covariant=True)


class Messenger(Protocol[Told]):
    def handle(self, events: Sequence[Event], now: float) -> None: ...
    def advance(self, now: float) -> None: ...
    def next_due(self) -> float | None: ...
    def peer_exited(self, peer: PeerId, now: float) -> None: ...
    def drain_outcomes(self) -> Sequence[Told]: ...


class Pump(Generic[Outcome]):
    """`on_outcome` is called on the loop, once for each outcome, in order."""

    def __init__(
        self,
        messenger: Messenger[Outcome],
        fabric: Fabric,
        on_outcome: Callable[[Outcome], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._messenger = messenger
        self._fabric = fabric
        self._on_outcome = on_outcome
        self._clock = clock
        self._wake = asyncio.Event()
        self._host = ProcessName.own().host
        self._pidfds: dict[PeerId, tuple[int, ProcessName]] = {}
        self._exited: list[PeerId] = []

    def poke(self) -> None:
        """Something was asked of the messenger from outside (a ticket opened or cancelled, a step ended, a peer given
        up): look at its timers and outcomes again."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. An error of the messenger or of `on_outcome` ends it: nothing is served half."""
        loop = asyncio.get_running_loop()
        event_fd = self._fabric.event_fd  # kept: a fabric that was closed meanwhile has none to take out of the loop
        loop.add_reader(event_fd, self._wake.set)
        try:
            while True:
                self._wake.clear()
                self.turn()
                due = self._messenger.next_due()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if due is None else max(0.0, due - self._clock())):
                        await self._wake.wait()
        finally:
            loop.remove_reader(event_fd)
            for peer in list(self._pidfds):
                self._unwatch(peer)

    def turn(self) -> None:
        """One pass: what the fabric told, who has exited, what is due, and what came of it. It is known who a peer is
        now before an exit is told: at a fixed address another process may have come after the one that exited."""
        self._messenger.handle(self._fabric.drain_events(), self._clock())
        self._tell()
        while self._exited:
            self._messenger.peer_exited(self._exited.pop(), self._clock())
        self._messenger.advance(self._clock())
        self._tell()

    def _tell(self) -> None:
        """Until there are no outcomes: whoever is told of one may cause the next (a cancel, a failed step)."""
        while outcomes := self._messenger.drain_outcomes():
            for outcome in outcomes:
                if isinstance(outcome, PeerReady):
                    self._watch(outcome)
                self._on_outcome(outcome)

    def _watch(self, ready: PeerReady) -> None:
        # An earlier epoch's, or that of an earlier process at this address; its exit is no longer this peer's.
        self._unwatch(ready.peer)
        self._exited = [peer for peer in self._exited if peer != ready.peer]
        if ready.process.host != self._host:
            return
        pidfd = ready.process.try_open()
        if pidfd is None:
            self._exited.append(ready.peer)
            self._wake.set()
            return
        self._pidfds[ready.peer] = (pidfd, ready.process)
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit, ready)

    def _on_exit(self, ready: PeerReady) -> None:
        """Left to the next turn: an error of the messenger in a callback of the loop would end nothing."""
        watched = self._pidfds.get(ready.peer)
        if watched is not None and watched[1] == ready.process:  # else called for one that is watched no more
            self._unwatch(ready.peer)
            self._exited.append(ready.peer)
            self._wake.set()

    def _unwatch(self, peer: PeerId) -> None:
        pidfd, _ = self._pidfds.pop(peer, (None, None))
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
