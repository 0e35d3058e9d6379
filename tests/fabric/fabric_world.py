"""A world for the conformance suite: endpoints of one kind, their memories and events, and a way to let time pass.

`LoopbackWorld` steps the simulated network, `NativeWorld` waits on the event fds with a deadline. The tests know
neither; they run on one thread.
"""

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.fabric.interface import (
    Descriptor,
    Event,
    Fabric,
    Imm,
    MessageReceived,
    Pages,
    PageWrites,
    PeerId,
    Reached,
    Revoked,
    Surplus,
    TransferDone,
    TransferId,
)
from headrace.testing import Faults, LoopbackFabric, LoopbackNetwork

DEADLINE_S = 20.0
QUIET_S = 0.1
POISON = 0xA5
LENGTH = 1 << 20

E = TypeVar("E", bound=Event)


@dataclass(slots=True)
class Side:
    """One endpoint, its memory, and every event it told so far."""

    fabric: Fabric
    memory: NDArray[np.uint8]
    events: list[Event] = field(default_factory=list)
    closed: bool = False  # a closed side is not drained

    def close(self) -> None:
        self.closed = True
        self.fabric.close()

    def drain(self) -> int:
        news = self.fabric.drain_events()
        self.events += news
        return len(news)

    def told(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def messages(self) -> list[bytes]:
        return [event.message for event in self.told(MessageReceived)]

    def done(self, transfer: TransferId) -> TransferDone | None:
        """The one result of `transfer`, None while there is none; two are an error."""
        results = [event for event in self.told(TransferDone) if event.transfer == transfer]
        assert len(results) <= 1, f"told twice: {results}"
        return results[0] if results else None

    def reached(self, imm: int) -> list[int]:
        return [event.arrivals for event in self.told(Reached) if event.imm == imm]

    def surplus(self, imm: int) -> list[Surplus]:
        return [event for event in self.told(Surplus) if event.imm == imm]


class World(Protocol):
    """What a test may do with endpoints of one kind."""

    name: str
    sides: list[Side]

    def side(self, length: int = LENGTH) -> Side: ...

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Let time pass until `predicate` holds; fails the test when it never does."""
        ...

    def settle(self) -> None:
        """Let time pass until nothing happens any more."""
        ...

    def pause(self, length: int) -> None:
        """Let a little happen, more for a greater `length`; nothing is drained."""
        ...

    def close(self) -> None: ...


EVERY_DAY = Faults(
    delay_s=(0.0, 0.002),
    reorder=True,
    early_completion=0.5,
    split_write=0.3,
    late_imm=0.3,
    late_completion=0.05,
    duplicate_completion=0.1,
    full_queue=0.05,
)
"""Everything that a correct provider may do: reordering, halves, early and late completions, full queues."""


class LoopbackWorld:
    """A simulated network; its clock moves only here."""

    name = "loopback"

    def __init__(self, seed: int, faults: Faults = EVERY_DAY) -> None:
        self.network = LoopbackNetwork(seed=seed, faults=faults)
        self.sides: list[Side] = []

    def side(self, length: int = LENGTH) -> Side:
        memory = np.full(length, POISON, dtype=np.uint8)
        side = Side(LoopbackFabric(self.network, memory), memory)
        self.sides.append(side)
        return side

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        assert self.network.run(until=lambda: _drain(self.sides) >= 0 and predicate()), _story(self.sides)

    def settle(self) -> None:
        self.network.run()
        _drain(self.sides)

    def pause(self, length: int) -> None:
        for _ in range(length):
            if not self.network.step():
                self.network.advance(0.0005)

    def close(self) -> None:
        for side in self.sides:
            side.close()


class NativeWorld:
    """Both ends in this process, each over its own memfd."""

    def __init__(self, name: str, make: Callable[[int, int], Fabric]) -> None:
        self.name = name
        self._make = make
        self.sides: list[Side] = []
        self._fds: list[int] = []

    def side(self, length: int = LENGTH) -> Side:
        fd = os.memfd_create("headrace-conformance", os.MFD_ALLOW_SEALING)
        self._fds.append(fd)
        os.ftruncate(fd, length)
        memory = np.frombuffer(mmap(fd, length), dtype=np.uint8)
        memory[:] = POISON
        side = Side(self._make(fd, length), memory)
        self.sides.append(side)
        return side

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            _drain(self.sides)
            if predicate():
                return
            assert time.monotonic() < deadline, _story(self.sides)
            self._sleep_at_most(0.02)

    def settle(self) -> None:
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < QUIET_S:
            self._sleep_at_most(QUIET_S)
            if _drain(self.sides):
                quiet_since = time.monotonic()

    def pause(self, length: int) -> None:
        time.sleep(length * 20e-6)

    def _sleep_at_most(self, seconds: float) -> None:
        poller = select.poll()
        for side in self.sides:
            if not side.closed:
                poller.register(side.fabric.event_fd, select.POLLIN)
        poller.poll(seconds * 1000)

    def close(self) -> None:
        for side in self.sides:
            side.close()
        for fd in self._fds:
            os.close(fd)


@dataclass(slots=True)
class Link:
    """A writer that may write into a reader's memory."""

    world: World
    writer: Side
    reader: Side
    to_reader: PeerId  # the reader, as the writer knows it
    to_writer: PeerId  # the writer, as the reader knows it
    descriptor: Descriptor

    def open(self, imm: int, *, num_pages: int = 0) -> TransferId:
        return self.writer.fabric.open_transfer(self.to_reader, Imm(imm), num_pages=num_pages)

    def arm(self, imm: int, expected: int) -> None:
        self.reader.fabric.arm(Imm(imm), expected)

    def revoke(self) -> None:
        """Take the writer's access away; when this returns nothing of it can land any more."""
        num_before = len(self.reader.told(Revoked))
        if not self.reader.fabric.revoke(self.to_writer):
            self.world.wait_for(lambda: len(self.reader.told(Revoked)) > num_before)

    def close(self, transfer: TransferId) -> None:
        """End a list that may have ended already, by an error."""
        if self.writer.done(transfer) is None:
            self.writer.fabric.close_transfer(transfer)

    def wait_done(self, transfer: TransferId) -> TransferDone:
        self.world.wait_for(lambda: self.writer.done(transfer) is not None)
        done = self.writer.done(transfer)
        assert done is not None
        return done

    def wait_reached(self, imm: int, arrivals: int) -> None:
        self.world.wait_for(lambda: arrivals in self.reader.reached(imm))

    def wait_surplus(self, imm: int, num_events: int) -> None:
        self.world.wait_for(lambda: len(self.reader.surplus(imm)) >= num_events)


def link(world: World, writer: Side | None = None, reader: Side | None = None) -> Link:
    """Introduce two sides to each other (new ones unless given) and give the writer access."""
    writer = writer or world.side()
    reader = reader or world.side()
    to_reader = writer.fabric.add_peer(reader.fabric.address)
    to_writer = reader.fabric.add_peer(writer.fabric.address)
    descriptor = reader.fabric.grant(to_writer)
    writer.fabric.connect(to_reader, descriptor)
    return Link(world, writer, reader, to_reader, to_writer, descriptor)


def write_one(pair: Link, *, imm: int, dst: int = 0) -> TransferDone:
    transfer = pair.open(imm)
    pair.writer.fabric.submit_write(transfer, src_offset=0, dst_offset=dst, length=4096)
    pair.writer.fabric.submit_last(transfer)
    return pair.wait_done(transfer)


def fill(side: Side, seed: int = 1) -> None:
    """Seeded bytes everywhere, so that a byte at a wrong place shows."""
    side.memory[:] = np.random.default_rng(seed).integers(0, 256, len(side.memory), dtype=np.uint8)


def poisoned(side: Side) -> NDArray[np.uint8]:
    """What the memory of `side` should be, to be edited by the test: poison everywhere."""
    return np.full(len(side.memory), POISON, dtype=np.uint8)


def page_writes(
    src_pages: list[int],
    dst_pages: list[int],
    *,
    layers: tuple[int, int] = (0, 1),
    length: int = 1024,
    src: tuple[int, int, int] = (0, 65536, 1024),
    dst: tuple[int, int, int] = (0, 65536, 1024),
    positions: list[int] | None = None,
    route: int = 0,
) -> PageWrites:
    """`src` and `dst` are (offset, layer_stride, page_stride)."""
    return PageWrites(
        src=_pages(src, src_pages),
        dst=_pages(dst, dst_pages),
        positions=np.array(range(len(src_pages)) if positions is None else positions, dtype=np.int64),
        layer_begin=layers[0],
        layer_end=layers[1],
        length=length,
        route=route,
    )


def carry(expected: NDArray[np.uint8], source: NDArray[np.uint8], writes: PageWrites) -> None:
    """The slow obvious model of `writes`: copy each message from `source` into `expected`."""
    for layer in range(writes.layer_begin, writes.layer_end):
        for src_page, dst_page in zip(writes.src.indices, writes.dst.indices, strict=True):
            src = writes.src.offset + layer * writes.src.layer_stride + int(src_page) * writes.src.page_stride
            dst = writes.dst.offset + layer * writes.dst.layer_stride + int(dst_page) * writes.dst.page_stride
            expected[dst : dst + writes.length] = source[src : src + writes.length]


def _pages(place: tuple[int, int, int], indices: list[int]) -> Pages:
    return Pages(
        offset=place[0], layer_stride=place[1], page_stride=place[2], indices=np.array(indices, dtype=np.int64)
    )


def _drain(sides: list[Side]) -> int:
    return sum(side.drain() for side in sides if not side.closed)


def _story(sides: list[Side]) -> str:
    lines = [f"never happened; side {i} told {side.events[-10:]}" for i, side in enumerate(sides)]
    return "\n".join(lines)
