"""A fabric in memory: the verbs of `Fabric` over a simulated network, for everything that runs above one.

Owns whether the endpoint is open, and hands each verb to the part that has its tables: `events`, `grants`, `counters`,
`writer`; time and faults are the network's. It does what a provider may do, in an order that the network's seed
decides. All calls come from the one thread that steps the network; a call of a killed endpoint raises Closed like one
of a closed endpoint.
"""

import math
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
    PeerHeard,
    PeerId,
    PeerSilent,
    Revoked,
    TransferDone,
    TransferId,
)
from headrace.testing.counters import ImmCounters
from headrace.testing.digests import checked_reads, sum_digests
from headrace.testing.endpoint import Access, Endpoint
from headrace.testing.events import EventQueue
from headrace.testing.grants import Grants
from headrace.testing.network import LoopbackNetwork, place_of
from headrace.testing.posting import Peer
from headrace.testing.writer import Writer

NAME = "loopback"
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
        self._grants = Grants(network, self, self._on_revoked)
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
        if self.peer_at(address) is not None:
            raise InputError("address", "is that of a peer already; remove it first")
        self._num_peers += 1
        peer = PeerId(self._num_peers)
        self._writer.posting.peers[peer] = Peer(id=peer, address=bytes(address))
        self._network.notice_if_gone(address, self)
        return peer

    def peer_at(self, address: bytes) -> PeerId | None:
        self._check_open()
        if not address:
            raise InputError("address", "must be what the peer's `address` says, is empty")
        peers = self._writer.posting.peers.values()
        return next((known.id for known in peers if place_of(known.address) == place_of(address)), None)

    def remove_peer(self, peer: PeerId) -> None:
        self._check_open()
        found = self._writer.peer(peer)
        self._grants.revoke(peer)
        self._writer.remove(found)

    def transport(self, peer: PeerId) -> str:
        self._check_open()
        self._writer.peer(peer)
        return NAME

    def grant(self, peer: PeerId) -> Descriptor:
        self._check_open()
        self._writer.peer(peer)
        return self._grants.grant(peer, key=self._network.rng.getrandbits(64), length=len(self.memory))

    def revoke(self, peer: PeerId) -> bool:
        self._check_open()
        self._writer.peer(peer)
        return self._grants.revoke(peer)

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
        target = self._network.find(found.address)
        if target is not None:
            target.hold(descriptor.keys[0], self)

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

    def open_transfer(self, peer: PeerId, imm: Imm, *, num_pages: int = 0, deadline_s: float = math.inf) -> TransferId:
        self._check_open()
        return self._writer.open(peer, imm, num_pages, deadline_s)

    def submit_write(self, transfer: TransferId, *, src_offset: int, dst_offset: int, length: int) -> None:
        self._check_open()
        self._writer.submit_write(transfer, src_offset, dst_offset, length)

    def num_cuts(self, peer: PeerId, length: int) -> int:
        self._check_open()
        self._writer.peer(peer)
        if length < 0:
            raise InputError("length", f"must be at least 0, is {length}")
        return 1

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
            provider=NAME,
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
        self._network.leave(self)

    def access(self, key: int) -> Access | None:
        return self._grants.access(key)

    def hold(self, key: int, holder: Endpoint) -> None:
        self._grants.hold(key, holder)

    def arrive(self, imm: Imm) -> None:
        if not self.is_gone:
            self._counters.arrive(imm)

    def receive(self, message: bytes) -> None:
        if not self.is_gone:
            self._num_received += 1
            self._events.tell(MessageReceived(message=message))

    def peer_named(self, address: bytes) -> PeerId | None:
        if self.is_gone:
            return None
        return next((peer.id for peer in self._writer.posting.peers.values() if peer.address == address), None)

    def lose(self, peer: PeerId) -> None:
        found = self._known(peer)
        if found is not None:
            self._writer.lose(found)

    def miss(self, peer: PeerId) -> None:
        found = self._known(peer)
        if found is not None and not found.is_silent:
            found.is_silent = True
            self._events.tell(PeerSilent(peer=peer))

    def hear(self, peer: PeerId) -> None:
        found = self._known(peer)
        if found is not None and found.is_silent:
            found.is_silent = False
            self._events.tell(PeerHeard(peer=peer))

    # ---- inside

    def _known(self, peer: PeerId) -> Peer | None:
        return None if self.is_gone else self._writer.posting.peers.get(peer)

    def _check_open(self) -> None:
        if self.is_gone:
            raise Closed("the loopback fabric was closed")

    def _on_revoked(self, peer: PeerId) -> None:
        if not self.is_gone and peer in self._writer.posting.peers:
            self._events.tell(Revoked(peer=peer))

    def _now_ns(self) -> int:
        return round(self._network.now * 1e9)
