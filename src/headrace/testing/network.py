"""A network in memory: everything in flight, a clock that is moved, and one random generator for all that happens.

Owns the pending deliveries and the endpoints' addresses; what a delivery does is known to whoever scheduled it, and
of an endpoint it knows what lies open to the others. The same seed, faults and calls give the same history. One thread
calls network and endpoints; nothing sleeps.

    scheduled -> due (its time has come) -> delivered by one step()
                                         -> held (its endpoint hangs, its pair is cut) -> due again

Who has an endpoint as a peer is told when it dies and, on a network with `silence_s`, when it is heard no more.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.errors import InputError
from headrace.fabric.interface import PeerId
from headrace.testing.endpoint import Endpoint
from headrace.testing.faults import Faults

Revocation = Literal["at once", "when let go"]
"""When access that is revoked has ended: as on a network, or as where both have the memory mapped. There a writer lets
go when it is told, which it is not while it hangs, or when it is gone."""


_SCHEME = b"loopback:"
_NUM_PLACE_BYTES = 8


def place_of(address: bytes) -> bytes:
    """Who is bound to the same place later may have an address that goes on otherwise, as where it is watched."""
    return address[: len(_SCHEME) + _NUM_PLACE_BYTES]


@dataclass(frozen=True, slots=True, eq=False)
class _Delivery:
    act: Callable[[], None]
    at: Endpoint | None  # who must be awake for it
    source: Endpoint | None  # where it crosses the network from; None: it does not


class LoopbackNetwork:
    """`faults` may be replaced at any time; it holds for what is posted from then on. `revocation` is for all pairs,
    and so is `silence_s`, after which missing heartbeats are told; without it they never are."""

    def __init__(
        self,
        *,
        seed: int,
        faults: Faults | None = None,
        revocation: Revocation = "at once",
        silence_s: float | None = None,
    ) -> None:
        if silence_s is not None and silence_s < 0:
            raise InputError("silence_s", f"must be at least 0 seconds, is {silence_s}")
        self.rng = random.Random(seed)
        self.revocation = revocation
        self.silence_s = silence_s
        self.faults = faults or Faults()
        self.now = 0.0
        self._num_scheduled = 0
        self._waiting: list[tuple[float, int, _Delivery]] = []
        self._due: deque[_Delivery] = deque()
        self._held: list[_Delivery] = []
        self._endpoints: dict[bytes, Endpoint] = {}
        self._hung: dict[Endpoint, float] = {}  # -> since when
        self._cut: dict[frozenset[Endpoint], float] = {}
        self._lanes: dict[tuple[Endpoint, Endpoint], deque[bytes]] = {}

    def __repr__(self) -> str:
        return (
            f"LoopbackNetwork(now={self.now:.6f}, endpoints={len(self._endpoints)}, waiting={len(self._waiting)}, "
            f"due={len(self._due)}, held={len(self._held)})"
        )

    def join(self, endpoint: Endpoint) -> bytes:
        """-> the fresh address at which the others find it from now on."""
        address = _SCHEME + self.rng.randbytes(_NUM_PLACE_BYTES)
        self._endpoints[address] = endpoint
        return address

    def find(self, address: bytes) -> Endpoint | None:
        return self._endpoints.get(address)

    # ---- time

    def step(self) -> bool:
        """Perform one delivery that is due; False when none is."""
        while self._waiting and self._waiting[0][0] <= self.now:
            self._due.append(heapq.heappop(self._waiting)[2])
        while self._due:
            delivery = self._take_due()
            if self._is_held(delivery):
                self._held.append(delivery)
                continue
            delivery.act()
            return True
        return False

    def advance(self, seconds: float) -> None:
        """Move the clock; delivers nothing."""
        if seconds < 0:
            raise InputError("seconds", f"the clock does not run backwards, is {seconds}")
        self.now += seconds

    def next_due(self) -> float | None:
        """When the next delivery may be made (now, if one is due already); None: nothing is in flight but what is
        held."""
        if self._due:
            return self.now
        return max(self.now, self._waiting[0][0]) if self._waiting else None

    def run(self, until: Callable[[], bool] | None = None, *, deadline: float | None = None) -> bool:
        """Step, moving the clock where nothing is due, until `until` holds, nothing is in flight, or the next
        delivery comes after `deadline` (the clock then stands there). -> whether `until` held."""
        while until is None or not until():
            if self.step():
                continue
            due = self.next_due()
            if due is None or (deadline is not None and due > deadline):
                self.now = max(self.now, deadline or 0.0)
                return until is not None and until()
            self.now = due
        return True

    # ---- adversary

    def kill(self, endpoint: Endpoint) -> None:
        """kill -9: posted writes may still land, nothing new comes; its peers notice in a while."""
        endpoint.vanish()

    def hang(self, endpoint: Endpoint) -> None:
        """SIGSTOP: it posts, receives and completes nothing; what comes for it waits."""
        if endpoint not in self._hung:
            self._hung[endpoint] = self.now
            for listener in self._all():
                self._listen(endpoint, listener)

    def wake(self, endpoint: Endpoint) -> None:
        if self._hung.pop(endpoint, None) is not None:
            for listener in self._all():
                self._beat(endpoint, listener)
        self.reconsider_held()

    def cut(self, first: Endpoint, second: Endpoint) -> None:
        """Nothing passes between the two, in either direction, until `heal`; what is under way waits."""
        pair = frozenset((first, second))
        if pair not in self._cut:
            self._cut[pair] = self.now
            self._listen(first, second)
            self._listen(second, first)

    def heal(self, first: Endpoint, second: Endpoint) -> None:
        if self._cut.pop(frozenset((first, second)), None) is not None:
            self._beat(first, second)
            self._beat(second, first)
        self.reconsider_held()

    # ---- for endpoints and flights

    def draw(self, probability: float) -> bool:
        return probability > 0.0 and self.rng.random() < probability

    def schedule(
        self,
        act: Callable[[], None],
        *,
        at: Endpoint | None,
        source: Endpoint | None = None,
        late: float = 0.0,
        delay_s: tuple[float, float] | None = None,
    ) -> None:
        """Make `act` a delivery, after a drawn delay (`delay_s`, the faults' own by default)."""
        delay = self.rng.uniform(*(self.faults.delay_s if delay_s is None else delay_s))
        if self.draw(late):
            delay += self.rng.uniform(*self.faults.late_s)
        self._num_scheduled += 1
        heapq.heappush(self._waiting, (self.now + delay, self._num_scheduled, _Delivery(act, at, source)))

    def post_message(self, source: Endpoint, target: Endpoint, message: bytes) -> None:
        """Messages of one pair wait in one lane: whichever delivery comes first takes the first of them."""
        lane = self._lanes.setdefault((source, target), deque())
        lane.append(message)
        self.schedule(lambda: self._deliver_message(lane, target), at=target, source=source)

    def reconsider_held(self) -> None:
        """Somebody woke, healed or died: what was held is due again."""
        held, self._held = self._held, []
        self._due.extend(held)

    # ---- who is there

    def leave(self, endpoint: Endpoint) -> None:
        """It is gone: what waits for it waits no more, and whoever has it as a peer is to notice."""
        self.reconsider_held()
        for address in [address for address, found in self._endpoints.items() if found is endpoint]:
            for listener in self._all():
                self.notice_if_gone(address, listener)

    def notice_if_gone(self, address: bytes, listener: Endpoint) -> None:
        """`listener` loses its peer at `address` in a while, unless somebody is there again by then."""
        gone, peer = self._endpoints.get(address), listener.peer_named(address)
        if gone is None or not gone.is_gone or peer is None:
            return

        def notice() -> None:
            if self._endpoints[address] is gone:
                listener.lose(peer)

        self.schedule(notice, at=listener, source=gone, delay_s=self.faults.death_noticed_s)

    def _listen(self, speaker: Endpoint, listener: Endpoint) -> None:
        """Its heartbeats stop now; are they missed when `silence_s` is over?"""
        since = self.now

        def miss() -> None:
            stands_still = self._hung.get(speaker) == since and not speaker.is_gone
            if stands_still or self._cut.get(frozenset((speaker, listener))) == since:
                self._tell_of(speaker, listener, listener.miss)

        if self.silence_s is not None:
            self.schedule(miss, at=listener, delay_s=(self.silence_s, self.silence_s))

    def _beat(self, speaker: Endpoint, listener: Endpoint) -> None:
        def hear() -> None:
            if not (speaker.is_gone or speaker in self._hung or frozenset((speaker, listener)) in self._cut):
                self._tell_of(speaker, listener, listener.hear)

        if self.silence_s is not None:
            self.schedule(hear, at=listener, delay_s=(0.0, 0.0))

    def _tell_of(self, speaker: Endpoint, listener: Endpoint, tell: Callable[[PeerId], None]) -> None:
        for address, found in self._endpoints.items():
            peer = listener.peer_named(address) if found is speaker else None
            if peer is not None:
                tell(peer)

    def _all(self) -> list[Endpoint]:
        return [endpoint for endpoint in dict.fromkeys(self._endpoints.values()) if not endpoint.is_gone]

    # ---- inside

    def _deliver_message(self, lane: deque[bytes], target: Endpoint) -> None:
        if self.faults.reorder_messages:
            lane.rotate(-self.rng.randrange(len(lane)))
        target.receive(lane.popleft())

    def _take_due(self) -> _Delivery:
        if self.faults.reorder and len(self._due) > 1:
            chosen = self.rng.randrange(len(self._due))
            self._due[chosen], self._due[-1] = self._due[-1], self._due[chosen]
            return self._due.pop()
        return self._due.popleft()

    def _is_held(self, delivery: _Delivery) -> bool:
        if delivery.at in self._hung and delivery.at is not None and not delivery.at.is_gone:
            return True
        crosses = delivery.source is not None and delivery.at is not None
        return bool(self._cut) and crosses and frozenset((delivery.source, delivery.at)) in self._cut
