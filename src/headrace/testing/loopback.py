"""A fabric in memory: the verbs of `Fabric` over a simulated network, for everything that runs above one.

Owns one endpoint's events, grants, counters and digest jobs; what it writes is `writer`'s and `posting`'s, time and
faults are the network's. It does what a provider may do, in an order that the network's seed decides. All calls come
from the one thread that steps the network; a call of a killed endpoint raises Closed like one of a closed endpoint.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.errors import Closed, InputError
from headrace.fabric.interface import (
    Descriptor,
    DigestId,
    DigestsReady,
    Event,
    FabricStatistics,
    Imm,
    LastWrite,
    MessageReceived,
    PageReads,
    PageWrites,
    PeerId,
    TransferDone,
    TransferId,
    message_seed,
)
from headrace.testing.counters import ImmCounters
from headrace.testing.flight import Flight, OpId
from headrace.testing.outbox import MAX_LAYERS, checked_positions, checked_shape, extent, offsets
from headrace.testing.posting import Peer
from headrace.testing.writer import Writer

if TYPE_CHECKING:
    from headrace.testing.network import LoopbackNetwork

MAX_MESSAGE_BYTES = 16 << 20


@dataclass(slots=True, eq=False)
class Access:
    """What one key opens; a write that has read its header holds on to it."""

    peer: PeerId
    is_live: bool = True


class LoopbackFabric:
    """Made by `LoopbackNetwork.endpoint`."""

    def __init__(self, network: "LoopbackNetwork", address: bytes, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.flights: dict[Flight, None] = {}  # posted writes that have not landed; ordered, unlike a set
        self.is_gone = False  # closed or killed
        self._network = network
        self._address = address
        self._events: list[Event] = []
        self._event_fd: int | None = None
        self._counters = ImmCounters(self._tell, self._now_ns)
        self._writer = Writer(network, self, self._tell)
        self._num_peers = self._num_grants = self._num_digests = self._num_received = 0
        self._keys: dict[int, Access] = {}
        self._key_of: dict[PeerId, int] = {}

    def __repr__(self) -> str:
        return (
            f"LoopbackFabric(address={self._address.hex()}, peers={len(self._writer.posting.peers)}, "
            f"transfers={len(self._writer.transfers)}, counters={len(self._counters)}, events={len(self._events)}, "
            f"in_flight={len(self.flights)})"
        )

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def event_fd(self) -> int:
        """An eventfd, made at the first look: most endpoints of a history are drained without one."""
        self._check_open()
        if self._event_fd is None:
            self._event_fd = os.eventfd(int(bool(self._events)), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._event_fd

    # ---- peers and access

    def add_peer(self, address: bytes) -> PeerId:
        self._check_open()
        if not address:
            raise InputError("address", "must be what the peer's `address` says, is empty")
        if any(known.address == address for known in self._writer.posting.peers.values()):
            raise InputError("address", "is that of a peer already; remove it first")
        self._num_peers += 1
        peer = PeerId(self._num_peers)
        self._writer.posting.peers[peer] = Peer(id=peer, address=bytes(address))
        return peer

    def remove_peer(self, peer: PeerId) -> None:
        self._check_open()
        found = self._writer.peer(peer)
        self.revoke(peer)
        self._writer.remove(found)

    def grant(self, peer: PeerId) -> Descriptor:
        self._check_open()
        self._writer.peer(peer)
        self.revoke(peer)
        self._num_grants += 1
        key = self._network.rng.getrandbits(64)
        self._keys[key] = Access(peer)
        self._key_of[peer] = key
        return Descriptor(addressing="offset", base=0, length=len(self.memory), key=key, generation=self._num_grants)

    def revoke(self, peer: PeerId) -> None:
        self._check_open()
        self._writer.peer(peer)
        key = self._key_of.pop(peer, None)
        if key is not None:
            self._keys.pop(key).is_live = False

    def connect(self, peer: PeerId, descriptor: Descriptor) -> None:
        self._check_open()
        found = self._writer.peer(peer)
        if found.descriptor is not None and descriptor.generation < found.descriptor.generation:
            raise InputError(
                "descriptor",
                f"generation {descriptor.generation} is older than the {found.descriptor.generation} in use",
            )
        self._writer.close_transfers_of(peer)
        found.descriptor = descriptor

    # ---- messages

    def send(self, peer: PeerId, message: bytes) -> None:
        self._check_open()
        found = self._writer.peer(peer)
        if not 1 <= len(message) <= MAX_MESSAGE_BYTES:
            raise InputError("message", f"must have 1..{MAX_MESSAGE_BYTES} bytes, has {len(message)}")
        found.outbox.messages.append(bytes(message))
        self._writer.posting.wake()

    # ---- imm counters

    def arm(self, imm: Imm, expected: int) -> None:
        self._check_open()
        self._counters.arm(imm, expected)

    def retarget(self, imm: Imm, expected: int) -> None:
        self._check_open()
        self._counters.retarget(imm, expected)

    def disarm(self, imm: Imm) -> None:
        self._check_open()
        self._counters.disarm(imm)

    # ---- writes

    def open_transfer(self, peer: PeerId, imm: Imm, *, num_pages: int = 0) -> TransferId:
        self._check_open()
        return self._writer.open(peer, imm, num_pages)

    def submit_write(self, transfer: TransferId, *, src_offset: int, dst_offset: int, length: int) -> None:
        self._check_open()
        self._writer.submit_write(transfer, src_offset, dst_offset, length)

    def submit_pages(self, transfer: TransferId, writes: PageWrites) -> None:
        self._check_open()
        self._writer.submit_pages(transfer, writes)

    def submit_last(self, transfer: TransferId, last: LastWrite | None = None) -> None:
        self._check_open()
        self._writer.submit_last(transfer, last)

    def submit_program(
        self,
        step: int,
        writes: Sequence[tuple[TransferId, PageWrites]],
        last: Sequence[tuple[TransferId, int, LastWrite]] = (),
    ) -> None:
        self._check_open()
        self._writer.submit_program(step, writes, last)

    def raise_layers(self, counter: int) -> None:
        self._check_open()
        self._writer.posting.raise_layers(counter)

    def fail_step(self, step: int) -> dict[TransferId, int]:
        self._check_open()
        return self._writer.fail_step(step)

    def close_transfer(self, transfer: TransferId) -> int:
        self._check_open()
        return self._writer.close_transfer(transfer)

    # ---- digests

    def submit_digest(self, reads: Sequence[PageReads], num_pages: int) -> DigestId:
        """The bytes are read when the job is delivered, not now."""
        self._check_open()
        if num_pages < 0:
            raise InputError("num_pages", f"must be at least 0, is {num_pages}")
        for read in reads:
            self._check_read(read, num_pages)
        self._num_digests += 1
        digest, jobs = DigestId(self._num_digests), tuple(reads)

        def work() -> None:
            if not self.is_gone:
                self._tell(DigestsReady(digest=digest, digests=_digests(self.memory, jobs, num_pages)))

        self._network.schedule(work, at=self)
        return digest

    def _check_read(self, read: PageReads, num_pages: int) -> None:
        as_writes = PageWrites(
            src=read.pages,
            dst=read.pages,
            positions=read.positions,
            layer_begin=read.layer_begin,
            layer_end=read.layer_end,
            length=read.length,
        )
        checked_shape(as_writes, MAX_LAYERS)
        checked_positions(as_writes, num_pages)
        begin, end = extent(read.pages, read.layer_begin, read.layer_end, read.length)
        if begin < 0 or end > len(self.memory):
            raise InputError("pages", f"[{begin}, {end}) is not within our memory of {len(self.memory)} bytes")

    # ---- results

    def drain_events(self) -> list[Event]:
        self._check_open()
        events, self._events = self._events, []
        if events and self._event_fd is not None:
            os.eventfd_read(self._event_fd)
        for event in events:
            if isinstance(event, TransferDone):
                del self._writer.transfers[event.transfer]
        return events

    def statistics(self) -> FabricStatistics:
        self._check_open()
        posting = self._writer.posting
        return FabricStatistics(
            provider="loopback",
            num_peers_now=len(posting.peers),
            num_transfers_now=len(self._writer.transfers),
            num_counters_now=len(self._counters),
            num_writes_posted=posting.num_posted,
            num_writes_completed=posting.num_completed,
            num_writes_failed=posting.num_failed,
            num_bytes_posted=posting.num_bytes,
            num_arrivals=self._counters.num_arrivals,
            num_surplus=self._counters.num_surplus,
            num_messages_sent=posting.num_messages,
            num_messages_received=self._num_received,
        )

    def close(self) -> None:
        self.vanish()

    # ---- called by the network and by flights

    def vanish(self) -> None:
        """Closed or killed: nothing new is posted or received; what was posted may still land."""
        if self.is_gone:
            return
        self.is_gone = True
        for flight in self.flights:
            flight.lose_writer()
        self._events.clear()
        if self._event_fd is not None:
            os.close(self._event_fd)
            self._event_fd = None
        self._network.reconsider_held()

    def access(self, key: int) -> Access | None:
        return self._keys.get(key)

    def arrive(self, imm: Imm) -> None:
        if not self.is_gone:
            self._counters.arrive(imm)

    def receive(self, message: bytes) -> None:
        if not self.is_gone:
            self._num_received += 1
            self._tell(MessageReceived(message=message))

    def complete(self, op: OpId, code: int) -> None:
        if not self.is_gone:
            self._writer.posting.complete(op, code)

    # ---- inside

    def _check_open(self) -> None:
        if self.is_gone:
            raise Closed("the loopback fabric was closed")

    def _now_ns(self) -> int:
        return round(self._network.now * 1e9)

    def _tell(self, event: Event) -> None:
        if self._event_fd is not None and not self._events:
            os.eventfd_write(self._event_fd, 1)
        self._events.append(event)


def _digests(memory: NDArray[np.uint8], reads: Sequence[PageReads], num_pages: int) -> NDArray[np.uint64]:
    sums = [0] * num_pages
    for read in reads:
        positions: list[int] = read.positions.tolist()
        for layer in range(read.layer_begin, read.layer_end):
            for position, begin in zip(positions, offsets(read.pages, layer), strict=True):
                message = memory[begin : begin + read.length].data
                sums[position] += xxhash.xxh3_64_intdigest(message, message_seed(position, layer, read.route))
    return np.array([total % 2**64 for total in sums], dtype=np.uint64)
