"""A native fabric of this process over a memory that can be looked at, with every event it has told so far."""

import math
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from native_reader import ReaderProcess
from numpy.typing import NDArray

from headrace.fabric.interface import (
    Descriptor,
    Event,
    Imm,
    MessageReceived,
    Pages,
    PageWrites,
    PeerId,
    TransferDone,
    TransferId,
)
from headrace.fabric.native import NativeFabric

E = TypeVar("E", bound=Event)
POISON = 0xA5


class NativeSide:
    def __init__(self, length: int = 1 << 20, **options: Any) -> None:
        fd = os.memfd_create("headrace-side", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, length)
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, length), dtype=np.uint8)
        self.memory[:] = POISON
        self.fabric = NativeFabric(fd, length, **options)
        os.close(fd)
        self.events: list[Event] = []

    def told(self, kind: type[E]) -> list[E]:
        self.events += self.fabric.drain_events()
        return [event for event in self.events if isinstance(event, kind)]

    def waits(self, predicate: Callable[[], bool], seconds: float = 20.0) -> bool:
        """Whether it held in time; looked at whenever something was told, and every 10 ms."""
        deadline = time.monotonic() + seconds
        while True:
            self.events += self.fabric.drain_events()
            if predicate():
                return True
            if time.monotonic() > deadline:
                return False
            select.select([self.fabric.event_fd], [], [], 0.01)

    def hears(self, event: Event, seconds: float = 20.0) -> bool:
        return self.waits(lambda: event in self.events, seconds)

    def hears_message(self, message: bytes) -> bool:
        return self.hears(MessageReceived(message=message))

    def knows(self, process: ReaderProcess) -> PeerId:
        return self.fabric.add_peer(bytes.fromhex(process.ask("address")))

    def admit(self, process: ReaderProcess, peer: PeerId) -> None:
        """The process may write into our memory."""
        process.ask("connect", self.fabric.address.hex(), self.fabric.grant(peer).encode().hex())

    def enter(self, process: ReaderProcess, peer: PeerId) -> None:
        """We may write into the memory of the process."""
        self.fabric.connect(peer, Descriptor.decode(bytes.fromhex(process.ask("grant", self.fabric.address.hex()))))

    def write(self, peer: PeerId, imm: int, length: int, *, at: int = 0, deadline_s: float = math.inf) -> TransferId:
        """One write, to the same place there."""
        transfer = self.fabric.open_transfer(peer, Imm(imm), deadline_s=deadline_s)
        self.fabric.submit_write(transfer, src_offset=at, dst_offset=at, length=length)
        self.fabric.submit_last(transfer)
        return transfer

    def write_pages(
        self, peer: PeerId, imm: int, num_pages: int, page_bytes: int, *, deadline_s: float = math.inf
    ) -> TransferId:
        transfer = self.fabric.open_transfer(peer, Imm(imm), deadline_s=deadline_s)
        self.fabric.submit_pages(transfer, pages(num_pages, page_bytes))
        self.fabric.submit_last(transfer)
        return transfer

    def done(self, transfer: TransferId, seconds: float = 20.0) -> TransferDone | None:
        """The one result of `transfer`, None where it is not told in time; two are an error."""
        self.waits(lambda: bool(self._results(transfer)), seconds)
        results = self._results(transfer)
        assert len(results) <= 1, f"told twice: {results}"
        return results[0] if results else None

    def _results(self, transfer: TransferId) -> list[TransferDone]:
        return [event for event in self.events if isinstance(event, TransferDone) and event.transfer == transfer]


def shm_files(*processes: ReaderProcess) -> list[str]:
    """In /dev/shm, of this process and of those: other tests may run at the same time."""
    numbers = {str(number) for number in (os.getpid(), *(each.process.pid for each in processes))}
    names = [name for name in os.listdir("/dev/shm") if name.startswith("headrace-shm-")]
    return [name for name in names if name.split("-")[3] in numbers]


def pages(num_pages: int, page_bytes: int, *, at: int = 0) -> PageWrites:
    """Pages 0.. of a memory, to the same pages there."""
    places = Pages(offset=at, layer_stride=0, page_stride=page_bytes, indices=np.arange(num_pages, dtype=np.int64))
    return PageWrites(src=places, dst=places, positions=places.indices, layer_begin=0, layer_end=1, length=page_bytes)


def link(writer: NativeSide, reader: NativeSide) -> tuple[PeerId, PeerId]:
    """-> the reader as the writer knows it, and the writer as the reader does."""
    there, here = writer.fabric.add_peer(reader.fabric.address), reader.fabric.add_peer(writer.fabric.address)
    writer.fabric.connect(there, reader.fabric.grant(here))
    return there, here


@contextmanager
def closing(*sides: NativeSide) -> Iterator[None]:
    try:
        yield
    finally:
        for side in sides:
            side.fabric.close()
