"""A simulated decoder or colocated instance: the engine's rules (`engine.schedule`) on counts, many steps at a time.

Nothing changes in a batch until a row ends, one needs pages beyond what it reserved, pages run out, a prompt is to be
computed, or something comes from outside: so many steps are one span (`spans`). What comes from outside cuts the span
behind the step that runs. `closed_form` False makes every span one step: slow, and the same.

    try_admit -> HELD -- start --> PREFILLING | READY --> DECODING --> ENDED
                   `-- fetched --> READY                    |
                                   WAITING <-- preempted ---'    back as by start, when there is room

Pages that rows need beyond their reservation (`growing`) are charged when somebody looks; when there are none,
`giving_way` tells who loses his.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from headrace.engine.cost import PrefillSpeed, StepSize
from headrace.engine.growth import OutputLengths
from headrace.engine.requests import Tier
from headrace.engine.schedule import (
    Chunk,
    Entering,
    LatencyBudget,
    Prefilling,
    Standing,
    chunks_beside,
    may_enter,
    size_beside,
)
from headrace.kvcache.reservation import num_reserved_pages
from headrace.planner.clock import Clock
from headrace.planner.giving_way import who_gives_way
from headrace.planner.growing import Growing
from headrace.planner.links import Way
from headrace.planner.outcome import Did
from headrace.planner.pages import Pages
from headrace.planner.requests import Request, State
from headrace.planner.scenario import Instance
from headrace.planner.spans import Log, Span, plan_span

STATUS_S = 0.5
"""A Status comes at each multiple of this: so old what a gateway knows of it may be."""


@dataclass(slots=True)
class Told:
    """In its last Status, and what its gateway knows to have placed there since."""

    at: float
    num_free_pages: int
    speed: PrefillSpeed
    num_rows: int
    num_keys: int


class Stands(NamedTuple):
    """What its gateway compares, the less the better; the first counts first. `num_before`: tokens that are computed
    before a prompt; `num_missing`, of that prompt less its length, is the gateway's to fill in; `slowness` and `step_s`
    of whoever computes prompts by choice; `num_full`: pages that it would have to give, less all."""

    num_running: int
    num_before: int
    num_missing: int
    slowness: float
    step_s: float
    num_full: int


class Decoder:
    """`on_room`: pages are free, or a row is; `on_end`: of a request, which has all its tokens."""

    def __init__(
        self,
        spec: Instance,
        clock: Clock,
        *,
        closed_form: bool,
        on_room: Callable[["Decoder"], None],
        on_end: Callable[[Request], None],
    ) -> None:
        self.spec = spec
        self.pages = Pages(spec.num_pages, spec.page_size)
        self.log = Log()
        self.way_in = Way()
        self.busy_s = 0.0
        self.num_computed = 0  # prompt tokens
        self.num_preemptions = 0
        self.is_down = False
        self.queued_tokens: dict[Tier, int] = {"interactive": 0, "flex": 0}
        self._computed: list[tuple[float, Tier, int]] = []  # of the last steps, when they were over
        self._clock = clock
        self._closed_form = closed_form
        self._on_room = on_room
        self._on_end = on_end
        self._samples = spec.role == "colocated"
        self.cost = spec.measured
        self._budget = (
            LatencyBudget(cost=self.cost, tpot_s=spec.tpot_s, max_stall_s=spec.max_stall_s)
            if spec.tpot_s is not None or spec.max_stall_s is not None
            else None
        )
        self._lengths = OutputLengths()
        self._num_arrived = 0
        self._num_rows_ever = 0
        self.on_change: Callable[[], None] = lambda: None  # of what `stands` tells
        self._lives = 0  # of events: those of a former one are void
        self._empty()
        self.told = self._tell()

    def _empty(self) -> None:
        self._rows: dict[Request, None] = {}
        self._num_keys = 0  # of the next step's rows
        self._others: dict[Request, None] = {}  # that hold pages and are no rows
        self._other_keys = 0
        self._ready: list[Request] = []
        self._fresh: list[Request] = []  # whose first row is in the span that runs
        self._prefilling: list[Request] = []
        self._waiting: list[Request] = []
        self._ends: list[tuple[int, int, Request]] = []  # step, row
        self._needs: list[tuple[int, int, Request]] = []
        self._growing = Growing(self.pages, self.log.num_steps)
        self._span: Span | None = None
        self._chunks: Sequence[Chunk[Request]] = ()
        self._stands: dict[Tier, Stands] = {}  # as long as nothing changes
        self.queued_tokens = {"interactive": 0, "flex": 0}
        self._computed = []

    # ---- coming in ---------------------------------------------------------------------------------------------

    def try_admit(self, request: Request) -> bool:
        """It holds pages now; `start` it, or have its prompt fetched. False: NoRoom."""
        if self.is_down:
            return False
        self._cut()
        request.order = self._num_arrived
        if self._waiting and self._waiting[0].rank < request.rank:
            return False
        if not self._try_enter(request):
            return False
        self._num_arrived += 1
        self._change()
        self.told.num_free_pages -= request.num_pages - request.hit_len // self.spec.page_size
        return True

    def _try_enter(self, request: Request) -> bool:
        num_known, page_size = request.num_known, self.spec.page_size
        growth = self._lengths.growth(request.tier, request.num_remaining)
        num_pages = num_reserved_pages(num_known, growth, page_size, num_pages=self.pages.total)
        entering = Entering(
            key=request, num_pages=num_pages - self.pages.num_held_of(request.prefix), num_keys=num_known
        )
        is_between = self._span is None
        standing = Standing(
            num_running=self.num_running,
            num_growing=self._growing.num_needed(1) if is_between else 0,
            num_available=self.pages.num_available,
            num_keys=self._num_keys + self._other_keys,
        )
        if not may_enter(standing, entering, max_running=self.spec.max_running, budget=self._budget):
            return False
        request.hit_len = request.computed = self.pages.hit_tokens(request.prefix, num_known)
        request.held = self.pages.pin(request.prefix)
        request.num_pages = num_pages
        self.pages.take(request.num_private)
        request.state = State.HELD
        self._others[request] = None
        self._other_keys += num_known
        self._change()
        return True

    def start(self, request: Request) -> None:
        """Compute here what its pages lack."""
        self._cut()
        self._start(request)
        self._begin()

    def _start(self, request: Request) -> None:
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        num_missing = request.num_known - 1 - request.computed
        if not num_missing:
            self._is_there(request)
            return
        request.state = State.PREFILLING
        self._change()
        self.queued_tokens[request.tier] += num_missing
        insort(self._prefilling, request, key=lambda one: one.rank)

    def landed(self, request: Request, cached_len: int) -> None:
        """Its prompt's KV is in its pages, of which nobody computed `cached_len` tokens for it."""
        request.computed = request.num_known - 1
        request.landed_at = self._clock.now if request.landed_at is None else request.landed_at
        request.cached_tokens = cached_len if request.cached_tokens is None else request.cached_tokens
        self._index(request)

    def hand_over(self, request: Request) -> None:
        """It may decode."""
        self._cut()
        self._is_there(request)
        self._begin()

    def _is_there(self, request: Request) -> None:
        if request.landed_at is None:
            now = self._clock.now
            request.begun_at = now if request.begun_at is None else request.begun_at
            request.computed_at = now if request.computed_at is None else request.computed_at
            request.landed_at = now
        request.state = State.READY
        self._ready.append(request)

    # ---- a span of steps ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._span is not None or self.is_down:
            return
        self._join_ready()
        self._note_needs()
        while self._waiting and self._try_enter(self._waiting[0]):
            first = self._waiting.pop(0)
            self.queued_tokens[first.tier] -= first.num_known - 1
            self._start(first)
        self._join_ready()
        if self._growing.num_needed(1) > self.pages.num_available:
            self._make_room()
        rows = StepSize(rows=len(self._rows), keys=self._num_keys)
        self._chunks = self._plan_chunks(rows) if self._prefilling else ()
        if self._chunks:
            took_s = self.spec.steps.step_s(size_beside(rows, self._chunks))
            self._run(Span(self._clock.now, took_s, 0.0, 1))
        elif self._rows:
            self._run(plan_span(self.spec.steps, rows, self._clock.now, self._most_steps()))

    def _run(self, span: Span) -> None:
        self._span = span
        self._lives += 1
        self._clock.at(span.ends_at, self._end, self._lives)

    def _cut(self) -> None:
        """Behind the step that runs. Its pages are taken."""
        span = self._span
        if span is None:
            return
        num_begun = span.num_begun(self._clock.now)
        if num_begun < span.num_steps:
            self._run(span.cut(num_begun))
        self._growing.charge(self.log.num_steps + num_begun)

    def _end(self, life: int) -> None:
        if life != self._lives or self._span is None:
            return
        span, self._span = self._span, None
        self._growing.charge(self.log.num_steps + span.num_steps)
        self._add(span)
        has_news = bool(self._chunks)
        self._commit_chunks()
        while self._ends and self._ends[0][0] <= self.log.num_steps:
            _, row, request = heappop(self._ends)
            if request in self._rows and request.row == row:
                self._finish(request)
                has_news = True
        self._begin()
        if has_news:
            self._on_room(self)

    def _add(self, span: Span) -> None:
        """It is over. All rows have a token of each step."""
        first_step = self.log.num_steps
        self.log.add(span)
        self.busy_s += span.ends_at - span.began_at
        self._num_keys += span.num_steps * len(self._rows)
        for request in self._fresh if span.num_steps else ():
            has_row = request in self._rows and request.joined == first_step  # it may have given way at once
            if has_row and request.first_at is None:
                request.decodes_at, request.first_at = span.began_at, span.end_of(1)
        self._fresh.clear()

    def _most_steps(self) -> int:
        """Until something changes by itself."""
        if not self._closed_form or self._waiting:
            return 1
        most = self._ends[0][0] - self.log.num_steps
        if self._needs:
            most = min(most, self._needs[0][0] - self.log.num_steps)
        if self._growing.num_needed(most) > self.pages.num_available:
            most = bisect_right(range(1, most + 1), self.pages.num_available, key=self._growing.num_needed)
        return most

    # ---- prompts -----------------------------------------------------------------------------------------------

    def _plan_chunks(self, rows: StepSize) -> list[Chunk[Request]]:
        tokens = self.spec.chunk_tokens
        first: list[Prefilling[Request]] = []
        for request in self._prefilling:  # a step has no room for more of them
            end = request.num_known if self._samples else request.num_known - 1
            first.append(
                Prefilling(key=request, tier=request.tier, order=request.order, computed=request.computed, end=end)
            )
            tokens -= end - request.computed
            if tokens <= 0:
                break
        chunks = chunks_beside(rows, first, chunk_tokens=self.spec.chunk_tokens, budget=self._budget)
        for chunk in chunks:
            if chunk.key.begun_at is None:
                chunk.key.begun_at = self._clock.now
        return chunks

    def _commit_chunks(self) -> None:
        chunks, self._chunks = self._chunks, ()
        if chunks:
            self._change()
        now = self._clock.now
        if self._computed and self._computed[0][0] <= now - STATUS_S:
            self._computed = [one for one in self._computed if one[0] > now - STATUS_S]
        for chunk in chunks:
            request = chunk.key
            self.num_computed += chunk.end - chunk.begin
            num_before = request.num_known - 1
            num_queued = min(chunk.end, num_before) - min(chunk.begin, num_before)
            self.queued_tokens[request.tier] -= num_queued
            self._computed.append((now, request.tier, num_queued))
            request.computed = chunk.end
            if chunk.end < num_before:
                continue
            self._prefilling.remove(request)
            self._index(request)
            request.computed_at = self._clock.now if request.computed_at is None else request.computed_at
            if chunk.end > num_before:
                request.first_at = self._clock.now if request.first_at is None else request.first_at
                self._join(request, self.log.num_steps - 1)
            else:  # of a colocated one too: its last token is a row
                self._is_there(request)

    # ---- rows --------------------------------------------------------------------------------------------------

    def _join_ready(self) -> None:
        for request in self._ready:
            self._join(request, self.log.num_steps)
        self._ready.clear()

    def _join(self, request: Request, step: int) -> None:
        """`step` draws its next token: the one that was just over, or the next."""
        del self._others[request]
        self._other_keys -= request.num_known
        request.state, request.grows = State.DECODING, False
        request.joined, request.known = step, request.num_known
        request.needs_from = step + request.num_pages * self.spec.page_size - (request.known - 1)
        self._rows[request] = None
        self._num_keys += request.known + self.log.num_steps - step
        self._fresh.append(request)
        end = step + request.num_remaining
        self._num_rows_ever += 1
        request.row = self._num_rows_ever
        heappush(self._ends, (end, request.row, request))
        if request.needs_from < end:
            heappush(self._needs, (request.needs_from, request.row, request))

    def _part(self, request: Request) -> None:
        """It has no row any more, and keeps its pages."""
        num_steps = self.log.num_steps - request.joined
        self._num_keys -= request.known + num_steps
        del self._rows[request]
        request.num_pages = self._num_pages(request)
        if request.grows:
            self._growing.remove(request.needs_from)
        request.grows = False
        request.generated += num_steps
        if num_steps:
            request.pieces.append((self.log, request.joined, self.log.num_steps))
            request.last_at = self.log.ended_at

    def _finish(self, request: Request) -> None:
        self._part(request)
        self._release(request)
        self._lengths.add(request.tier, request.generated)
        request.state = State.ENDED
        self._on_end(request)

    def _release(self, request: Request) -> None:
        """What of it is computed stays cached."""
        if request.generated:
            request.renew(self.spec.page_size)
            self._index(request)
        self.pages.release(request.held, request.num_private)
        self._change()
        self.told.num_free_pages += request.num_pages - request.hit_len // self.spec.page_size
        request.held, request.num_pages = {}, 0

    def _index(self, request: Request) -> None:
        request.held = self.pages.index(request.prefix, request.held)

    # ---- pages beyond what was reserved ------------------------------------------------------------------------

    def _note_needs(self) -> None:
        """Rows that need a page in the next step, and every `page_size` steps from then on."""
        while self._needs and self._needs[0][0] <= self.log.num_steps:
            step, row, request = heappop(self._needs)
            if request in self._rows and request.row == row:
                request.grows = True
                self._growing.add(step)

    def _num_pages(self, request: Request) -> int:
        """With those beyond its reservation that were charged."""
        return request.num_pages + (self._growing.num_taken(request.needs_from) if request.grows else 0)

    def _make_room(self) -> None:
        """Pages have run out."""
        given = who_gives_way(
            list(self._rows),
            self._others,
            num_available=self.pages.num_available,
            page_size=self.spec.page_size,
            kv_len=lambda row: row.known - 1 + self.log.num_steps - row.joined,
            num_pages=self._num_pages,
        )
        for request in given.preempt:
            self._preempt(request)
        for request in [request for request in self._rows if request not in given.stay]:
            self._part(request)  # the oldest, and no page for it
            self._others[request] = None
            self._other_keys += request.num_known
            request.state = State.READY
            self._ready.append(request)

    def _preempt(self, request: Request) -> None:
        self._part(request)
        self._release(request)
        request.state = State.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.queued_tokens[request.tier] += request.num_known - 1
        insort(self._waiting, request, key=lambda one: one.rank)

    # ---- failing -----------------------------------------------------------------------------------------------

    def die(self) -> list[Request]:
        """-> who was here. Tokens of steps that were over are out."""
        span, self._span = self._span, None
        if span is not None:
            self._add(span.cut(span.num_begun(self._clock.now) - 1))
        self._chunks = ()
        lost = [*self._rows, *self._others, *self._waiting]
        for request in list(self._rows):
            self._part(request)
        for request in lost:
            request.state = State.PLACING
            request.held, request.num_pages = {}, 0
        self.pages.clear()
        self._lives += 1
        self.is_down = True
        self._empty()
        self._change()
        return lost

    def revive(self) -> None:
        self.is_down = False
        self.told = self._tell()
        self._change()

    # ---- how it stands -----------------------------------------------------------------------------------------

    @property
    def computes(self) -> bool:
        """Prompts, by choice."""
        if self.spec.role == "colocated":
            return True
        return self.spec.prefills and (self.spec.knows_chunks or self.num_computed > 0)

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._others)

    def tell(self) -> Told:
        """Its last Status, as its gateway has it."""
        if self._clock.now - self.told.at >= STATUS_S:
            self._cut()
            self.told = self._tell()
            self._change()
        return self.told

    def told_queued(self, tier: Tier) -> int:
        """Prompt tokens that its gateway takes for queued: those of its last Status, and what was placed since."""
        since, queued = self.tell().at, self.queued_tokens[tier]
        for at, own, num in reversed(self._computed):
            if at <= since:
                break
            if own == tier:
                queued += num
        return queued

    def cached_tokens(self, request: Request) -> int:
        """Of its prompt. The pages that rows have taken by now may have been some of them."""
        span = self._span
        if span is not None and self._growing.num_needed(span.num_steps) > self.pages.num_free:
            self._cut()
        return self.pages.hit_tokens(request.prefix, request.num_known)

    def _change(self) -> None:
        self._stands.clear()
        self.on_change()

    def stands(self, tier: Tier) -> Stands:
        """To a request of this tier."""
        known = self._stands.get(tier)
        if known is None or self._clock.now - self.told.at >= STATUS_S:
            told = self.tell()
            interactive, background = self.told_queued("interactive"), self.told_queued("flex")
            in_the_way = min(background, self.spec.chunk_tokens) if tier == "interactive" else background
            before = interactive + in_the_way
            slowness, step_s = (-told.speed.rate, told.speed.step_s) if self.computes else (0.0, 0.0)
            known = Stands(self.num_running, before, 0, slowness, step_s, -told.num_free_pages)
            self._stands[tier] = known
        return known

    def _tell(self) -> Told:
        """Its speed beside the rows that decode, as the engine tells it."""
        span, num_rows, num_keys = self._span, len(self._rows), self._num_keys
        if span is not None:
            num_keys += (span.num_begun(self._clock.now) - 1) * num_rows
        budget = self._budget if num_rows else None
        speed = self.cost.prefill_speed(
            StepSize(rows=num_rows, keys=num_keys),
            chunk_tokens=self.spec.chunk_tokens,
            bound_s=None if budget is None else budget.step_s,
        )
        return Told(
            at=self._clock.now // STATUS_S * STATUS_S,
            num_free_pages=self.pages.num_available,
            speed=speed,
            num_rows=self.num_running,
            num_keys=num_keys + self._other_keys,
        )

    def did(self) -> Did:
        return Did(
            name=self.spec.name,
            role=self.spec.role,
            busy_s=self.busy_s,
            num_steps=self.log.num_steps,
            num_prefill_tokens=self.num_computed,
            num_preemptions=self.num_preemptions,
            num_evicted=self.pages.num_evicted,
            way_bytes=self.way_in.num_bytes,
            way_busy_s=self.way_in.busy_s,
        )
