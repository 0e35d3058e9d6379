"""A network in memory: everything in flight, a clock that is moved, and one random generator for all that happens.

Owns the pending deliveries and the endpoints' addresses; what a delivery does is known to whoever scheduled it. The
same seed, faults and calls give the same history. One thread calls network and endpoints; nothing sleeps.

    scheduled -> due (its time has come) -> delivered by one step()
                                         -> held (its endpoint hangs, its pair is cut) -> due again
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.testing.faults import Faults
from headrace.testing.loopback import LoopbackFabric


@dataclass(frozen=True, slots=True, eq=False)
class _Delivery:
    act: Callable[[], None]
    at: LoopbackFabric | None  # who must be awake for it
    source: LoopbackFabric | None  # where it crosses the network from; None: it does not


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
        self._endpoints: dict[bytes, LoopbackFabric] = {}
        self._hung: set[LoopbackFabric] = set()
        self._cut: set[frozenset[LoopbackFabric]] = set()
        self._lanes: dict[tuple[LoopbackFabric, LoopbackFabric], deque[bytes]] = {}

    def __repr__(self) -> str:
        return (
            f"LoopbackNetwork(now={self.now:.6f}, endpoints={len(self._endpoints)}, waiting={len(self._waiting)}, "
            f"due={len(self._due)}, held={len(self._held)})"
        )

    def endpoint(self, memory: NDArray[np.uint8]) -> LoopbackFabric:
        """A fabric over `memory` (`[length] uint8`), with a fresh address."""
        if memory.dtype != np.uint8 or memory.ndim != 1:
            raise InputError("memory", f"must be one-dimensional uint8, is {memory.ndim}-dimensional {memory.dtype}")
        address = b"loopback:" + self.rng.getrandbits(64).to_bytes(8, "little")
        made = self._endpoints[address] = LoopbackFabric(self, address, memory)
        return made

    def find(self, address: bytes) -> LoopbackFabric | None:
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

    def kill(self, fabric: LoopbackFabric) -> None:
        """kill -9: posted writes may still land, nothing new comes, nobody is told."""
        fabric.vanish()

    def hang(self, fabric: LoopbackFabric) -> None:
        """SIGSTOP: it posts, receives and completes nothing; what comes for it waits."""
        self._hung.add(fabric)

    def wake(self, fabric: LoopbackFabric) -> None:
        self._hung.discard(fabric)
        self.reconsider_held()

    def cut(self, first: LoopbackFabric, second: LoopbackFabric) -> None:
        """Nothing passes between the two, in either direction, until `heal`; what is under way waits."""
        self._cut.add(frozenset((first, second)))

    def heal(self, first: LoopbackFabric, second: LoopbackFabric) -> None:
        self._cut.discard(frozenset((first, second)))
        self.reconsider_held()

    # ---- for endpoints and flights

    def draw(self, probability: float) -> bool:
        return probability > 0.0 and self.rng.random() < probability

    def schedule(
        self,
        act: Callable[[], None],
        *,
        at: LoopbackFabric | None,
        source: LoopbackFabric | None = None,
        late: float = 0.0,
        delay_s: tuple[float, float] | None = None,
    ) -> None:
        """Make `act` a delivery, after a drawn delay (`delay_s`, the faults' own by default)."""
        delay = self.rng.uniform(*(self.faults.delay_s if delay_s is None else delay_s))
        if self.draw(late):
            delay += self.rng.uniform(*self.faults.late_s)
        self._num_scheduled += 1
        heapq.heappush(self._waiting, (self.now + delay, self._num_scheduled, _Delivery(act, at, source)))

    def post_message(self, source: LoopbackFabric, target: LoopbackFabric, message: bytes) -> None:
        """Messages of one pair wait in one lane: whichever delivery comes first takes the first of them."""
        lane = self._lanes.setdefault((source, target), deque())
        lane.append(message)
        self.schedule(lambda: self._deliver_message(lane, target), at=target, source=source)

    def reconsider_held(self) -> None:
        """Somebody woke, healed or died: what was held is due again."""
        held, self._held = self._held, []
        self._due.extend(held)

    def _deliver_message(self, lane: deque[bytes], target: LoopbackFabric) -> None:
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
