"""A run that did not happen: arrivals at a deployment, and what came of each of them. Pure, the same every time.

The gateway of the simulation is here: who waits, who is placed, what is answered instead. The life of a request:

    arrives     refused where it could never run, where too many wait, or (with a budget) where it is predicted late
    in line     by tier, deadline and arrival, holding nothing, until a lease and pages are there       `placing`
    placed      prefilled elsewhere and sent (`prefilling`, `links`), or by whoever decodes it          `decoding`
    lost        its decoder died: in front of the line, with its tokens as prompt
    ended       once, in any case

What is left out: control messages take no time but `gateway_s`, so nobody asks an instance in vain for long; prompts
and outputs are of the lengths that the arrivals say; a prompt whose prefiller dies keeps its pages at its decoder.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from headrace.bench.workload import Arrival, ArrivalList
from headrace.engine.requests import TIERS, Tier
from headrace.gateway.admit import require_in_time
from headrace.gateway.budgets import Budget
from headrace.gateway.forecast import Ahead
from headrace.gateway.generation import BudgetExceeded
from headrace.gateway.options import DEFAULT_TIMINGS
from headrace.messenger.plan import PromptPages
from headrace.planner.clock import Clock
from headrace.planner.decoding import Decoder
from headrace.planner.outcome import Did, Simulation
from headrace.planner.pages import Prefix
from headrace.planner.placing import Placing, has_room, wanted_of
from headrace.planner.prefilling import Job, Prefiller
from headrace.planner.requests import Request, State
from headrace.planner.scenario import Failure, Scenario

Progress = Callable[[int, int], None]
"""Requests that have ended, of how many."""

PROGRESS_EVERY = 256
"""Requests."""


def simulate(
    scenario: Scenario,
    arrivals: ArrivalList,
    *,
    progress: Progress | None = None,
    closed_form: bool = True,
) -> Simulation:
    """Until all of them have ended. `closed_form` False goes step by step: slow, and the same."""
    run = _Run(scenario, arrivals, progress=progress, closed_form=closed_form)
    return run.whole()


class _Run:
    def __init__(
        self, scenario: Scenario, arrivals: ArrivalList, *, progress: Progress | None, closed_form: bool
    ) -> None:
        self._scenario = scenario
        self._arrivals = arrivals
        self._progress = progress
        self._page_size = scenario.instances[0].page_size
        self._clock = clock = Clock()
        self._decoders = {
            one.name: Decoder(one, clock, closed_form=closed_form, on_room=self._room_at_decoder, on_end=self._ended)
            for one in scenario.instances
            if one.decodes
        }
        self._prefillers = {
            one.name: Prefiller(one, scenario.kv, clock, self._room_at_prefiller)
            for one in scenario.instances
            if not one.decodes
        }
        self._placing = Placing(scenario, [*self._decoders.values()], [*self._prefillers.values()], clock)
        self._longest = min(one.num_pages * one.page_size for one in scenario.instances if one.decodes)
        self._line: dict[Tier, list[tuple[float, int, Request]]] = {tier: [] for tier in TIERS}
        self._waits_for_room: dict[Tier, bool] = dict.fromkeys(TIERS, False)
        self._jobs: dict[Request, tuple[Job, Prefiller]] = {}
        self._requests: list[Request] = []
        self._at: dict[Request, Decoder] = {}
        self._num_ended = 0

    def whole(self) -> Simulation:
        for failure in self._scenario.failures:
            self._clock.at(failure.at_s, self._fail, failure)
        self._set_next(0)
        while self._clock.step():
            pass
        for request in self._requests:
            if request.state is not State.ENDED:
                self._refuse(request, "nobody could take it")
        self._check_over()
        return Simulation(self._requests, self._did(), gateway_s=self._scenario.gateway_s, ended_at=self._clock.now)

    # ---- coming in ---------------------------------------------------------------------------------------------

    def _set_next(self, index: int) -> None:
        """One arrival at a time is in the clock's heap."""
        arrivals = self._arrivals.arrivals
        if index < len(arrivals):
            self._clock.at(arrivals[index].at_s + self._scenario.gateway_s, self._arrive, index)

    def _arrive(self, index: int) -> None:
        self._set_next(index + 1)
        request = self._new(index, self._arrivals.arrivals[index])
        reason = self._reason_to_refuse(request)
        if reason is not None:
            self._refuse(request, reason)
            return
        due = inf if self._scenario.ttft_s is None else request.arrival.at_s + self._scenario.ttft_s
        self._stand(request, due)

    def _new(self, index: int, arrival: Arrival) -> Request:
        block_tokens = self._arrivals.block_tokens
        prefix = Prefix(
            arrival,
            own=index,
            block_tokens=block_tokens,
            num_tokens=arrival.prompt_tokens,
            page_size=self._page_size,
        )
        request = Request(index=index, arrival=arrival, block_tokens=block_tokens, prefix=prefix)
        self._requests.append(request)
        return request

    def _reason_to_refuse(self, request: Request) -> str | None:
        scenario, arrival = self._scenario, request.arrival
        together = arrival.prompt_tokens + arrival.max_tokens
        if together > self._longest:
            return f"400: {together} tokens, of at most {self._longest}"
        num_queued = len(self._line[request.tier])
        if scenario.max_queued is not None and num_queued >= scenario.max_queued:
            return f"429: {num_queued} requests wait already"
        if scenario.ttft_s is None:
            return None
        try:
            budget = Budget(ttft_s=scenario.ttft_s)
            require_in_time(self._placing.fleet(request), wanted_of(request), budget, self._ahead(request))
        except BudgetExceeded as error:
            return f"429: {error}"
        return None

    def _ahead(self, request: Request) -> Ahead:
        tiers: tuple[Tier, ...] = TIERS if request.tier == "flex" else ("interactive",)
        before = [other for tier in tiers for _, _, other in self._line[tier]]
        return Ahead(num_requests=len(before), num_tokens=sum(other.num_known - 1 for other in before))

    def _refuse(self, request: Request, reason: str) -> None:
        request.error = reason
        self._ended(request)

    def _ended(self, request: Request) -> None:
        assert request.state is not State.ENDED or request.error is None, f"request {request.index} ends twice"
        request.state = State.ENDED
        self._at.pop(request, None)
        self._num_ended += 1
        if self._progress is not None and (
            self._num_ended % PROGRESS_EVERY == 0 or self._num_ended == len(self._arrivals.arrivals)
        ):
            self._progress(self._num_ended, len(self._arrivals.arrivals))

    # ---- the line ----------------------------------------------------------------------------------------------

    def _stand(self, request: Request, due: float) -> None:
        line = self._line[request.tier]
        heappush(line, (due, request.index, request))
        if line[0][2] is request:
            self._place_heads()

    def _place_heads(self) -> None:
        """Background work does not take what an interactive request waits for."""
        for tier in TIERS:
            line = self._line[tier]
            self._waits_for_room[tier] = False
            while line and self._try_place(line[0][2]):
                heappop(line)
            if self._waits_for_room[tier]:
                return

    def _room_at_decoder(self, decoder: Decoder) -> None:
        """Whoever waits may go there."""
        for tier in TIERS:
            if self._line[tier]:
                if not self._waits_for_room[tier] or has_room(decoder, wanted_of(self._line[tier][0][2])):
                    self._place_heads()
                return

    def _room_at_prefiller(self) -> None:
        if any(self._line.values()):
            self._place_heads()

    def _try_place(self, request: Request) -> bool:
        full: list[int] = []
        while True:
            found = self._placing.choose(request, full)
            if found is None or found[0] in full:
                self._waits_for_room[request.tier] = True
                return False
            nth, chosen = found
            decoder = self._decoders[chosen.decoder]
            if chosen.prefiller is None:
                if decoder.try_admit(request):
                    self._take(request, decoder)
                    decoder.start(request)
                    return True
            else:
                prefiller = self._prefillers[chosen.prefiller]
                lease = prefiller.try_lease(request)
                if lease is None:
                    self._waits_for_room[request.tier] = self._scenario.ttft_s is not None
                    return False
                if decoder.try_admit(request):
                    self._take(request, decoder)
                    self._have_prefilled(request, decoder, prefiller, lease)
                    return True
                prefiller.leases.end(lease)
            full.append(nth)

    def _take(self, request: Request, decoder: Decoder) -> None:
        request.attempt += 1
        request.placed_at = self._clock.now if request.placed_at is None else request.placed_at
        self._at[request] = decoder

    # ---- prompts that are computed elsewhere -------------------------------------------------------------------

    def _have_prefilled(self, request: Request, decoder: Decoder, prefiller: Prefiller, lease: str) -> None:
        travels = PromptPages(
            num_tokens=request.num_known, cached_len=request.hit_len, page_size=decoder.spec.page_size
        )
        if not travels.num_sent:
            prefiller.leases.end(lease)
            decoder.start(request)
            return
        job = Job(
            request=request,
            attempt=request.attempt,
            lease=lease,
            travels=travels,
            way_in=decoder.way_in,
            link=self._scenario.network.between(prefiller.spec, decoder.spec),
            on_landed=self._landed,
        )
        self._jobs[request] = job, prefiller
        prefiller.add(job)

    def _landed(self, job: Job) -> None:
        request = job.request
        del self._jobs[request]
        if request.attempt != job.attempt:
            return  # its decoder is no more
        self._at[request].landed(request, max(request.hit_len, job.hit_len))
        self._clock.at(self._clock.now + self._scenario.hand_over_s, self._hand_over, (request, request.attempt))

    def _hand_over(self, given: tuple[Request, int]) -> None:
        request, attempt = given
        if request.attempt == attempt and request.state is State.HELD:
            self._at[request].hand_over(request)

    # ---- failures ----------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        noticed_at = self._clock.now + failure.noticed_s
        self._clock.at(self._clock.now + failure.down_s, self._revive, failure.instance)
        if failure.instance in self._prefillers:
            jobs = self._prefillers[failure.instance].die()
            self._clock.at(noticed_at, self._prefill_anew, [(job, job.request.attempt) for job in jobs])
            return
        requests = self._decoders[failure.instance].die()
        for request in requests:
            request.attempt += 1
        self._clock.at(noticed_at, self._resume, requests)

    def _revive(self, name: str) -> None:
        instance = self._prefillers.get(name) or self._decoders[name]
        instance.revive()
        self._place_heads()

    def _prefill_anew(self, jobs: Sequence[tuple[Job, int]]) -> None:
        """By another prefiller that grants a lease at once, or by the decoder."""
        for job, attempt in jobs:
            request = job.request
            if request.attempt != attempt or request not in self._at:
                continue
            decoder = self._at[request]
            chosen = self._placing.choose_prefiller(decoder, request)
            lease = None if chosen is None else self._prefillers[chosen].try_lease(request)
            if chosen is None or lease is None:
                del self._jobs[request]
                decoder.start(request)
            else:
                self._have_prefilled(request, decoder, self._prefillers[chosen], lease)

    def _resume(self, requests: Sequence[Request]) -> None:
        for request in requests:
            job, prefiller = self._jobs.pop(request, (None, None))
            if job is not None and prefiller is not None:
                prefiller.drop(job)
            self._at.pop(request, None)
            request.num_lost += 1
            if request.num_lost > DEFAULT_TIMINGS.max_resumes:
                self._refuse(request, f"given up after {request.num_lost} attempts")
                continue
            request.renew(self._page_size)
            self._stand(request, -inf)

    # ---- when all is over ------------------------------------------------------------------------------------

    def _check_over(self) -> None:
        """Each has ended once, and nothing is held anywhere."""
        assert self._num_ended == len(self._requests) == len(self._arrivals.arrivals), "not all have ended once"
        assert not self._jobs and not self._at, f"{len(self._jobs)} jobs and {len(self._at)} requests are left"
        for one in self._decoders.values():
            assert not one.pages.num_held and not one.num_running, f"{one.spec.name}: {one.pages!r}"
        for prefiller in self._prefillers.values():
            held, leased = prefiller.pages.num_held, prefiller.leases.outstanding_tokens
            assert not held and not leased, f"{prefiller.spec.name}: {prefiller.pages!r}, {leased} tokens leased"

    def _did(self) -> list[Did]:
        did = {one.spec.name: one.did() for one in self._decoders.values()}
        did |= {one.spec.name: one.did() for one in self._prefillers.values()}
        return [did[spec.name] for spec in self._scenario.instances]
