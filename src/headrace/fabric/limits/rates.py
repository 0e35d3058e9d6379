"""The limits in one call each: makes the link, warms it up once, measures `repetitions` times and takes it down.

All of these block for as long as they measure. They raise InputError for what the caller asked and FabricError for what
failed, a side that died or stopped within `sides.timeout_s` among it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.errors import InputError
from headrace.fabric.limits.links import (
    HERE,
    WINDOW,
    Link,
    PageLink,
    Sides,
    WakeKind,
    libfabric_link,
    socket_link,
    wake_link,
)
from headrace.fabric.limits.loops import CopyLoop, copy_methods
from headrace.fabric.limits.memories import Memories, fresh_memories
from headrace.fabric.limits.placement import Placement
from headrace.fabric.limits.records import CopyRates, LinkRates, RoundTripTimes

REPETITIONS = 7
ROUNDS = 10_000


def copy_rates(
    placements: Sequence[Placement],
    *,
    method: str | None = None,
    memories: Memories | None = None,
    repetitions: int = REPETITIONS,
) -> CopyRates:
    """One core's copies between two mappings, each repetition over the next of the placements.

    `method` is one of `copy_methods()`, None the first: the widest non-temporal stores. Runs in this thread, on the CPU
    where it is; each page is fenced, as one that another process waits for.
    """
    chosen = method or copy_methods()[0]
    with _memories(placements, memories, repetitions) as given:
        loop = CopyLoop(given.src_fd, given.src_bytes, given.dst_fd, given.dst_bytes)
        spent = [
            loop.copy(place.src_offsets, place.dst_offsets, place.page_bytes, chosen)
            for place in _in_turn(placements, 1 + repetitions)
        ][1:]
    return CopyRates(
        method=chosen,
        page_bytes=placements[0].page_bytes,
        num_bytes=placements[0].num_bytes,
        seconds=tuple(ns / 1e9 for ns, _ in spent),
        cpu_seconds=tuple(cpu_ns / 1e9 for _, cpu_ns in spent),
    )


def socket_rates(
    placements: Sequence[Placement],
    *,
    memories: Memories | None = None,
    repetitions: int = REPETITIONS,
    sides: Sides = HERE,
) -> LinkRates:
    """The pages through one TCP connection, with blocking calls."""
    with _memories(placements, memories, repetitions) as given, socket_link(given, sides=sides) as link:
        return _rates(link, placements, repetitions)


def libfabric_rates(
    placements: Sequence[Placement],
    *,
    provider: str,
    node: str | None = None,
    window: int = WINDOW,
    memories: Memories | None = None,
    repetitions: int = REPETITIONS,
    sides: Sides = HERE,
) -> LinkRates:
    """The pages by libfabric writes, an imm on each, `window` under way."""
    with (
        _memories(placements, memories, repetitions) as given,
        libfabric_link(provider, given, node=node, window=window, sides=sides) as link,
    ):
        return _rates(link, placements, repetitions)


def wake_times(
    kind: WakeKind,
    *,
    num_rounds: int = ROUNDS,
    pause_s: float = 0.0,
    repetitions: int = REPETITIONS,
    sides: Sides = HERE,
) -> RoundTripTimes:
    """A wake-up and the answer's between two processes of this host.

    Without `pause_s` each falls asleep just before it is woken, and a core that has just gone idle wakes fast; with one
    that outlasts every spin window both sleep for sure, as peers do that have had nothing to do.
    """
    with wake_link(kind, sides=sides) as link:
        return _times(link, num_rounds, repetitions, pause_s)


def socket_times(
    *, num_rounds: int = ROUNDS, pause_s: float = 0.0, repetitions: int = REPETITIONS, sides: Sides = HERE
) -> RoundTripTimes:
    """Eight bytes through one TCP connection and back; both sides sleep in between."""
    with fresh_memories(_SMALL) as given, socket_link(given, sides=sides) as link:
        return _times(link, num_rounds, repetitions, pause_s)


def libfabric_times(
    *,
    provider: str,
    node: str | None = None,
    num_rounds: int = ROUNDS,
    pause_s: float = 0.0,
    repetitions: int = REPETITIONS,
    sides: Sides = HERE,
) -> RoundTripTimes:
    """A libfabric write of eight bytes with an imm and the answer's, both sides polling."""
    with (
        fresh_memories(_SMALL) as given,
        libfabric_link(provider, given, node=node, sides=sides) as link,
    ):
        return _times(link, num_rounds, repetitions, pause_s)


_SMALL = 4096


@contextmanager
def _memories(placements: Sequence[Placement], given: Memories | None, repetitions: int) -> Iterator[Memories]:
    """The caller's, or fresh ones that hold every page."""
    if repetitions < 1:
        raise InputError("repetitions", f"must be at least 1, is {repetitions}")
    if not placements:
        raise InputError("placements", "must be at least one")
    if len({(place.page_bytes, place.num_pages) for place in placements}) > 1:
        raise InputError("placements", "must all have as many pages, of the same size")
    if given is not None:
        yield given
        return
    ends = [
        int(offsets.max(initial=0)) + place.page_bytes
        for place in placements
        for offsets in (place.src_offsets, place.dst_offsets)
    ]
    with fresh_memories(max(*ends, _SMALL)) as made:
        yield made


def _in_turn(placements: Sequence[Placement], count: int) -> Iterator[Placement]:
    for index in range(count):
        yield placements[index % len(placements)]


def _rates(link: PageLink, placements: Sequence[Placement], repetitions: int) -> LinkRates:
    runs = [link.run(place) for place in _in_turn(placements, 1 + repetitions)]
    return LinkRates(link=link.name, page_bytes=placements[0].page_bytes, runs=tuple(runs[1:]))


def _times(link: Link, num_rounds: int, repetitions: int, pause_s: float) -> RoundTripTimes:
    if repetitions < 1:
        raise InputError("repetitions", f"must be at least 1, is {repetitions}")
    runs = tuple(link.round_trips(num_rounds, pause_s=pause_s) for _ in range(repetitions))
    return RoundTripTimes(link=link.name, pause_s=pause_s, runs=runs)
