"""One fabric joined with one other, and what is timed of it. Lives in a side's main thread; each call returns when the
other side has done its part, and raises FabricError when it does not within `WAIT_S`.

Two imms of ours carry everything. `SIGNAL` is counted on both sides, one arrival after the other: the second side says
that it is ready, and that it has all; the same write is the ball of round trips. `PAGES` is on the pages themselves.

    first    wait for ready, [ submit pages ............. wait for the answer )
    second   arm, say ready         wait until all have come, answer
"""

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.fabric.interface import Descriptor, Imm, MessageReceived, Pages, PageWrites, PeerId, TransferId
from headrace.fabric.limits import wire
from headrace.fabric.limits.placement import Offsets
from headrace.fabric.measure import questions as q
from headrace.fabric.measure.inbox import WAIT_S, Arrivals, Inbox, silent
from headrace.fabric.native import NativeFabric, Transport

SIGNAL, PAGES, BALL, BALL_BACK = (Imm(slot) for slot in range(1, 5))
BALL_BYTES = 8

WARM_UP_ROUNDS = 100
"""As the bare loops play them."""

Nanoseconds = NDArray[np.uint64]


class Engine:
    """`nodes` are the local addresses where it listens, `cpu` is its owner thread's."""

    def __init__(self, memory_fd: int, length: int, transport: str, *, nodes: Sequence[str], cpu: int | None) -> None:
        self._fabric = NativeFabric(
            memory_fd,
            length,
            transports=(cast("Transport", transport),),
            nodes=nodes,
            cpus=() if cpu is None else (cpu,),
        )
        self._inbox = Inbox(self._fabric)
        self._admitted: PeerId | None = None
        self._open_signals: TransferId | None = None  # a list that stays open
        self._num_signals = 0  # that came

    @property
    def address(self) -> bytes:
        return self._fabric.address

    def admit(self, address: bytes) -> bytes:
        """-> a descriptor, for whoever has that address."""
        self._admitted = self._fabric.add_peer(address)
        return self._fabric.grant(self._admitted).encode()

    def join(self, descriptor: bytes) -> None:
        self._fabric.connect(self._peer, Descriptor.decode(descriptor))
        self._listen()

    def close(self) -> None:
        self._fabric.close()

    @property
    def _peer(self) -> PeerId:
        if self._admitted is None:
            raise InputError("question", "must come after Admit")
        return self._admitted

    @property
    def _signals(self) -> TransferId:
        if self._open_signals is None:
            raise InputError("question", "must come after Join")
        return self._open_signals

    # ---- signals

    def _listen(self) -> None:
        self._num_signals = 0
        self._fabric.arm(SIGNAL, 1)
        self._open_signals = self._fabric.open_transfer(self._peer, SIGNAL)

    def _stop_listening(self) -> None:
        self._fabric.close_transfer(self._signals)
        self._open_signals = None
        self._fabric.disarm(SIGNAL)

    def _signal(self, length: int = 0) -> None:
        self._fabric.submit_write(self._signals, src_offset=0, dst_offset=0, length=length)

    def _next_signal(self) -> int:
        """-> when it came."""
        at_ns = self._inbox.wait_reached(SIGNAL)
        self._count_on_another()
        return at_ns

    def _count_on_another(self) -> None:
        """It may have come already: then it is told now."""
        self._num_signals += 1
        self._fabric.retarget(SIGNAL, self._num_signals + 1)

    # ---- pages

    def write_pages(self, src: Offsets, dst: Offsets, page_bytes: int) -> q.Wrote:
        writes = _page_writes(src, dst, page_bytes)
        self._next_signal()
        cpu_before, began_ns = time.process_time_ns(), time.monotonic_ns()
        transfer = self._fabric.open_transfer(self._peer, PAGES)
        self._fabric.submit_pages(transfer, writes)
        self._fabric.submit_last(transfer)
        answered_ns = self._next_signal()
        return q.Wrote(began_ns=began_ns, answered_ns=answered_ns, cpu_ns=time.process_time_ns() - cpu_before)

    def receive_pages(self, num_pages: int) -> q.Received:
        self._fabric.arm(PAGES, num_pages)
        self._signal()
        cpu_before = time.process_time_ns()
        reached_ns = self._inbox.wait_reached(PAGES)
        self._signal()
        cpu_ns = time.process_time_ns() - cpu_before
        self._fabric.disarm(PAGES)
        return q.Received(reached_ns=reached_ns, cpu_ns=cpu_ns)

    def submit_pages(self, src: Offsets, dst: Offsets, page_bytes: int, num_rounds: int) -> wire.Times:
        writes = _page_writes(src, dst, page_bytes)
        times = []
        for _ in range(num_rounds):
            self._next_signal()
            transfer = self._fabric.open_transfer(self._peer, PAGES)
            began_ns = time.monotonic_ns()
            self._fabric.submit_pages(transfer, writes)
            times.append(time.monotonic_ns() - began_ns)
            self._fabric.submit_last(transfer)
        return percentiles(np.array(times, dtype=np.uint64))

    def collect_pages(self, num_pages: int, num_rounds: int) -> wire.Times:
        return percentiles(np.array(asyncio.run(self._collect(num_pages, num_rounds)), dtype=np.uint64))

    async def _collect(self, num_pages: int, num_rounds: int) -> list[int]:
        arrivals = Arrivals(self._inbox, PAGES)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fabric.event_fd, arrivals.on_events)
        times = []
        for _ in range(num_rounds):
            come = arrivals.expect()
            self._fabric.arm(PAGES, num_pages)
            self._signal()
            # Not asyncio.wait_for, whose own turns of the loop would be measured, too.
            overdue = loop.call_later(WAIT_S, arrivals.fail, silent())
            at_ns = await come
            times.append(time.monotonic_ns() - at_ns)
            overdue.cancel()
            self._fabric.disarm(PAGES)
        loop.remove_reader(self._fabric.event_fd)
        return times

    # ---- round trips

    def ping(self, by: q.RoundsBy, num_rounds: int, pause_ns: int) -> wire.Times:
        self._next_signal()
        if by == "owner":
            return percentiles(self._owner_rounds(num_rounds, pause_ns))
        play = self._play_signal if by == "python" else self._play_message
        times = np.zeros(WARM_UP_ROUNDS + num_rounds, dtype=np.uint64)
        for number in range(len(times)):
            if pause_ns:
                time.sleep(pause_ns / 1e9)
            times[number] = play(number)
        return percentiles(times[WARM_UP_ROUNDS:])

    def pong(self, by: q.RoundsBy, num_rounds: int) -> None:
        if by == "owner":  # which answers by itself from now on
            self._fabric.echo(self._peer, BALL, BALL_BACK)
            return self._signal()
        self._signal()
        for number in range(WARM_UP_ROUNDS + num_rounds):
            if by == "python":
                self._inbox.wait_reached(SIGNAL)
                self._signal(BALL_BYTES)
                self._count_on_another()  # after the answer, so that it costs the round nothing
            else:
                self._fabric.send(self._peer, self._message(number))
        return None

    def _owner_rounds(self, num_rounds: int, pause_ns: int) -> Nanoseconds:
        self._fabric.round_trips(self._peer, BALL, BALL_BACK, count=WARM_UP_ROUNDS)
        return self._fabric.round_trips(self._peer, BALL, BALL_BACK, count=num_rounds, pause_s=pause_ns / 1e9)

    def _play_signal(self, number: int) -> int:
        began_ns = time.monotonic_ns()
        self._signal(BALL_BYTES)
        self._inbox.wait_reached(SIGNAL)
        ended_ns = time.monotonic_ns()
        self._count_on_another()
        return ended_ns - began_ns

    def _play_message(self, number: int) -> int:
        began_ns = time.monotonic_ns()
        self._fabric.send(self._peer, number.to_bytes(BALL_BYTES, "little"))
        self._message(number)
        return time.monotonic_ns() - began_ns

    def _message(self, number: int) -> bytes:
        expected = number.to_bytes(BALL_BYTES, "little")
        self._inbox.wait(lambda event: isinstance(event, MessageReceived) and event.message == expected)
        return expected

    # ---- nothing

    def idle(self, ns: int) -> q.Idled:
        """With a peer, and no list or counter that waits for anything."""
        self._stop_listening()
        wall, cpu, owner = time.monotonic_ns(), time.process_time_ns(), self._fabric.owner_cpu_ns()
        time.sleep(ns / 1e9)
        owner = self._fabric.owner_cpu_ns() - owner
        idled = q.Idled(ns=time.monotonic_ns() - wall, cpu_ns=time.process_time_ns() - cpu, owner_cpu_ns=owner)
        self._listen()
        return idled


def percentiles(times_ns: Nanoseconds) -> wire.Times:
    """By nearest rank, as the bare loops' are."""
    p50, p99 = np.percentile(times_ns, [50, 99], method="inverted_cdf")
    return wire.Times(p50_ns=int(p50), p99_ns=int(p99))


def _page_writes(src: Offsets, dst: Offsets, page_bytes: int) -> PageWrites:
    return PageWrites(
        src=_pages(src),
        dst=_pages(dst),
        positions=np.arange(len(src), dtype=np.int64),
        layer_begin=0,
        layer_end=1,
        length=page_bytes,
    )


def _pages(offsets: Offsets) -> Pages:
    """Offsets in bytes are page numbers with a stride of one."""
    return Pages(offset=0, layer_stride=0, page_stride=1, indices=offsets)
