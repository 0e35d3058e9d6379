"""A whole measurement: memories, sides, and every transport of the plan in turn. All of it blocks.

However it is left, no process and no file stays behind. A transport that fails is told as such; the next one is
measured between fresh sides.
"""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

from headrace.errors import FabricError, InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.links import HERE
from headrace.fabric.limits.memories import Memories, fresh_memories
from headrace.fabric.measure import questions as q
from headrace.fabric.measure.compare import ROUNDS, Tick, compare_pages, compare_rounds, compare_submits
from headrace.fabric.measure.limits import OpenLoop, opened_limits
from headrace.fabric.measure.link import EngineLink
from headrace.fabric.measure.plan import Plan
from headrace.fabric.measure.records import PageRates, Rest, Times, TransportMeasured
from headrace.fabric.measure.session import Place, Session
from headrace.fabric.measure.sides import Sides, far_sides, local_sides
from headrace.fabric.native import available_transports
from headrace.fabric.places import NEAR

LAST_SESSION_S = 5.0
"""How long another machine may take to notice that our last session is over."""


def find_transports(plan: Plan, place: Place | None) -> tuple[str, ...]:
    """Those that are to be measured. Raises InputError where one of the plan's cannot be."""
    possible: tuple[str, ...] = available_transports()
    if place is not None:
        with fresh_memories(1 << 12) as memories, _opened(memories, place) as (sides, _):
            theirs = sides.ask_second(q.Describe(), q.Described).transports
        possible = tuple(each for each in possible if each in theirs and each not in NEAR)
    missing = [each for each in plan.transports if each not in possible]
    if missing:
        whose = "this machine has" if place is None else "both machines have and what reaches from one to the other"
        raise InputError("transports", f"must be of what {whose} ({', '.join(possible)}), has {', '.join(missing)}")
    return plan.transports or possible


def num_steps(plan: Plan) -> int:
    """Of one transport: so often the caller is told of a step."""
    pages = len(plan.page_sizes) * (1 + plan.num_pairs)
    times = (len(ROUNDS) + 1) * plan.num_time_pairs if plan.num_rounds else 0
    return pages + times + (plan.rest_s > 0)


def measure(plan: Plan, transport: str, place: Place | None, tick: Tick) -> TransportMeasured:
    """`place` is None where both sides are on this host. Raises InputError; what fails is told as the error."""
    found = _Found()
    error = None
    try:
        with fresh_memories(plan.region_bytes) as memories, _opened(memories, place) as (sides, open_loop):
            sides.ask_first(q.Fill(seed=plan.seed), wire.Done)
            engine = EngineLink(sides, transport, one_clock=transport == "mapped")
            with opened_limits(transport, sides, memories, open_loop, with_times=plan.num_rounds > 0) as limits:
                for page_bytes in plan.page_sizes:
                    found.pages.append(compare_pages(engine, limits.pages, plan, page_bytes, tick))
                if plan.num_rounds:
                    for kind in ROUNDS:
                        found.times.append(compare_rounds(kind, engine, limits.times, plan, tick))
                    found.times += compare_submits(engine, limits.times, plan, tick)
            if plan.rest_s:
                found.rest = engine.rest(plan.rest_s)
                tick("rest")
    except FabricError as failed:
        error = str(failed)
    return TransportMeasured(
        transport=transport, pages=tuple(found.pages), times=tuple(found.times), rest=found.rest, error=error
    )


class _Found:
    """As far as it came."""

    def __init__(self) -> None:
        self.pages: list[PageRates] = []
        self.times: list[Times] = []
        self.rest: Rest | None = None


@contextmanager
def _opened(memories: Memories, place: Place | None) -> Iterator[tuple[Sides, OpenLoop | None]]:
    first, _ = cpus = HERE.two_cpus()
    if place is None:
        with local_sides(memories, cpus) as sides:
            yield sides, None
        return
    session = Session(place)
    with far_sides(memories, first, _open_engine(session)) as sides:
        yield sides, session.open_loop


def _open_engine(session: Session) -> socket:
    """Our own last session there may not be over yet; another client's is more than a moment away from its end."""
    until = time.monotonic() + LAST_SESSION_S
    while True:
        try:
            return session.open_engine()
        except FabricError as error:
            if error.code != errno.EBUSY or time.monotonic() > until:
                raise
            time.sleep(0.1)
