"""A fabric in memory: the verbs of `Fabric` over a simulated network, for everything that runs above one.

Owns whether the endpoint is open, and hands each verb to the part that has its tables: `events`, `grants`, `counters`,
`writer`; time and faults are the network's. It does what a provider may do, in an order that the network's seed
decides. All calls come from the one thread that steps the network; a call of a killed endpoint raises Closed like one
of a closed endpoint.
"""

from collections.abc import Sequence

import numpy as np
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
)
from headrace.testing.counters import ImmCounters
from headrace.testing.digests import checked_reads, sum_digests
from headrace.testing.events import EventQueue
from headrace.testing.grants import Access, Grants
from headrace.testing.network import LoopbackNetwork
from headrace.testing.posting import Peer
from headrace.testing.writer import Writer

MAX_MESSAGE_BYTES = 16 << 20


class LoopbackFabric:
    """Joins `network` over `memory` (`[length] uint8`), with a fresh address."""

    def __init__(self, network: LoopbackNetwork, memory: NDArray[np.uint8]) -> None:
        if memory.dtype != np.uint8 or memory.ndim != 1:
            raise InputError("memory", f"must be one-dimensional uint8, is {memory.ndim}-dimensional {memory.dtype}")
        self.memory = memory
        self.is_gone = False  # closed or killed
        self._network = network
        self._events = EventQueue()
        self._grants = Grants()
        self._counters = ImmCounters(self._events.tell, self._now_ns)
        self._writer = Writer(network, self, self._events.tell)
        self._num_peers = self._num_digests = self._num_received = 0
        self._address = network.join(self)

    def __repr__(self) -> str:
        return (
            f"LoopbackFabric(address={self._address.hex()}, peers={len(self._writer.posting.peers)}, "
            f"transfers={len(self._writer.transfers)}, counters={len(self._counters)}, events={len(self._events)}, "
            f"in_flight={len(self._writer.posting.flights.not_landed)})"
        )

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def event_fd(self) -> int:
        self._check_open()
        return self._events.fd

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
        self._grants.revoke(peer)
        self._writer.remove(found)

    def grant(self, peer: PeerId) -> Descriptor:
        self._check_open()
        self._writer.peer(peer)
        return self._grants.grant(peer, key=self._network.rng.getrandbits(64), length=len(self.memory))

    def revoke(self, peer: PeerId) -> None:
        self._check_open()
        self._writer.peer(peer)
        self._grants.revoke(peer)

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
        self._writer.posting.send(found, bytes(message))

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
        jobs = checked_reads(reads, num_pages, len(self.memory))
        self._num_digests += 1
        digest = DigestId(self._num_digests)

        def work() -> None:
            if not self.is_gone:
                self._events.tell(DigestsReady(digest=digest, digests=sum_digests(self.memory, jobs, num_pages)))

        self._network.schedule(work, at=self)
        return digest

    # ---- results

    def drain_events(self) -> list[Event]:
        self._check_open()
        events = self._events.drain()
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

    # ---- what the network finds here (`Endpoint`)

    def vanish(self) -> None:
        """Closed or killed: nothing new is posted or received; what was posted may still land."""
        if self.is_gone:
            return
        self.is_gone = True
        self._writer.posting.flights.lose_writer()
        self._events.close()
        self._network.reconsider_held()

    def access(self, key: int) -> Access | None:
        return self._grants.access(key)

    def arrive(self, imm: Imm) -> None:
        if not self.is_gone:
            self._counters.arrive(imm)

    def receive(self, message: bytes) -> None:
        if not self.is_gone:
            self._num_received += 1
            self._events.tell(MessageReceived(message=message))

    # ---- inside

    def _check_open(self) -> None:
        if self.is_gone:
            raise Closed("the loopback fabric was closed")

    def _now_ns(self) -> int:
        return round(self._network.now * 1e9)
