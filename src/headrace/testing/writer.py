"""The posting half of a loopback endpoint: transfers, programs, windows, turns, completions.

Owns the write lists and the pool of operations; it knows the network only to post and to schedule its own turns. Like
the owner thread it stands for, it posts in turns of bounded work, round robin over peers, so that a call between two
turns finds a list half posted.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from headrace.errors import InputError
from headrace.fabric.interface import (
    LAYERS_PER_STEP,
    Descriptor,
    Event,
    Imm,
    LastWrite,
    PageWrites,
    PeerId,
    SendFailed,
    TransferId,
    message_seed,
)
from headrace.testing.counters import checked_imm
from headrace.testing.flight import Flight, OpId
from headrace.testing.outbox import (
    MAX_LAYERS,
    WINDOW,
    Outbox,
    Run,
    Transfer,
    checked_positions,
    checked_shape,
    extent,
    plan_runs,
)

if TYPE_CHECKING:
    from headrace.testing.loopback import LoopbackFabric
    from headrace.testing.network import LoopbackNetwork

WRITES_PER_TURN = 32


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """The other side, as this endpoint knows it."""

    id: PeerId
    address: bytes
    outbox: Outbox = field(default_factory=Outbox)
    descriptor: Descriptor | None = None
    num_outstanding: int = 0
    parked_until: float = 0.0
    is_broken: bool = False  # its death was noticed: every post is EAGAIN from now on


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


class Writer:
    """One per endpoint; the endpoint checks that it is open before it calls."""

    def __init__(self, network: "LoopbackNetwork", fabric: "LoopbackFabric", tell: Callable[[Event], None]) -> None:
        self._network, self._fabric, self._tell = network, fabric, tell
        self.peers: dict[PeerId, Peer] = {}
        self.transfers: dict[TransferId, Transfer] = {}
        self._num_opened = 0
        self._steps: dict[int, list[Transfer]] = {}
        self._last_step = -1
        self._layers = 0
        self._turn_at: float | None = None
        self._first_served = 0
        self._ops = OpPool()
        self.num_posted = self.num_completed = self.num_failed = self.num_bytes = self.num_messages = 0

    # ---- lists

    def peer(self, peer: PeerId) -> Peer:
        found = self.peers.get(peer)
        if found is None:
            raise InputError("peer", f"{peer} is not known here (never added, or removed)")
        return found

    def transfer(self, transfer: TransferId) -> Transfer:
        found = self.transfers.get(transfer)
        if found is None:
            raise InputError("transfer", f"{transfer} is not known here (never opened, or told done)")
        return found

    def open(self, peer: PeerId, imm: Imm, num_pages: int) -> TransferId:
        descriptor = self.peer(peer).descriptor
        if descriptor is None:
            raise InputError("peer", f"{peer} has given no descriptor; connect first")
        if num_pages < 0:
            raise InputError("num_pages", f"must be at least 0, is {num_pages}")
        self._num_opened += 1
        opened = TransferId(self._num_opened)
        self.transfers[opened] = Transfer(
            id=opened, peer=peer, imm=checked_imm(imm), descriptor=descriptor, digests=[0] * num_pages
        )
        return opened

    def submit_write(self, transfer_id: TransferId, src: int, dst: int, length: int) -> None:
        transfer = self._open_list(transfer_id)
        if length < 0:
            raise InputError("length", f"must be at least 0, is {length}")
        self._check_source("src_offset", src, src + length)
        if self._lies_inside(transfer, dst, dst + length):
            run = Run(transfer=transfer, gate=0, layer=0, route=0, length=length, src=[src], dst=[dst], positions=[])
            self.peers[transfer.peer].outbox.add(run)
            self.wake()

    def submit_pages(self, transfer_id: TransferId, writes: PageWrites) -> None:
        transfer = self._open_list(transfer_id)
        self._check_pages(transfer, writes, MAX_LAYERS)
        self._add(transfer, plan_runs(transfer, writes, None), writes)
        self.wake()

    def submit_last(self, transfer_id: TransferId, last: LastWrite | None) -> None:
        transfer = self._open_list(transfer_id)
        if last is not None:
            self._check_last(transfer, last)
        self._end_list(transfer, last, gate=0)
        self.wake()

    def submit_program(
        self,
        step: int,
        writes: Sequence[tuple[TransferId, PageWrites]],
        lasts: Sequence[tuple[TransferId, int, LastWrite]],
    ) -> None:
        if step <= self._last_step:
            raise InputError("step", f"must rise from call to call, is {step} after {self._last_step}")
        pages = [(self._open_list(transfer), each) for transfer, each in writes]
        for transfer, each in pages:
            self._check_pages(transfer, each, LAYERS_PER_STEP)
        ends = [(self._open_list(transfer), num_layers, last) for transfer, num_layers, last in lasts]
        for transfer, num_layers, last in ends:
            if not 0 <= num_layers <= LAYERS_PER_STEP:
                raise InputError("num_layers", f"must be in 0..{LAYERS_PER_STEP}, is {num_layers}")
            self._check_last(transfer, last)
        if len({transfer.id for transfer, _, _ in ends}) < len(ends):
            raise InputError("last", "a list has one last write, the program names two for one transfer")
        self._last_step = step
        self._remember(step, [transfer for transfer, _ in pages] + [transfer for transfer, _, _ in ends])
        gate = step * LAYERS_PER_STEP
        runs = [(run, each) for transfer, each in pages for run in plan_runs(transfer, each, gate)]
        for run, each in sorted(runs, key=lambda item: item[0].gate):
            self._add(run.transfer, [run], each)
        for transfer, num_layers, last in ends:
            self._end_list(transfer, last, gate=gate + num_layers)
        self.wake()

    def raise_layers(self, counter: int) -> None:
        if counter > self._layers:
            self._layers = counter
            self.wake()

    def fail_step(self, step: int) -> dict[TransferId, int]:
        known = [transfer for transfer in self._steps.get(step, []) if transfer.id in self.transfers]
        return {transfer.id: self._close(transfer) for transfer in known}

    def close_transfer(self, transfer: TransferId) -> int:
        return self._close(self.transfer(transfer))

    def close_transfers_of(self, peer: PeerId) -> None:
        for transfer in [each for each in self.transfers.values() if each.peer == peer]:
            self._give_up(transfer, by_caller=False)

    def remove(self, peer: Peer) -> None:
        """Give up everything towards `peer`; what is outstanding counts as failed, whatever becomes of it."""
        self._ops.forget(peer)
        for transfer in [each for each in self.transfers.values() if each.peer == peer.id]:
            if transfer.num_outstanding:
                transfer.fail(errno.ECANCELED, f"{os.strerror(errno.ECANCELED)}: the peer was removed")
            transfer.num_failed += transfer.num_outstanding
            self.num_failed += transfer.num_outstanding
            transfer.num_outstanding = 0
            self._give_up(transfer, by_caller=False)
        del self.peers[peer.id]

    def complete(self, op: OpId, code: int) -> None:
        found = self._ops.give_back(op)
        if found is None:
            return
        transfer, peer = found
        peer.num_outstanding -= 1
        transfer.num_outstanding -= 1
        if code:
            self._fail_write(transfer, peer, code)
        else:
            self.num_completed += 1
        self._tell_if_done(transfer)
        if peer.outbox:
            self.wake()

    def _fail_write(self, transfer: Transfer, peer: Peer, code: int) -> None:
        transfer.num_failed += 1
        self.num_failed += 1
        transfer.fail(code, os.strerror(code))
        peer.is_broken |= code == errno.ECONNRESET
        # Its reader can never count to the end: what is not posted yet never will be.
        self._give_up(transfer, by_caller=False)

    # ---- checks

    def _open_list(self, transfer_id: TransferId) -> Transfer:
        transfer = self.transfer(transfer_id)
        if transfer.ended:
            raise InputError("transfer", f"the list of {transfer_id} is ended, nothing can be added")
        return transfer

    def _check_pages(self, transfer: Transfer, writes: PageWrites, max_layers: int) -> None:
        checked_shape(writes, max_layers)
        if transfer.digests:
            checked_positions(writes, len(transfer.digests))
        self._check_source("src", *extent(writes.src, writes.layer_begin, writes.layer_end, writes.length))

    def _check_last(self, transfer: Transfer, last: LastWrite) -> None:
        if last.length < 0:
            raise InputError("length", f"must be at least 0, is {last.length}")
        self._check_source("src_offset", last.src_offset, last.src_offset + last.length)
        size = 8 * len(transfer.digests)
        if size and not 0 <= last.digests_at <= last.length - size:
            raise InputError("digests_at", f"{size} bytes of digests must lie within the {last.length} of the write")

    def _check_source(self, name: str, begin: int, end: int) -> None:
        if begin < 0 or end > len(self._fabric.memory):
            raise InputError(name, f"[{begin}, {end}) is not within our memory of {len(self._fabric.memory)} bytes")

    def _lies_inside(self, transfer: Transfer, begin: int, end: int) -> bool:
        """The peer named these places: when they are not within its region the list ends, and nobody raises."""
        if transfer.given_up:
            return False
        length = transfer.descriptor.length
        if begin >= 0 and end <= length:
            return True
        transfer.fail(errno.EINVAL, f"[{begin}, {end}) is not within the peer's region of {length} bytes")
        self._give_up(transfer, by_caller=False)
        return False

    # ---- changes of lists

    def _add(self, transfer: Transfer, runs: Iterable[Run], writes: PageWrites) -> None:
        if self._lies_inside(transfer, *extent(writes.dst, writes.layer_begin, writes.layer_end, writes.length)):
            outbox = self.peers[transfer.peer].outbox
            for run in runs:
                outbox.add(run)

    def _end_list(self, transfer: Transfer, last: LastWrite | None, *, gate: int) -> None:
        inside = last is None or self._lies_inside(transfer, last.dst_offset, last.dst_offset + last.length)
        transfer.ended = True
        if last is not None and inside:
            self.peers[transfer.peer].outbox.add_last(transfer, last, gate)
        self._tell_if_done(transfer)

    def _remember(self, step: int, transfers: list[Transfer]) -> None:
        """For fail_step, which may come after all of the step was posted; steps with nothing left are forgotten."""
        for known in [known for known, each in self._steps.items() if not any(t.id in self.transfers for t in each)]:
            del self._steps[known]
        self._steps[step] = list(dict.fromkeys(transfers))

    def _close(self, transfer: Transfer) -> int:
        self._give_up(transfer, by_caller=True)
        return transfer.num_posted

    def _give_up(self, transfer: Transfer, *, by_caller: bool) -> None:
        """A list that the fabric gave up may still be named by its caller, until TransferDone was drained."""
        transfer.give_up()
        transfer.ended = transfer.ended and (by_caller or not transfer.given_up)
        self._tell_if_done(transfer)

    def _tell_if_done(self, transfer: Transfer) -> None:
        if transfer.is_done and not transfer.told:
            transfer.told = True
            self._tell(transfer.result())

    # ---- turns

    def wake(self, at: float | None = None) -> None:
        """Schedule a turn, now or `at`; an earlier one that is scheduled already does as well."""
        at = self._network.now if at is None else max(at, self._network.now)
        if self._turn_at is None or at < self._turn_at:
            self._turn_at = at
            delay = at - self._network.now
            self._network.schedule(lambda: self._turn(at), at=self._fabric, delay_s=(delay, delay))

    def _turn(self, planned_at: float) -> None:
        if self._fabric.is_gone or self._turn_at != planned_at:
            return
        self._turn_at = None
        peers = list(self.peers.values())
        self._first_served += 1
        for i in range(len(peers)):
            self._serve(peers[(self._first_served + i) % len(peers)])

    def _serve(self, peer: Peer) -> None:
        """Post to one peer: messages first, then some writes, until its window, its queue or the budget is full."""
        network, outbox = self._network, peer.outbox
        if network.now < peer.parked_until:
            self.wake(peer.parked_until)
            return
        while outbox.messages:
            if self._is_full(peer):
                return
            self._post_message(peer, outbox.messages.popleft())
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
        if peer.is_broken:
            return True
        if not self._network.draw(self._network.faults.full_queue):
            return False
        peer.parked_until = self._network.now + self._network.rng.uniform(*self._network.faults.queue_full_s)
        self.wake(peer.parked_until)
        return True

    def _post_of(self, run: Run, peer: Peer) -> None:
        transfer, src = run.transfer, run.src[run.place]
        if transfer.digests and run.positions:
            position = run.positions[run.place]
            message = self._fabric.memory[src : src + run.length].data
            digest = xxhash.xxh3_64_intdigest(message, message_seed(position, run.layer, run.route))
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
            self._fabric.memory[at : at + len(table)] = table
        self._post(transfer, peer, src=last.src_offset, dst=last.dst_offset, length=last.length)

    def _post(self, transfer: Transfer, peer: Peer, *, src: int, dst: int, length: int) -> None:
        transfer.num_posted += 1
        transfer.num_outstanding += 1
        peer.num_outstanding += 1
        self.num_posted += 1
        self.num_bytes += length
        Flight(
            self._network,
            self._fabric,
            self._network.find(peer.address),
            op=self._ops.take(transfer, peer),
            key=transfer.descriptor.key,
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
            network.post_message(self._fabric, target, message)

    def _fail_message(self, peer: Peer, code: int, delay_s: tuple[float, float]) -> None:
        def tell() -> None:
            if not self._fabric.is_gone:
                self._tell(SendFailed(peer=peer.id, code=code, text=os.strerror(code)))

        self._network.schedule(tell, at=self._fabric, delay_s=delay_s)
