"""Links: pairs of processes joined by one of the bare loops, kept for as many runs as wanted.

Whoever compares takes turns: a run over the link, a run of something else, and so on. All of this blocks; it is called
from one thread at a time, with no loop to hold up. Each function is a context manager that leaves no process and no
file behind, however it is left.
"""

import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from headrace.errors import InputError
from headrace.fabric.limits import names, wire
from headrace.fabric.limits.memories import Memories
from headrace.fabric.limits.pair import Pair
from headrace.fabric.limits.placement import Placement
from headrace.fabric.limits.records import LinkRun, RoundTrips
from headrace.fabric.limits.side import Given

WakeKind = Literal["futex", "eventfd", "spin"]

WINDOW = 128
"""Writes under way at once; more bring nothing on the providers that were measured (FABRIC)."""

NAMED_PROVIDERS = ("shm", "sm2")
"""They keep a file in /dev/shm for each endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Where the two sides run, and how long one question to them may take."""

    cpus: tuple[int, int] | None = None  # None: the first and the last that this process may use
    peer: socket.socket | None = None  # leads to a `serve_side` elsewhere, for one link; None: a second process here
    timeout_s: float = 60.0

    def two_cpus(self) -> tuple[int, int]:
        usable = sorted(os.sched_getaffinity(0))
        return self.cpus or (usable[0], usable[-1])


HERE = Sides()


class Link:
    """Carries words to and fro."""

    def __init__(self, pair: Pair, name: str) -> None:
        self._pair = pair
        self.name = name

    @property
    def process_ids(self) -> list[int | None]:
        """Of the first and the second side; None for one on another host."""
        return list(self._pair.process_ids)

    def round_trips(self, num_rounds: int, *, pause_s: float = 0.0) -> RoundTrips:
        """With `pause_s` before each, so that both sides have long been idle. Raises FabricError, also when a side dies
        or the time is over."""
        ping = wire.Ping(num_rounds=num_rounds, pause_ns=round(pause_s * 1e9))
        times, _ = self._pair.ask(ping, wire.Pong(num_rounds=num_rounds))
        assert isinstance(times, wire.Times)
        return RoundTrips(num_rounds=num_rounds, p50_ns=times.p50_ns, p99_ns=times.p99_ns)


class PageLink(Link):
    """Carries pages, too."""

    def __init__(self, pair: Pair, name: str, *, window: int = WINDOW) -> None:
        super().__init__(pair, name)
        self._window = window

    def run(self, placement: Placement) -> LinkRun:
        """Every page of it once, in order. Raises as `round_trips`, and InputError for places beyond the memories."""
        src, dst = (offsets.astype("<i8").tobytes() for offsets in (placement.src_offsets, placement.dst_offsets))
        send = wire.Send(src_offsets=src, dst_offsets=dst, page_bytes=placement.page_bytes, window=self._window)
        sent, received = self._pair.ask(send, wire.Receive(dst_offsets=dst, page_bytes=placement.page_bytes))
        assert isinstance(sent, wire.Spent) and isinstance(received, wire.Spent)
        return LinkRun(
            num_bytes=placement.num_bytes,
            seconds=sent.ns / 1e9,
            sender_cpu_s=sent.cpu_ns / 1e9,
            receiver_cpu_s=received.cpu_ns / 1e9,
        )


@contextmanager
def wake_link(kind: WakeKind, *, sides: Sides = HERE) -> Iterator[Link]:
    """Two processes of this host that wake each other by futex or eventfd, or that spin and never sleep."""
    if sides.peer is not None:
        raise InputError("sides.peer", "must be None: no wake-up reaches another host")
    cpus = sides.two_cpus()
    if kind == "spin" and cpus[0] == cpus[1]:
        raise InputError(
            "kind", f"must not be 'spin' on one CPU ({cpus[0]}): each would wait until the other's time is over"
        )
    with ExitStack() as stack:
        words, *eventfds = os.memfd_create("headrace-limits-words"), os.eventfd(0), os.eventfd(0)
        for fd in (words, *eventfds):
            stack.callback(os.close, fd)
        os.ftruncate(words, mmap.PAGESIZE)
        wake = words, eventfds[0], eventfds[1]
        first, second = (Given(wake=wake, cpu=cpu) for cpu in cpus)
        pair = Pair(first, second, timeout_s=sides.timeout_s)
        stack.callback(pair.close)
        pair.ask(wire.OpenWake(kind=kind), wire.OpenWake(kind=kind))
        yield Link(pair, kind)


@contextmanager
def socket_link(memories: Memories, *, sides: Sides = HERE) -> Iterator[PageLink]:
    """One TCP connection: over loopback, or to where the peer's connection leads."""
    with _pair(memories, sides) as pair:
        (listening,) = pair.ask(None, wire.Listen())
        assert isinstance(listening, wire.Listening)
        host = "127.0.0.1" if sides.peer is None else sides.peer.getpeername()[0]
        pair.ask(wire.Connect(host=host, port=listening.port), None)
        yield PageLink(pair, "tcp")


@contextmanager
def libfabric_link(
    provider: str, memories: Memories, *, node: str | None = None, window: int = WINDOW, sides: Sides = HERE
) -> Iterator[PageLink]:
    """One endpoint of `provider` on each side, bound to the local address `node` (None: where the connection to
    the peer begins and where it arrives, or loopback)."""
    named = provider.split(";")[0] in NAMED_PROVIDERS
    if named and sides.peer is not None:
        raise InputError("provider", f"must reach another host, {provider!r} does not")
    with _pair(memories, sides) as pair:
        if named:
            names.sweep()
        here = node if node is not None or sides.peer is None else str(sides.peer.getsockname()[0])
        first, second = (_endpoint(pair, side, provider, at, named=named) for side, at in ((0, here), (1, node)))
        ours, theirs = pair.ask(first, second)
        assert isinstance(ours, wire.Target) and isinstance(theirs, wire.Target)
        pair.ask(wire.ConnectEndpoint(target=theirs), wire.ConnectEndpoint(target=ours))
        yield PageLink(pair, provider, window=window)


def _endpoint(pair: Pair, side: int, provider: str, node: str | None, *, named: bool) -> wire.OpenEndpoint:
    process = pair.process_ids[side]
    if not named or process is None:
        return wire.OpenEndpoint(provider=provider, node=node, name=None)
    name = names.new_name(process)
    pair.name_endpoint(side, name)
    return wire.OpenEndpoint(provider=provider, node=None, name=name)


@contextmanager
def _pair(memories: Memories, sides: Sides) -> Iterator[Pair]:
    cpus = sides.two_cpus()
    first = Given(memory=(memories.src_fd, memories.src_bytes), cpu=cpus[0])
    second = Given(memory=(memories.dst_fd, memories.dst_bytes), cpu=cpus[1])
    pair = Pair(first, sides.peer or second, timeout_s=sides.timeout_s)
    try:
        if sides.peer is not None:
            pair.ask(None, wire.MakeMemory(num_bytes=memories.dst_bytes))
        yield pair
    finally:
        pair.close()
