"""A model whose next token is a sum over the whole prefix, so that whole histories run in milliseconds and one wrong
slot anywhere changes the text. And an engine with such a model, run step by step.

The "KV" of a token is one integer made of token and position; the next token is made of those of all positions, and of
seed, choice and position where it is drawn. Each slot is checked when it is written (held once, in no index) and read.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.engine import Engine
from headrace.engine.growth import FEWEST
from headrace.engine.measured_cost import MeasuredCost
from headrace.engine.requests import (
    TIERS,
    EngineOptions,
    EngineRequest,
    FirstStep,
    NewToken,
    RequestDone,
    SamplingParams,
    Tier,
)
from headrace.engine.step import Draw, Step, StepRow
from headrace.kvcache.layout import num_pages_for
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import PrefixIndex, page_hashes
from headrace.model.batch import Batch

VOCABULARY = 97
SALT = b"scripted"
_POISON = -(2**60)


def kv_of(token_ids: Sequence[int], begin: int) -> NDArray[np.int64]:
    positions = np.arange(begin, begin + len(token_ids), dtype=np.int64)
    return (np.asarray(token_ids, dtype=np.int64) * 1_000_003 + positions * 7919 + 17) % 65_521


def token_after(kv: NDArray[np.int64], draw: Draw) -> int:
    total = int((kv * (2 * np.arange(len(kv)) + 1)).sum())
    if draw.sampling.temperature:
        total += draw.sampling.seed * 31 + draw.sampling.choice * 37 + draw.position * 41
    return (total ^ (total >> 11)) % VOCABULARY


def text_of(request: EngineRequest) -> tuple[list[int], str]:
    """What one request alone, never preempted, generates: tokens without the stop token, and why it ended."""
    known = list(request.token_ids)
    for _ in range(request.max_tokens):
        token = token_after(kv_of(known, 0), Draw(sampling=request.sampling, position=len(known)))
        if token in request.stop_token_ids:
            return known[len(request.token_ids) :], "stop"
        known.append(token)
    return known[len(request.token_ids) :], "length"


class ScriptedModel:
    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.kv = np.full(pool.num_pages * page_size, _POISON, dtype=np.int64)

    def slots(self, pages: Sequence[int], begin: int, end: int) -> NDArray[np.int64]:
        at = np.arange(begin, end)
        return np.asarray(pages, dtype=np.int64)[at // self.page_size] * self.page_size + at % self.page_size

    def run(self, rows: Iterable[StepRow]) -> list[int]:
        rows = list(rows)
        batch = Batch.of(
            [row.row for row in rows],
            page_size=self.page_size,
            num_pages=self.pool.num_pages,
            vocab_size=VOCABULARY,
        )
        assert len(set(batch.slots.tolist())) == batch.num_tokens, "two rows write one slot"
        self.pool.require_private(sorted({int(slot) // self.page_size for slot in batch.slots}))
        for row in (step_row.row for step_row in rows):
            end = row.begin + len(row.token_ids)
            self.kv[self.slots(row.page_table, row.begin, end)] = kv_of(row.token_ids, row.begin)
        return [self._token(row, row.draw) for row in rows if row.draw is not None]

    def _token(self, row: StepRow, draw: Draw) -> int:
        end = row.row.begin + len(row.row.token_ids)
        assert draw.position == end
        return token_after(self.kv[self.slots(row.row.page_table, 0, end)], draw)

    def fill(self, pages: Sequence[int], token_ids: Sequence[int], begin: int) -> None:
        """As a transfer would: positions [begin, n-1), into pages that begin there."""
        end = len(token_ids) - 1
        self.kv[self.slots(pages, 0, end - begin)] = kv_of(token_ids[begin:end], begin)

    def spoil_rows(self, rows: Iterable[StepRow]) -> None:
        """As a step that raised in the middle would."""
        for row in (step_row.row for step_row in rows):
            self.kv[self.slots(row.page_table, row.begin, row.begin + len(row.token_ids))] = _POISON

    def spoil(self, pages: Sequence[int]) -> None:
        """As a late write would."""
        for page in pages:
            self.kv[page * self.page_size : (page + 1) * self.page_size] = _POISON


def make_request(
    name: str,
    token_ids: Sequence[int],
    max_tokens: int = 4,
    *,
    tier: Tier = "interactive",
    stops: Iterable[int] = (),
    sampling: SamplingParams | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=tuple(token_ids),
        max_tokens=max_tokens,
        sampling=sampling or SamplingParams(),
        stop_token_ids=frozenset(stops),
        tier=tier,
    )


@dataclass(slots=True)
class Answer:
    tokens: list[int]
    first: FirstStep | None = None
    done: RequestDone | None = None


class World:
    """One engine on a small pool. Time is moved by one second a step, or by what `step_s` says of its rows."""

    def __init__(
        self,
        *,
        num_pages: int = 16,
        page_size: int = 4,
        chunk_tokens: int = 8,
        max_running: int = 8,
        max_model_len: int = 1000,
        samples: bool = False,
        tpot_s: float | None = None,
        max_stall_s: float | None = None,
        costs: MeasuredCost | None = None,
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages, PrefixIndex())
        self.model = ScriptedModel(self.pool, page_size)
        options = EngineOptions(
            page_size=page_size,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            max_model_len=max_model_len,
            sample_from_prefill=samples,
            tpot_s=tpot_s,
            max_stall_s=max_stall_s,
        )
        self.engine = Engine(pages=self.pool, options=options, salt=SALT, vocab_size=VOCABULARY, costs=costs)
        self.step_s: Callable[[Sequence[StepRow]], float] = lambda rows: 1.0
        self.answers: dict[str, Answer] = {}
        self.now = 0.0

    def start(self, request: EngineRequest) -> None:
        assert self.engine.try_admit(request) is not None
        self.engine.start(request.request_id)

    def make_outputs_short(self) -> None:
        """From now on one page of growth is reserved, if that."""
        for number in range(FEWEST):
            for tier in TIERS:
                self.start(make_request(f"short {tier} {number}", [number, number], 1, tier=tier))
                self.run()
        self.answers.clear()

    def begin(self) -> Step | None:
        step = self.engine.begin_step(self.now)
        self.engine.check()
        return step

    def commit(self, step: Step) -> None:
        tokens = self.model.run(step.rows)
        self.now += self.step_s(step.rows)
        self.engine.commit_step(step, tokens, self.now)
        self.engine.check()
        self.take_outputs()

    def step(self) -> Step | None:
        step = self.begin()
        if step is not None:
            self.commit(step)
        return step

    def run(self, most_steps: int = 1000) -> None:
        """Until nothing can run."""
        for _ in range(most_steps):
            if self.step() is None:
                return
        raise AssertionError(f"still busy after {most_steps} steps: {self.engine!r}")

    def take_outputs(self) -> None:
        """In order, once each, one end."""
        for output in self.engine.drain_outputs():
            answer = self.answers.setdefault(output.request_id, Answer([]))
            assert answer.done is None, f"an output after the end: {output}"
            match output:
                case NewToken():
                    assert output.index == len(answer.tokens)
                    answer.tokens.append(output.token_id)
                case FirstStep():
                    assert answer.first is None and not answer.tokens
                    answer.first = output
                case RequestDone():
                    answer.done = output

    def expect_text(self, request: EngineRequest) -> None:
        tokens, reason = text_of(request)
        answer = self.answers[request.request_id]
        assert answer.done is not None, f"{request.request_id} has not ended"
        assert (answer.tokens, answer.done.reason) == (tokens, reason)
        assert answer.done.num_tokens == len(tokens) + (reason == "stop")

    def fetch(self, request: EngineRequest) -> tuple[int, ...]:
        """Admit it and lend its pages."""
        assert self.engine.try_admit(request) is not None
        pages = self.engine.pages_to_fetch(request.request_id)
        self.pool.require_private(pages)
        self.engine.fetch(request.request_id)
        return pages

    def land(self, request: EngineRequest, pages: Sequence[int], begin: int, cached_len: int = 0) -> None:
        """The messenger's part of a fetch that succeeds: bytes, then the index, then the word."""
        self.model.fill(pages, request.token_ids, begin)
        self.index(request, pages, begin)
        self.engine.fetched(request.request_id, cached_len)

    def index(self, request: EngineRequest, pages: Sequence[int], begin: int) -> None:
        hashes = page_hashes(request.token_ids[:-1], self.page_size, SALT)[begin // self.page_size :]
        for page, page_hash in zip(pages, hashes, strict=False):
            self.pool.try_index(page, page_hash)

    def expect_empty(self) -> None:
        self.engine.check()
        statistics = self.engine.statistics()
        assert self.engine.num_running == statistics.num_waiting == statistics.num_parked == 0
        assert self.pool.statistics().num_held == 0

    def num_pages(self, num_tokens: int) -> int:
        return num_pages_for(num_tokens, self.page_size)
