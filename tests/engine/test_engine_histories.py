"""Random histories of an engine on a small pool: requests come, are fetched or not, leave and fail at any moment.

A seed gives sizes and moves. Whatever happens, each request ends once, its text is the one that it generates alone
(what came of it before it was aborted or failed is the begin of that), the accounts agree after every move, and at the
end nothing is held.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from scripted_model import VOCABULARY, Answer, World, make_request, text_of

from headrace.engine.requests import EngineRequest, SamplingParams
from headrace.engine.step import Step

MOST_STEPS = 5000
"""To come to rest; a history takes about a hundred."""


@dataclass(slots=True)
class _Transfer:
    """What a messenger does with lent pages."""

    request: EngineRequest
    pages: tuple[int, ...]
    begin: int


class History:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        page_size = rng.choice([1, 2, 3, 4, 8])
        pool_tokens = rng.choice([24, 40, 80, 200])
        self.world = World(
            num_pages=pool_tokens // page_size,
            page_size=page_size,
            chunk_tokens=rng.choice([1, 5, 16, 100]),
            max_running=rng.choice([2, 6, 20]),
            samples=rng.random() < 0.5,
            # A step takes 1 s: some of these bounds let two requests run, some never more than one.
            tpot_s=rng.choice([None, None, 0.5, 1.1]),
            max_stall_s=rng.choice([None, None, 0.5, 1.1]),
        )
        self.engine, self.pool = self.world.engine, self.world.pool
        if rng.random() < 0.8:
            self.world.make_outputs_short()
        self.num_before = self.engine.statistics().num_finished
        self.fetches = rng.random() < 0.7
        self.requests: dict[str, EngineRequest] = {}  # admitted at some time
        self.outside: list[EngineRequest] = []  # as at a gateway
        self.admitted: list[str] = []
        self.parked: list[str] = []
        self.transfers: list[_Transfer] = []
        self.quarantined: list[tuple[int, ...]] = []
        self.running: Step | None = None
        self.stems = [[rng.randrange(VOCABULARY) for _ in range(60)] for _ in range(3)]

    def run(self, num_moves: int) -> None:
        moves = (
            (self.arrive, 5),
            (self.admit, 6),
            (self.decide, 8),
            (self.step, 40),
            (self.land, 5),
            (self.fail_fetch, 2),
            (self.readmit_pages, 3),
            (self.unpark, 4),
            (self.abort, 1),
            (self.fail_step, 0.3),
        )
        acts, weights = zip(*moves, strict=True)
        for act in self.rng.choices(acts, weights, k=num_moves):
            act()
            self.engine.check()
        self.come_to_rest()

    def come_to_rest(self) -> None:
        """Nobody comes and nobody leaves any more; what is under way ends."""
        for _ in range(MOST_STEPS):
            for act in (self.decide, self.land, self.readmit_pages, self.unpark, self.step):
                act()
            self.engine.check()
            if not self.engine.has_work and not (self.admitted or self.transfers or self.parked or self.running):
                return
        raise AssertionError(f"does not come to rest: {self.engine!r}")

    # ---- moves -------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        rng = self.rng
        most = self.pool.num_pages * self.world.page_size
        stem = rng.choice(self.stems)[: rng.randrange(most // 4)]
        token_ids = [*stem, *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6)))]
        request = make_request(
            f"{len(self.requests) + len(self.outside)}",
            token_ids,
            rng.randrange(1, max(2, min(60, most - len(token_ids)))),
            tier=rng.choice(["interactive", "interactive", "flex"]),
            stops=rng.sample(range(VOCABULARY), rng.choice([0, 0, 1, 5])),
            sampling=SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(4)),
        )
        self.engine.check_request(request)
        self.outside.append(request)

    def admit(self) -> None:
        for request in list(self.outside):
            before = repr(self.pool)
            admission = self.engine.try_admit(request)
            if admission is None:
                assert repr(self.pool) == before
                continue
            self.outside.remove(request)
            self.requests[request.request_id] = request
            self.admitted.append(request.request_id)

    def decide(self) -> None:
        while self.admitted:
            name = self.admitted.pop()
            pages = self.engine.pages_to_fetch(name)
            if not pages or not self.fetches or self.rng.random() < 0.3:
                self.engine.start(name)
                continue
            self.engine.fetch(name)
            self.pool.require_private(pages)
            request = self.requests[name]
            begin = (self.world.num_pages(len(request.token_ids) - 1) - len(pages)) * self.world.page_size
            self.transfers.append(_Transfer(request, pages, begin))

    def step(self) -> None:
        """One half of it: anything may happen while a step runs."""
        if self.running is None:
            self.running = self.engine.begin_step(self.world.now)
        else:
            with self.ended_step() as step:
                self.world.commit(step)

    def fail_step(self) -> None:
        if self.running is not None:
            with self.ended_step() as step:
                self.world.model.spoil_rows(step.rows)
                self.engine.fail_step(step, "the model raised")

    @contextmanager
    def ended_step(self) -> Iterator[Step]:
        assert self.running is not None
        yield self.running
        self.running = None

    def land(self) -> None:
        if self.transfers:
            transfer = self.transfers.pop(self.rng.randrange(len(self.transfers)))
            self.world.land(transfer.request, transfer.pages, transfer.begin, cached_len=transfer.begin)

    def fail_fetch(self) -> None:
        """A part has landed, the rest may still: the pages are quarantined before the engine hears of it."""
        if not self.transfers:
            return
        transfer = self.transfers.pop(self.rng.randrange(len(self.transfers)))
        self.pool.quarantine(transfer.pages)
        self.engine.check()
        self.quarantined.append(transfer.pages)
        name = transfer.request.request_id
        self.engine.fetch_failed(name)
        if not self.has_ended(name):
            self.parked.append(name)

    def readmit_pages(self) -> None:
        if self.quarantined:
            pages = self.quarantined.pop()
            self.world.model.spoil(pages)
            self.pool.readmit(pages)

    def unpark(self) -> None:
        if not self.parked:
            return
        name = self.parked.pop()
        if self.rng.random() < 0.5:
            self.engine.wait_for_room(name)
        elif self.engine.try_readmit(name) is not None:
            self.admitted.append(name)
        else:
            self.parked.append(name)

    def abort(self) -> None:
        """At any moment, also twice; its ticket is cancelled, and lands or fails in its own time."""
        if self.requests:
            name = self.rng.choice(list(self.requests))
            self.engine.abort(name)
            for names in (self.admitted, self.parked):
                if name in names:
                    names.remove(name)

    def has_ended(self, name: str) -> bool:
        self.world.take_outputs()
        return self.answer(name).done is not None

    # ---- what must hold ----------------------------------------------------------------------------------------

    def answer(self, name: str) -> Answer:
        return self.world.answers.setdefault(name, Answer([]))

    def check(self) -> None:
        self.world.take_outputs()
        assert set(self.world.answers) == set(self.requests)
        for name, request in self.requests.items():
            answer = self.answer(name)
            assert answer.done is not None, f"{name} was never answered"
            tokens, reason = text_of(request)
            if answer.done.reason in ("aborted", "failed"):
                assert answer.tokens == tokens[: len(answer.tokens)]
            else:
                assert (answer.tokens, answer.done.reason) == (tokens, reason)
        self.world.expect_empty()
        assert self.engine.statistics().num_finished == self.num_before + len(self.requests)


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_whatever_happens_every_text_is_right_and_nothing_leaks(first: int) -> None:
    for seed in range(first, first + 40):
        history = History(seed)
        history.run(200)
        history.check()


def test_the_histories_see_all_that_they_are_about() -> None:
    """Else they prove little: storms of preemption, hits, failed fetches, ends of each kind."""
    preemptions = hits = waits = 0
    reasons = set()
    for seed in range(120, 150):
        history = History(seed)
        history.run(200)
        history.check()
        statistics = history.engine.statistics()
        preemptions += statistics.num_preemptions
        hits += statistics.num_cached_tokens > 0
        waits += any(a.done and a.done.num_preemptions > 1 for a in history.world.answers.values())
        reasons |= {answer.done.reason for answer in history.world.answers.values() if answer.done}
    assert preemptions > 30 and hits > 15 and waits > 3
    assert reasons == {"stop", "length", "aborted", "failed"}


@pytest.mark.parametrize("samples", [False, True], ids=["decodes the last", "samples from prefill"])
def test_in_a_storm_of_preemptions_everybody_ends(samples: bool) -> None:
    """Eight requests of which two fit, in a pool that holds one of them whole."""
    world = World(num_pages=12, page_size=2, chunk_tokens=6, samples=samples)
    world.make_outputs_short()
    requests = [make_request(f"{number}", [number, 3 * number], 20) for number in range(8)]
    outside = list(requests)
    for _ in range(MOST_STEPS):
        while outside and world.engine.try_admit(outside[0]) is not None:
            world.engine.start(outside.pop(0).request_id)
        if world.step() is None:
            break
    for request in requests:
        world.expect_text(request)
    world.expect_empty()
    assert world.engine.statistics().num_preemptions > 4
