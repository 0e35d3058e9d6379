"""A network in memory: everything in flight, a clock that is moved, and one random generator for all that happens.

Owns the pending deliveries and the endpoints' addresses; what a delivery does is known to whoever scheduled it, and
of an endpoint it knows what lies open to the others. The same seed, faults and calls give the same history. One thread
calls network and endpoints; nothing sleeps.

    scheduled -> due (its time has come) -> delivered by one step()
                                         -> held (its endpoint hangs, its pair is cut) -> due again
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.fabric.interface import Imm
from headrace.testing.faults import Faults
from headrace.testing.grants import Access


class Endpoint(Protocol):
    """The side that an endpoint turns to the network: what messages and writes find there."""

    memory: NDArray[np.uint8]

    @property
    def is_gone(self) -> bool:
        """Closed or killed; nothing reaches it any more."""
        ...

    def access(self, key: int) -> Access | None:
        """What `key` opens now."""
        ...

    def arrive(self, imm: Imm) -> None: ...

    def receive(self, message: bytes) -> None: ...

    def vanish(self) -> None:
        """Be gone, untold, from one moment to the next."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Delivery:
    act: Callable[[], None]
    at: Endpoint | None  # who must be awake for it
    source: Endpoint | None  # where it crosses the network from; None: it does not


class LoopbackNetwork:
    """`faults` may be replaced at any time; it holds for what is posted from then on."""

    def __init__(self, *, seed: int, faults: Faults | None = None) -> None:
        self.rng = random.Random(seed)
        self.faults = faults or Faults()
        self.now = 0.0
        self._num_scheduled = 0
        self._waiting: list[tuple[float, int, _Delivery]] = []
        self._due: deque[_Delivery] = deque()
        self._held: list[_Delivery] = []
        self._endpoints: dict[bytes, Endpoint] = {}
        self._hung: set[Endpoint] = set()
        self._cut: set[frozenset[Endpoint]] = set()
        self._lanes: dict[tuple[Endpoint, Endpoint], deque[bytes]] = {}

    def __repr__(self) -> str:
        return (
            f"LoopbackNetwork(now={self.now:.6f}, endpoints={len(self._endpoints)}, waiting={len(self._waiting)}, "
            f"due={len(self._due)}, held={len(self._held)})"
        )

    def join(self, endpoint: Endpoint) -> bytes:
        """-> the fresh address at which the others find it from now on."""
        address = b"loopback:" + self.rng.getrandbits(64).to_bytes(8, "little")
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
        """kill -9: posted writes may still land, nothing new comes, nobody is told."""
        endpoint.vanish()

    def hang(self, endpoint: Endpoint) -> None:
        """SIGSTOP: it posts, receives and completes nothing; what comes for it waits."""
        self._hung.add(endpoint)

    def wake(self, endpoint: Endpoint) -> None:
        self._hung.discard(endpoint)
        self.reconsider_held()

    def cut(self, first: Endpoint, second: Endpoint) -> None:
        """Nothing passes between the two, in either direction, until `heal`; what is under way waits."""
        self._cut.add(frozenset((first, second)))

    def heal(self, first: Endpoint, second: Endpoint) -> None:
        self._cut.discard(frozenset((first, second)))
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
