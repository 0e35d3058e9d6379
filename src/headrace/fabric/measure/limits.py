"""What an engine on each transport is compared with: the bare loops, opened for as long as the transport is measured.

mapped    copies between the same two memories; words and eventfds to and fro
others    the same libfabric provider with nothing around it; one TCP connection with nothing around that
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from socket import socket
from typing import Protocol

from headrace.fabric.limits.links import HERE, libfabric_link, socket_link, wake_link
from headrace.fabric.limits.links import Sides as LoopSides
from headrace.fabric.limits.memories import Memories
from headrace.fabric.limits.placement import Placement
from headrace.fabric.limits.records import LinkRun, RoundTrips
from headrace.fabric.measure import questions as q
from headrace.fabric.measure.records import TimeKind
from headrace.fabric.measure.sides import Sides
from headrace.fabric.native import PROVIDERS


class CarriesPages(Protocol):
    @property
    def name(self) -> str: ...

    def run(self, placement: Placement) -> LinkRun: ...


class CarriesWords(Protocol):
    @property
    def name(self) -> str: ...

    def round_trips(self, num_rounds: int, *, pause_s: float = 0.0) -> RoundTrips: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The first of `pages` is the one to come near to. Times without a limit are not in `times`."""

    pages: tuple[CarriesPages, ...]
    times: Mapping[TimeKind, CarriesWords]


OpenLoop = Callable[[], socket]
"""A connection to a bare loop's other side, on another host."""


@contextmanager
def opened_limits(
    transport: str, sides: Sides, memories: Memories, open_loop: OpenLoop | None, *, with_times: bool
) -> Iterator[Limits]:
    """`open_loop` is None where both sides are on this host."""
    with ExitStack() as stack:
        times: dict[TimeKind, CarriesWords] = {}
        if with_times and open_loop is None:
            eventfd = stack.enter_context(wake_link("eventfd"))
            times |= {"python": eventfd, "message": eventfd, "coroutine": OneWay(eventfd)}
        if transport == "mapped":
            times |= _wake_ups(stack) if with_times else {}
            yield Limits(pages=(BareCopies(sides),), times=times)
            return
        bare, plain = (_loop_sides(stack, open_loop) for _ in range(2))
        writes = stack.enter_context(libfabric_link(PROVIDERS[transport], memories, sides=bare))
        stream = stack.enter_context(socket_link(memories, sides=plain))
        times |= {"owner": writes, "owner_asleep": stream, "python": stream, "message": stream}
        yield Limits(pages=(writes, stream), times=times)


def _wake_ups(stack: ExitStack) -> dict[TimeKind, CarriesWords]:
    times: dict[TimeKind, CarriesWords] = {"owner_asleep": stack.enter_context(wake_link("futex"))}
    first, last = HERE.two_cpus()
    if first != last:  # on one, each would wait until the other's time is over
        times["owner"] = stack.enter_context(wake_link("spin"))
    return times


def _loop_sides(stack: ExitStack, open_loop: OpenLoop | None) -> LoopSides:
    return LoopSides(peer=stack.enter_context(open_loop())) if open_loop else HERE


class BareCopies:
    """By one thread of the first side's process, from its memory into the second's."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._method = ""

    @property
    def name(self) -> str:
        """Known after the first run."""
        return f"copy {self._method}".rstrip()

    def run(self, placement: Placement) -> LinkRun:
        src, dst = q.wired(placement.src_offsets), q.wired(placement.dst_offsets)
        question = q.CopyPages(src_offsets=src, dst_offsets=dst, page_bytes=placement.page_bytes)
        copied = self._sides.ask_first(question, q.Copied)
        self._method = copied.method
        return LinkRun(
            num_bytes=placement.num_bytes,
            seconds=copied.spent.ns / 1e9,
            sender_cpu_s=copied.spent.cpu_ns / 1e9,
            receiver_cpu_s=0.0,
        )


class OneWay:
    """Half of a round trip."""

    def __init__(self, there_and_back: CarriesWords) -> None:
        self._rounds = there_and_back
        self.name = f"{there_and_back.name} one way"

    def round_trips(self, num_rounds: int, *, pause_s: float = 0.0) -> RoundTrips:
        whole = self._rounds.round_trips(num_rounds, pause_s=pause_s)
        return RoundTrips(num_rounds=num_rounds, p50_ns=whole.p50_ns // 2, p99_ns=whole.p99_ns // 2)
