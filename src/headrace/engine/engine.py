"""The engine: requests, the pages that they hold, and the steps that compute them. DESIGN 6, PROTOCOL "Growth".

Owns the request table and, with the messenger that runs on the same loop, the page pool. Knows no fabric, no peers and
no clock (`now` is passed in), and runs no model: between `begin_step` and `commit_step` somebody else does, on another
thread, while this loop goes on admitting, fetching and aborting. The life of a request, from `try_admit`:

    ADMITTED     holds its pages        start -> PREFILLING (DECODING where only its last token is not cached)
                                        fetch -> FETCHING
    FETCHING     some of them are lent  fetched -> DECODING; fetch_failed -> PARKED
    PARKED       holds nothing          try_readmit -> ADMITTED; wait_for_room -> WAITING
    WAITING      holds nothing          begin_step, when there are pages for it -> as by start
    PREFILLING   a chunk now and then   commit_step of its last chunk -> DECODING
    DECODING     a row in each step     begin_step, when others need its pages -> WAITING; its last token ends it

`abort` ends it anywhere, and a failed step ends all that are in it. Each ends with one RequestDone.

The turn of a role is `step = begin_step(now)`; run its rows; `commit_step(step, tokens, now)`; `drain_outputs()`. When
there is no step, there may be one after any other call, or when pages come back to the pool.

While a request is being fetched, its pages `pages_to_fetch` are lent. A ticket ends in one of two ways, and the engine
is told which, also when the request was aborted meanwhile: `fetched`, and they are the request's again; or
`fetch_failed`, and they are the ticket's, which frees them when that is safe.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.cost import PrefillSpeed, StepSize
from headrace.engine.entries import HOLDING, Entry, State
from headrace.engine.growth import OutputLengths
from headrace.engine.holdings import Holdings
from headrace.engine.measured_cost import MeasuredCost
from headrace.engine.requests import (
    Admission,
    DoneReason,
    EngineOptions,
    EngineOutput,
    EngineRequest,
    EngineStatistics,
    FirstStep,
    NewToken,
)
from headrace.engine.schedule import LatencyBudget, StepPlan, next_to_enter, schedule
from headrace.engine.step import Step
from headrace.engine.table import RequestTable
from headrace.errors import InputError
from headrace.kvcache.pages import PagePool


@dataclass(frozen=True, slots=True)
class _Running:
    step: Step
    entries: tuple[Entry, ...]  # of its rows
    size: StepSize
    bound_s: float | None  # that it was planned with


class Engine:
    """`salt` keys the prefix hashes: the same that a messenger on this pool uses, the model's fingerprint. `costs` may
    have been told of steps before; from now on it is told of each step that is committed."""

    def __init__(
        self,
        *,
        pages: PagePool,
        options: EngineOptions,
        salt: bytes,
        vocab_size: int,
        costs: MeasuredCost | None = None,
    ) -> None:
        self._options = options
        self._costs = MeasuredCost() if costs is None else costs
        self._vocab_size = vocab_size
        self._lengths = OutputLengths()
        self._holdings = Holdings(pages, page_size=options.page_size, salt=salt, lengths=self._lengths)
        self._table = RequestTable(self._holdings, options)
        self._running: _Running | None = None
        self._outputs: list[EngineOutput] = []
        self._num_arrived = 0
        self._counts: Counter[str] = Counter()

    # ---- coming in ---------------------------------------------------------------------------------------------

    def check_request(self, request: EngineRequest) -> None:
        """Raises InputError for what can never run here."""
        num_tokens = len(request.token_ids)
        limits = {"max_model_len": self._options.max_model_len, "the KV pool": self._holdings.num_pool_tokens}
        for name, limit in limits.items():
            if num_tokens + request.max_tokens > limit:
                together = f"{num_tokens} + {request.max_tokens}"
                raise InputError(
                    "max_tokens", f"with the prompt must be at most {limit} tokens ({name}), are {together}"
                )
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self._vocab_size:
            raise InputError("token_ids", f"must be in 0..{self._vocab_size - 1}")

    def try_admit(self, request: EngineRequest) -> Admission | None:
        """Reserve its pages; then `start` or `fetch` it. None when there is no room, or when a request of the same or
        an earlier tier waits for some. Raises InputError as `check_request` does, and for an id that is in use."""
        self.check_request(request)
        if request.request_id in self._table:
            raise InputError("request_id", f"must be new, {request.request_id!r} is in use")
        entry = Entry(
            request=request,
            order=self._num_arrived,
            token_ids=list(request.token_ids),
            hashes=self._holdings.hashes(request.token_ids[:-1]),
        )
        if not self._try_enter(entry):
            return None
        self._num_arrived += 1
        self._table.add(entry)
        return entry.admission()

    def try_readmit(self, request_id: str) -> Admission | None:
        """The same for a parked one, which keeps its place by arrival. None leaves it parked."""
        entry = self._table.require(request_id, State.PARKED)
        return entry.admission() if self._try_enter(entry) else None

    def start(self, request_id: str) -> None:
        """Compute here what the admitted request's pages lack."""
        self._start(self._table.require(request_id, State.ADMITTED))

    def pages_to_fetch(self, request_id: str) -> tuple[int, ...]:
        """The pages of positions [h, n-1) of an admitted request; none when all but its last token is cached."""
        entry = self._table.require(request_id, State.ADMITTED)
        return entry.pages[entry.lent(self._options.page_size)]

    def fetch(self, request_id: str) -> None:
        """The admitted request's `pages_to_fetch` are lent: their KV comes from elsewhere."""
        entry = self._table.require(request_id, State.ADMITTED)
        assert entry.hit_len < entry.num_before_decode, f"nothing to fetch for {request_id!r}"
        entry.state = State.FETCHING

    def fetched(self, request_id: str, cached_len: int) -> None:
        """The KV of [h, n-1) is in the pages that were lent, and whoever brought it has indexed them: the request
        decodes. `cached_len` tokens of its prompt nobody computed for it."""
        lent = self._table.pop_lent(request_id)
        if lent is not None:
            self._holdings.release_lent(lent)
            return
        entry = self._table.require(request_id, State.FETCHING)
        assert 0 <= cached_len <= entry.num_before_decode, f"{cached_len} of {entry.num_before_decode} tokens cached"
        entry.computed = entry.num_before_decode
        entry.state = State.DECODING
        self._note_cached(entry, cached_len)

    def fetch_failed(self, request_id: str) -> None:
        """The pages that were lent are not ours any more. The request holds nothing and is parked, until it is
        readmitted, waits for room, or is aborted."""
        if self._table.pop_lent(request_id) is not None:
            return
        entry = self._table.require(request_id, State.FETCHING)
        self._holdings.part(entry)
        entry.state = State.PARKED

    def wait_for_room(self, request_id: str) -> None:
        """Nobody will fetch the parked request: it is computed here once there are pages for it, before any of its
        tier that is not admitted yet."""
        self._table.require(request_id, State.PARKED).state = State.WAITING

    def abort(self, request_id: str) -> None:
        """Nobody wants it any more. Idempotent. What a running step reads is given back at the end of that step."""
        entry = self._table.get(request_id)
        if entry is not None and entry.state is not State.ENDED:
            self._end(entry, "aborted")

    # ---- a step ------------------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> Step | None:
        """Plan the next step and take its pages; None when nothing can run. At most one step runs at a time."""
        assert self._running is None, f"step {self._counts['steps']} is running"
        self._restart_waiting()
        budget = self._budget()
        plan = schedule(self._table.snapshot(), chunk_tokens=self._options.chunk_tokens, budget=budget)
        if plan is None:
            return None
        self._move_pages(plan)
        spans = [(entry, entry.computed, entry.computed + 1) for entry in plan.rows]
        spans += [(chunk.key, chunk.begin, chunk.end) for chunk in plan.chunks]
        if not spans:
            return None
        self._counts["steps"] += 1
        rows = tuple(entry.row(begin, end) for entry, begin, end in spans)
        step = Step(number=self._counts["steps"], began_at=now, rows=rows, size=plan.size)
        bound_s = budget.step_s if budget is not None and plan.rows else None
        self._running = _Running(step, tuple(entry for entry, _, _ in spans), plan.size, bound_s)
        for entry in self._running.entries:
            entry.in_step = True
        return step

    def commit_step(self, step: Step, tokens: Sequence[int], now: float) -> None:
        """The step's KV is in its pages; `tokens` are those of its rows that draw one."""
        assert len(tokens) == step.num_draws, f"{len(tokens)} tokens for {step.num_draws} draws"
        drawn = iter(tokens)
        ended = self._end_step(step)
        self._costs.observe(ended.size, now - step.began_at, ended.bound_s)
        for entry, row in zip(ended.entries, step.rows, strict=True):
            token = next(drawn) if row.draw is not None else None
            if entry.state is State.ENDED:
                self._leave(entry)
                continue
            self._advance(entry, row.row.begin + len(row.row.token_ids))
            if token is not None:
                self._accept(entry, token, step, now)
            if entry.state is State.PREFILLING and entry.computed == entry.num_before_decode:
                entry.state = State.DECODING

    def fail_step(self, step: Step, text: str) -> None:
        """The step raised: every request in it ends, the others go on."""
        for entry in self._end_step(step).entries:
            if entry.state is State.ENDED:
                self._leave(entry)
            else:
                self._end(entry, "failed", text)

    def drain_outputs(self) -> list[EngineOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _end_step(self, step: Step) -> _Running:
        assert self._running is not None and self._running.step is step, f"step {step.number} is not running"
        ended, self._running = self._running, None
        for entry in ended.entries:
            entry.in_step = False
        return ended

    def _budget(self) -> LatencyBudget | None:
        """None where there is none, or nothing is known of what steps cost."""
        options, cost = self._options, self._costs.cost
        if cost is None or (options.tpot_s is None and options.max_stall_s is None):
            return None
        return LatencyBudget(
            cost=cost, tpot_s=options.tpot_s, max_stall_s=options.max_stall_s, margin=self._costs.margin
        )

    # ---- carrying out ------------------------------------------------------------------------------------------

    def _try_enter(self, entry: Entry) -> bool:
        first = self._table.first_waiting()
        if first is not None and first.rank < entry.rank:
            return False
        snapshot = self._table.snapshot(entry)
        if next_to_enter(snapshot, max_running=self._options.max_running, budget=self._budget()) is None:
            return False
        self._holdings.reserve(entry)
        entry.state = State.ADMITTED
        return True

    def _restart_waiting(self) -> None:
        while (first := self._table.first_waiting()) is not None and self._try_enter(first):
            self._start(first)

    def _start(self, entry: Entry) -> None:
        is_computed = entry.computed == entry.num_before_decode
        entry.state = State.DECODING if is_computed else State.PREFILLING
        self._note_cached(entry, entry.hit_len)

    def _note_cached(self, entry: Entry, cached_len: int) -> None:
        """Of the first start: what a preempted request finds of its own pages nobody saved."""
        if entry.cached_len is None:
            entry.cached_len = cached_len
            self._counts["cached"] += cached_len

    def _move_pages(self, plan: StepPlan[Entry]) -> None:
        for entry in plan.preempt:
            self._holdings.index(entry, 0, entry.computed)
            self._holdings.release(entry)
            entry.state = State.WAITING
            entry.num_preemptions += 1
            self._counts["preemptions"] += 1
        self._holdings.grow(plan.grow)

    def _advance(self, entry: Entry, computed: int) -> None:
        if entry.state is State.PREFILLING:
            self._counts["prefilled"] += computed - entry.computed
            # Never beyond n-1: the page of the last known token is a tail page, whoever computes that token.
            self._holdings.index(entry, entry.computed, min(computed, entry.num_before_decode))
        entry.computed = computed

    def _accept(self, entry: Entry, token: int, step: Step, now: float) -> None:
        assert 0 <= token < self._vocab_size, f"token {token} of {self._vocab_size}"
        request_id, index = entry.request.request_id, entry.num_generated
        entry.token_ids.append(token)
        self._counts["decoded"] += 1
        if index == 0:
            first = FirstStep(
                request_id=request_id,
                began_at=step.began_at,
                step_s=now - step.began_at,
                cached_len=entry.cached_len or 0,
            )
            self._outputs.append(first)
        if token in entry.request.stop_token_ids:
            self._end(entry, "stop")
            return
        self._outputs.append(NewToken(request_id=request_id, index=index, token_id=token))
        if not entry.num_remaining:
            self._end(entry, "length")

    def _end(self, entry: Entry, reason: DoneReason, text: str = "") -> None:
        """The request's one answer; its pages are given back when no step runs with them."""
        self._outputs.append(entry.done(reason, text))
        self._counts["finished"] += 1
        if entry.num_generated and reason != "failed":
            self._lengths.add(entry.request.tier, entry.num_generated)
        if entry.is_fetching:
            self._table.keep_lent(entry.request.request_id, self._holdings.part(entry))
        # What a failed step left behind, or read, is not to be hit; what was indexed before is.
        if reason != "failed":
            self._holdings.index(entry, 0, entry.computed)
        entry.state = State.ENDED
        if not entry.in_step:
            self._leave(entry)

    def _leave(self, entry: Entry) -> None:
        self._holdings.release(entry)
        self._table.remove(entry)

    # ---- state shows itself ------------------------------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        """Whether it is here, or has ended and pages of it are still lent."""
        return request_id in self._table

    @property
    def has_work(self) -> bool:
        """Whether something is to be computed here; it may have to wait for pages."""
        return self._table.num(State.PREFILLING, State.DECODING, State.WAITING) > 0

    @property
    def num_free_pages(self) -> int:
        """Free, or cached and evicted when they are needed."""
        return self._holdings.num_available

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return self._table.num(*HOLDING)

    @property
    def costs(self) -> MeasuredCost:
        """What its steps cost."""
        return self._costs

    @property
    def prefill_speed(self) -> PrefillSpeed | None:
        """Of one more prompt, in chunks beside the rows that decode now, within the budget. None while no chunk was
        measured."""
        if (cost := self._costs.cost) is None or not cost.knows_chunks:
            return None
        rows = self._size_of(State.DECODING)
        budget = self._budget() if rows.rows else None
        bound_s = None if budget is None or budget.step_s is None else budget.step_s / budget.margin
        return cost.prefill_speed(rows, chunk_tokens=self._options.chunk_tokens, bound_s=bound_s)

    @property
    def decode_size(self) -> StepSize:
        """Of a decode step of all that hold pages, once they have come to that."""
        return self._size_of(*HOLDING)

    def _size_of(self, *states: State) -> StepSize:
        entries = self._table.of(*states)
        return StepSize(rows=len(entries), keys=sum(len(entry.token_ids) for entry in entries))

    def statistics(self) -> EngineStatistics:
        to_compute = self._table.of(State.PREFILLING, State.WAITING)
        return EngineStatistics(
            num_admitted=self._table.num(State.ADMITTED),
            num_fetching=self._table.num(State.FETCHING),
            num_prefilling=self._table.num(State.PREFILLING),
            num_decoding=self._table.num(State.DECODING),
            num_parked=self._table.num(State.PARKED),
            num_waiting=self._table.num(State.WAITING),
            num_waiting_tokens=sum(entry.num_before_decode - entry.computed for entry in to_compute),
            num_interactive_tokens=sum(
                entry.num_before_decode - entry.computed for entry in to_compute if entry.request.tier == "interactive"
            ),
            num_interactive=sum(entry.request.tier == "interactive" for entry in self._table.of(*HOLDING)),
            num_steps=self._counts["steps"],
            num_prefill_tokens=self._counts["prefilled"],
            num_decode_tokens=self._counts["decoded"],
            num_cached_tokens=self._counts["cached"],
            num_preemptions=self._counts["preemptions"],
            num_finished=self._counts["finished"],
        )

    def check(self) -> None:
        """Assert that states and pages agree, and that what the pool says is held is what is in the table."""
        self._table.check(self._running.entries if self._running else ())

    def __repr__(self) -> str:
        return f"Engine({self._table!r}, step {self._counts['steps']}, {self._holdings!r})"
