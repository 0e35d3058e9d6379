"""How a loopback endpoint posts: peers with their queues, windows, operations and turns.

Owns what is outstanding towards each peer, and the layer counter; it does not know how lists begin or end. Like the
owner thread it stands for, it posts in turns of bounded work and for one peer after the other, so that a call between
two turns finds a list half posted, and a peer that is full, hung or dead delays nobody else.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from headrace.fabric.interface import Descriptor, Event, PeerId, SendFailed, message_seed
from headrace.testing.digests import message_digest
from headrace.testing.endpoint import Endpoint
from headrace.testing.flight import Flight, Flights, OpId
from headrace.testing.network import LoopbackNetwork
from headrace.testing.outbox import WINDOW, Outbox, Run, Transfer

WRITES_PER_TURN = 32
MAX_QUEUED_BYTES = 64 << 20  # of messages to one peer, as on the native fabric


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """The other side, as this endpoint knows it."""

    id: PeerId
    address: bytes
    outbox: Outbox = field(default_factory=Outbox)
    descriptor: Descriptor | None = None
    num_outstanding: int = 0
    parked_until: float = 0.0
    is_broken: bool = False  # its death was noticed: every post is EAGAIN, all stays queued until somebody is there
    is_silent: bool = False  # and that was told


class OpPool:
    """Contexts of posted writes. A late completion of an earlier use finds another generation and is ignored."""

    def __init__(self) -> None:
        self._ops: list[tuple[Transfer, Peer] | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []

    def take(self, transfer: Transfer, peer: Peer) -> OpId:
        if not self._free:
            self._free.append(len(self._ops))
            self._ops.append(None)
            self._generations.append(0)
        place = self._free.pop()
        self._ops[place] = (transfer, peer)
        return place, self._generations[place]

    def give_back(self, op: OpId) -> tuple[Transfer, Peer] | None:
        """What `op` was taken for, once; None for one that is over."""
        place, generation = op
        found = self._ops[place] if self._generations[place] == generation else None
        if found is not None:
            self._ops[place] = None
            self._generations[place] += 1
            self._free.append(place)
        return found

    def forget(self, peer: Peer) -> None:
        """Free every op towards `peer`."""
        for place, op in enumerate(self._ops):
            if op is not None and op[1] is peer:
                self.give_back((place, self._generations[place]))


class Posting:
    """`completed(transfer, code)` is called for every operation that is over, once."""

    def __init__(
        self,
        network: LoopbackNetwork,
        endpoint: Endpoint,
        *,
        tell: Callable[[Event], None],
        completed: Callable[[Transfer, int], None],
    ) -> None:
        self._network, self._endpoint = network, endpoint
        self._tell, self._completed = tell, completed
        self.flights = Flights(network=network, writer=endpoint, completed=self._complete)
        self._ops = OpPool()
        self._layers = 0
        self._turn_at: float | None = None
        self.peers: dict[PeerId, Peer] = {}
        self.num_posted = self.num_completed = self.num_failed = self.num_bytes = self.num_messages = 0

    def raise_layers(self, counter: int) -> None:
        if counter > self._layers:
            self._layers = counter
            self.wake()

    def send(self, peer: Peer, message: bytes) -> None:
        """Queue it; a message that finds the queue full, as that of a dead peer will be, fails at once."""
        outbox = peer.outbox
        if outbox.num_message_bytes + len(message) > MAX_QUEUED_BYTES:
            text = f"{len(outbox.messages)} messages wait already"
            self._tell(SendFailed(peer=peer.id, code=errno.ENOBUFS, text=text))
            return
        outbox.add_message(message)
        self.wake()

    def drop_messages(self, peer: Peer, code: int, text: str) -> None:
        """None of those that wait is posted, which is told once for all of them."""
        if peer.outbox.messages:
            peer.outbox.drop_messages()
            self._tell(SendFailed(peer=peer.id, code=code, text=text))

    def forget(self, peer: Peer) -> None:
        """Whatever becomes of what is outstanding towards `peer`, nobody is told any more."""
        self.num_failed += peer.num_outstanding
        self._ops.forget(peer)
        del self.peers[peer.id]

    def _complete(self, op: OpId, code: int) -> None:
        found = None if self._endpoint.is_gone else self._ops.give_back(op)
        if found is None:
            return
        transfer, peer = found
        peer.num_outstanding -= 1
        transfer.num_outstanding -= 1
        if code:
            self.num_failed += 1
            peer.is_broken |= code == errno.ECONNRESET
        else:
            self.num_completed += 1
        self._completed(transfer, code)
        if peer.outbox:
            self.wake()

    # ---- turns

    def wake(self, at: float | None = None) -> None:
        """Schedule a turn, now or `at`; an earlier one that is scheduled already does as well."""
        at = self._network.now if at is None else max(at, self._network.now)
        if self._turn_at is None or at < self._turn_at:
            self._turn_at = at
            delay = at - self._network.now
            self._network.schedule(lambda: self._turn(at), at=self._endpoint, delay_s=(delay, delay))

    def _turn(self, planned_at: float) -> None:
        if self._endpoint.is_gone or self._turn_at != planned_at:
            return
        self._turn_at = None
        for peer in self.peers.values():
            self._serve(peer)

    def _serve(self, peer: Peer) -> None:
        """Post to one peer: messages first, then some writes, until its window, its queue or the budget is full."""
        network, outbox = self._network, peer.outbox
        if network.now < peer.parked_until:
            self.wake(peer.parked_until)
            return
        while outbox.messages:
            if self._is_full(peer):
                return
            self._post_message(peer, outbox.take_message())
        budget = network.rng.randint(1, WRITES_PER_TURN) if network.faults.reorder else WRITES_PER_TURN
        for _ in range(budget):
            if peer.num_outstanding >= WINDOW:
                return
            run = outbox.next_run(self._layers)
            last = outbox.next_last(self._layers) if run is None else None
            if (run is None and last is None) or self._is_full(peer):
                return
            if run is not None:
                self._post_of(run, peer)
            elif last is not None:
                self._post_last(last, peer)
        self.wake()

    def _is_full(self, peer: Peer) -> bool:
        """EAGAIN: this peer is parked, its lists keep their places, and nobody else notices."""
        peer.is_broken &= self._is_nobody_at(peer)
        if peer.is_broken:
            return True
        if not self._network.draw(self._network.faults.full_queue):
            return False
        peer.parked_until = self._network.now + self._network.rng.uniform(*self._network.faults.queue_full_s)
        self.wake(peer.parked_until)
        return True

    def _is_nobody_at(self, peer: Peer) -> bool:
        there = self._network.find(peer.address)
        return there is None or there.is_gone

    def _post_of(self, run: Run, peer: Peer) -> None:
        transfer, src = run.transfer, run.src[run.place]
        if transfer.digests and run.positions:
            position = run.positions[run.place]
            seed = message_seed(position, run.layer, run.route)
            digest = message_digest(self._endpoint.memory, src, run.length, seed)
            transfer.digests[position] = (transfer.digests[position] + digest) % 2**64
        dst = run.dst[run.place]
        peer.outbox.advance(run)
        self._post(transfer, peer, src=src, dst=dst, length=run.length)

    def _post_last(self, transfer: Transfer, peer: Peer) -> None:
        last, transfer.last = transfer.last, None
        assert last is not None
        if transfer.digests:
            at = last.src_offset + last.digests_at
            table = np.array(transfer.digests, dtype="<u8").view(np.uint8)
            self._endpoint.memory[at : at + len(table)] = table
        self._post(transfer, peer, src=last.src_offset, dst=last.dst_offset, length=last.length)

    def _post(self, transfer: Transfer, peer: Peer, *, src: int, dst: int, length: int) -> None:
        transfer.num_posted += 1
        transfer.num_outstanding += 1
        peer.num_outstanding += 1
        self.num_posted += 1
        self.num_bytes += length
        Flight(
            self.flights,
            self._network.find(peer.address),
            op=self._ops.take(transfer, peer),
            key=transfer.descriptor.keys[0],
            imm=transfer.imm,
            src=src,
            dst=transfer.descriptor.base + dst,
            length=length,
        ).launch()

    def _post_message(self, peer: Peer, message: bytes) -> None:
        self.num_messages += 1
        network, faults = self._network, self._network.faults
        target = network.find(peer.address)
        if target is None or target.is_gone:
            if network.draw(faults.error_after_death):
                self._fail_message(peer, errno.ECONNRESET, faults.death_noticed_s)
            return
        failed = network.draw(faults.fail_message)
        if failed:
            self._fail_message(peer, errno.EIO, faults.delay_s)
        if network.draw(faults.lose_message) or (failed and network.draw(0.5)):
            return
        for _ in range(2 if network.draw(faults.duplicate_message) else 1):
            network.post_message(self._endpoint, target, message)

    def _fail_message(self, peer: Peer, code: int, delay_s: tuple[float, float]) -> None:
        def tell() -> None:
            # Nothing is told of a peer that was removed: not what was posted, not what was queued.
            if not self._endpoint.is_gone and peer.id in self.peers:
                peer.is_broken |= code == errno.ECONNRESET
                self._tell(SendFailed(peer=peer.id, code=code, text=os.strerror(code)))

        self._network.schedule(tell, at=self._endpoint, delay_s=delay_s)
