"""Who runs in the next step, who gives way, who comes back: the engine's policy, as pure functions of a snapshot.

Owns nothing and changes nothing; `Engine` carries the plans out, a simulation of it may do the same. There are two
orders, and both put the earlier tier first and then the earlier arrival:

    in line, chunks    (tier, arrival)
    decode rows        the oldest of all, whatever its tier, then (tier, arrival); pages are given from the front and
                       taken back from the end: `[oldest | interactive by arrival | flex by arrival]`

So the oldest decoding request can take the page of any other and loses none of its own: it always gets further, and
after it the next one is the oldest. Only a decoding request gives way. One whose KV is being fetched is not in
`decoding`, and its pages are not ours to take; one that prefills has all the pages that it needs to become decoding.

A LatencyBudget bounds two things: who enters, so that a decode step of all that run keeps the TPOT budget, and how many
prompt tokens are computed in a step that also decodes. It takes nothing from those who decode already, and prompts
always get further.

Keys are whatever the caller names its requests by. Who only counts pages and keys, as a simulation does, asks
`may_enter` and `chunks_beside`, which decide for `next_to_enter` and `schedule` too.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

from headrace.engine.cost import CHUNK_MULTIPLE, StepCost, StepSize
from headrace.engine.requests import TIERS, Tier

Key = TypeVar("Key", bound=Hashable)

MIN_CHUNK = CHUNK_MULTIPLE
"""Tokens, at most, that are computed beside decode rows whatever the budget: a prompt that stands still is worse than
a bound that is missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding(Generic[Key]):
    """One row in this step: the query at position `kv_len`, whose KV is appended there."""

    key: Key
    tier: Tier
    order: int  # of arrival
    kv_len: int
    pages: Sequence[int]  # page table

    def needs_page(self, page_size: int) -> bool:
        return self.kv_len == len(self.pages) * page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilling(Generic[Key]):
    """Positions [computed, end) are to be computed, into pages that are there."""

    key: Key
    tier: Tier
    order: int
    computed: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entering(Generic[Key]):
    """Holds no pages, and needs this many of those that are free or cached: for all its known tokens and growth,
    less the pages of its prefix that others hold. `num_keys` are its known tokens, which its first decode row reads."""

    key: Key
    num_pages: int
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Generic[Key]):
    """`other_tables` are the page tables of everybody who holds pages and is not decoding; a page may be in several
    tables. `other_keys` is what they all together will read when they decode. `first_in_line` is the first by `rank` of
    those that wait for pages: nobody overtakes, or large ones would starve."""

    decoding: Sequence[Decoding[Key]]
    prefilling: Sequence[Prefilling[Key]]
    other_tables: Sequence[Sequence[int]]
    other_keys: int
    first_in_line: Entering[Key] | None
    num_available: int  # pages that are free or cached
    page_size: int

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.other_tables)

    @property
    def num_growing(self) -> int:
        """Pages that the decode rows of the next step need."""
        return sum(request.needs_page(self.page_size) for request in self.decoding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A snapshot in counts. `num_keys`: of a decode step of all that hold pages, once they have come to that."""

    num_running: int
    num_growing: int
    num_available: int
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBudget:
    """What a step that decodes is to take at most, as `cost` predicts it; None: there is no such bound. `margin`: how
    many times its prediction a step may well take."""

    cost: StepCost
    tpot_s: float | None
    max_stall_s: float | None
    margin: float = 1.0

    @property
    def step_s(self) -> float | None:
        """Of a step with decode rows, whatever else is in it: both bounds are kept."""
        return min((bound for bound in (self.tpot_s, self.max_stall_s) if bound is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk(Generic[Key]):
    """Positions [begin, end) of one prompt, computed in one step."""

    key: Key
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(Generic[Key]):
    """Carried out in this order: `preempt` give all their pages back, `grow` get one page each, then `rows` (one token
    each) and `chunks` are computed. Those that grow are among the rows, those that are preempted are not. `size` is of
    rows and chunks together."""

    preempt: tuple[Key, ...]
    grow: tuple[Key, ...]
    rows: tuple[Key, ...]
    chunks: tuple[Chunk[Key], ...]
    size: StepSize


def rank(tier: Tier, order: int) -> tuple[int, int]:
    """Sorts by tier, then arrival."""
    return TIERS.index(tier), order


def next_to_enter(snapshot: Snapshot[Key], *, max_running: int, budget: LatencyBudget | None = None) -> Key | None:
    """The first in line, when its pages are there beside those that the decode rows of the next step need, and all that
    run then decode within the TPOT budget; one runs in any case. Each one that enters changes what is left for the
    next: take a new snapshot and ask again."""
    first = snapshot.first_in_line
    if first is None:
        return None
    standing = Standing(
        num_running=snapshot.num_running,
        num_growing=snapshot.num_growing,
        num_available=snapshot.num_available,
        num_keys=sum(request.kv_len + 1 for request in snapshot.decoding) + snapshot.other_keys,
    )
    return first.key if may_enter(standing, first, max_running=max_running, budget=budget) else None


def may_enter(
    standing: Standing, first: Entering[Key], *, max_running: int, budget: LatencyBudget | None = None
) -> bool:
    """As `next_to_enter`."""
    if standing.num_running >= max_running:
        return False
    if first.num_pages > standing.num_available - standing.num_growing:
        return False
    return budget is None or _decodes_in_time(standing, first, budget)


def schedule(
    snapshot: Snapshot[Key], *, chunk_tokens: int, budget: LatencyBudget | None = None
) -> StepPlan[Key] | None:
    """The next step; None when nothing can run. Every decoding request has a row, but for those that are preempted
    and for an oldest one that needs a page while others, who cannot give way, have them all: it waits. Beside rows,
    chunks are cut so that the step keeps the budget, or to MIN_CHUNK; without rows nobody waits for it."""
    given = _give_pages(snapshot)
    size = _size_of_rows(snapshot, given.rows)
    chunks = chunks_beside(size, snapshot.prefilling, chunk_tokens=chunk_tokens, budget=budget)
    plan = StepPlan(
        preempt=tuple(given.preempt),
        grow=tuple(given.grow),
        rows=tuple(given.rows),
        chunks=tuple(chunks),
        size=size_beside(size, chunks),
    )
    return plan if plan.preempt or plan.rows or plan.chunks else None


def chunks_beside(
    rows: StepSize, prefilling: Sequence[Prefilling[Key]], *, chunk_tokens: int, budget: LatencyBudget | None
) -> list[Chunk[Key]]:
    """Of the next step, which has these rows."""
    if rows.rows and budget is not None:
        chunk_tokens = _affordable_tokens(prefilling, chunk_tokens, rows, budget)
    return plan_chunks(prefilling, chunk_tokens)


def plan_chunks(prefilling: Iterable[Prefilling[Key]], chunk_tokens: int) -> list[Chunk[Key]]:
    """Up to `chunk_tokens` prompt tokens, by tier and arrival; what one prompt leaves the next one uses."""
    chunks = []
    left = chunk_tokens
    for request in sorted(prefilling, key=lambda request: rank(request.tier, request.order)):
        num_tokens = min(left, request.end - request.computed)
        if num_tokens:
            chunks.append(Chunk(key=request.key, begin=request.computed, end=request.computed + num_tokens))
        left -= num_tokens
    return chunks


# ---- what it costs ---------------------------------------------------------------------------------------------


def _affordable_tokens(
    prefilling: Sequence[Prefilling[Key]], chunk_tokens: int, rows: StepSize, budget: LatencyBudget
) -> int:
    """The most prompt tokens, up to `chunk_tokens`, with which a step of these rows keeps the budget, or MIN_CHUNK."""
    if budget.step_s is None or not prefilling:
        return chunk_tokens
    bound_s = budget.step_s / budget.margin

    def seconds(num_tokens: int) -> float:
        return budget.cost.predict(size_beside(rows, plan_chunks(prefilling, num_tokens)))

    if seconds(chunk_tokens) <= bound_s:
        return chunk_tokens
    num_fitting = bisect_right(range(CHUNK_MULTIPLE, chunk_tokens + 1, CHUNK_MULTIPLE), bound_s, key=seconds)
    return min(chunk_tokens, max(MIN_CHUNK, num_fitting * CHUNK_MULTIPLE))


def _decodes_in_time(standing: Standing, entering: Entering[Key], budget: LatencyBudget) -> bool:
    """A decode step of all that hold pages, once they have come to that, with the one that enters. Alone it may."""
    if budget.tpot_s is None or not standing.num_running:
        return True
    size = StepSize(rows=standing.num_running, keys=standing.num_keys).with_row(entering.num_keys)
    return budget.cost.predict(size) <= budget.tpot_s


def _size_of_rows(snapshot: Snapshot[Key], rows: Iterable[Key]) -> StepSize:
    kv_lens = {request.key: request.kv_len for request in snapshot.decoding}
    num_keys = [kv_lens[key] + 1 for key in rows]
    return StepSize(rows=len(num_keys), keys=sum(num_keys))


def size_beside(size: StepSize, chunks: Iterable[Chunk[Key]]) -> StepSize:
    for chunk in chunks:
        size = size.with_chunk(chunk.begin, chunk.end)
    return size


# ---- who gets pages --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Given(Generic[Key]):
    rows: list[Key] = field(default_factory=list)
    grow: list[Key] = field(default_factory=list)
    preempt: list[Key] = field(default_factory=list)


def _give_pages(snapshot: Snapshot[Key]) -> _Given[Key]:
    """Pages from the front of the line, taken from its end when there are none: nobody gets a page and loses it."""
    given: _Given[Key] = _Given()
    available = snapshot.num_available
    holders: Counter[int] | None = None  # of each page; counted when somebody has to go, which is seldom
    line = _line(snapshot.decoding)
    while line:
        request = line.popleft()
        if not request.needs_page(snapshot.page_size):
            given.rows.append(request.key)
            continue
        while not available:
            if not line and not given.rows:
                return given  # the oldest, with nobody behind it: it waits
            leaver = line.pop() if line else request
            holders = holders or _holders(snapshot)
            given.preempt.append(leaver.key)
            available += _leave(leaver, holders)
            if leaver is request:
                return given
        available -= 1
        given.grow.append(request.key)
        given.rows.append(request.key)
    return given


def _line(decoding: Sequence[Decoding[Key]]) -> deque[Decoding[Key]]:
    line = deque(sorted(decoding, key=lambda request: rank(request.tier, request.order)))
    if line:
        oldest = min(line, key=lambda request: request.order)
        line.remove(oldest)
        line.appendleft(oldest)
    return line


def _holders(snapshot: Snapshot[Key]) -> Counter[int]:
    return Counter(chain(*(request.pages for request in snapshot.decoding), *snapshot.other_tables))


def _leave(leaver: Decoding[Key], holders: Counter[int]) -> int:
    """How many pages nobody holds any more when this one gives its pages back."""
    holders.subtract(leaver.pages)
    return sum(not holders[page] for page in leaver.pages)
