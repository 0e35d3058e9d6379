"""The write lists of a loopback endpoint: opened, filled, gated by steps, ended, told done.

Owns transfers and programs, and checks what it is given before it touches either; when and how something is posted is
`posting`'s. Every list gets one TransferDone.
"""

import errno
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from headrace.errors import InputError
from headrace.fabric.interface import (
    LAYERS_PER_STEP,
    Event,
    Imm,
    LastWrite,
    PageWrites,
    PeerId,
    PeerLost,
    TransferId,
)
from headrace.testing.counters import checked_imm
from headrace.testing.endpoint import Endpoint
from headrace.testing.network import LoopbackNetwork
from headrace.testing.outbox import (
    MAX_LAYERS,
    Run,
    Transfer,
    checked_positions,
    checked_shape,
    extent,
    plan_runs,
)
from headrace.testing.posting import Peer, Posting


class Writer:
    """One per endpoint; the endpoint checks that it is open before it calls."""

    def __init__(self, network: LoopbackNetwork, endpoint: Endpoint, tell: Callable[[Event], None]) -> None:
        self._network, self._endpoint, self._tell = network, endpoint, tell
        self.posting = Posting(network, endpoint, tell=tell, completed=self._on_completed)
        self.transfers: dict[TransferId, Transfer] = {}
        self._num_opened = 0
        self._steps: dict[int, list[Transfer]] = {}
        self._last_step = -1

    # ---- lists

    def peer(self, peer: PeerId) -> Peer:
        found = self.posting.peers.get(peer)
        if found is None:
            raise InputError("peer", f"{peer} is not known here (never added, or removed)")
        return found

    def transfer(self, transfer: TransferId) -> Transfer:
        found = self.transfers.get(transfer)
        if found is None:
            raise InputError("transfer", f"{transfer} is not known here (never opened, or told done)")
        return found

    def open(self, peer: PeerId, imm: Imm, num_pages: int, deadline_s: float) -> TransferId:
        if not deadline_s >= 0:
            raise InputError("deadline_s", f"must be at least 0, is {deadline_s}")
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
        if deadline_s < math.inf:
            end = partial(self._end_late, self.transfers[opened])
            self._network.schedule(end, at=self._endpoint, delay_s=(deadline_s, deadline_s))
        return opened

    def submit_write(self, transfer_id: TransferId, src: int, dst: int, length: int) -> None:
        transfer = self._open_list(transfer_id)
        if length < 0:
            raise InputError("length", f"must be at least 0, is {length}")
        self._check_source("src_offset", src, src + length)
        if self._lies_inside(transfer, dst, dst + length):
            run = Run(transfer=transfer, gate=0, layer=0, route=0, length=length, src=[src], dst=[dst], positions=[])
            self.posting.peers[transfer.peer].outbox.add(run)
            self.posting.wake()

    def submit_pages(self, transfer_id: TransferId, writes: PageWrites) -> None:
        transfer = self._open_list(transfer_id)
        self._check_pages(transfer, writes, MAX_LAYERS)
        self._add(transfer, plan_runs(transfer, writes, None), writes)
        self.posting.wake()

    def submit_last(self, transfer_id: TransferId, last: LastWrite | None) -> None:
        transfer = self._open_list(transfer_id)
        if last is not None:
            self._check_last(transfer, last)
        self._end_list(transfer, last, gate=0)
        self.posting.wake()

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
        self.posting.wake()

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
        self.posting.forget(peer)
        for transfer in [each for each in self.transfers.values() if each.peer == peer.id]:
            if transfer.num_outstanding:
                transfer.fail(errno.ECANCELED, f"{os.strerror(errno.ECANCELED)}: the peer was removed")
            transfer.num_failed += transfer.num_outstanding
            transfer.num_outstanding = 0
            self._give_up(transfer, by_caller=False)

    def lose(self, peer: Peer) -> None:
        """What was not posted never will be; what was ends as the network says."""
        code, text = errno.ECONNRESET, "its control connection ended"
        self._tell(PeerLost(peer=peer.id, code=code, text=text))
        if peer.descriptor is not None:  # a process started anew counts its grants anew
            peer.descriptor = replace(peer.descriptor, generation=0)
        text = f"control connection: {text}"
        for transfer in [each for each in self.transfers.values() if each.peer == peer.id and not each.is_over]:
            transfer.fail(code, text)
            self._give_up(transfer, by_caller=False)
        self.posting.drop_messages(peer, code, text)

    def _end_late(self, transfer: Transfer) -> None:
        if not (self._endpoint.is_gone or transfer.is_over):
            transfer.fail(errno.ETIMEDOUT, "its deadline passed")
            self._give_up(transfer, by_caller=True)

    def _on_completed(self, transfer: Transfer, code: int) -> None:
        if code:
            transfer.num_failed += 1
            transfer.fail(code, os.strerror(code))
            # Its reader can never count to the end: what is not posted yet never will be.
            self._give_up(transfer, by_caller=False)
        else:
            self._tell_if_done(transfer)

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
        length = len(self._endpoint.memory)
        if begin < 0 or end > length:
            raise InputError(name, f"[{begin}, {end}) is not within our memory of {length} bytes")

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
            outbox = self.posting.peers[transfer.peer].outbox
            for run in runs:
                outbox.add(run)

    def _end_list(self, transfer: Transfer, last: LastWrite | None, *, gate: int) -> None:
        inside = last is None or self._lies_inside(transfer, last.dst_offset, last.dst_offset + last.length)
        transfer.ended = True
        if last is not None and inside:
            self.posting.peers[transfer.peer].outbox.add_last(transfer, last, gate)
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
