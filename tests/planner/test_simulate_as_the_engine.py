"""The simulated instance and the engine itself, asked the same: each step is the same one, whatever the pool lacks."""

import random
from collections import deque
from math import inf

import pytest
from deployments import COST, arrivals, instance
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace.bench.workload import ArrivalList
from headrace.engine.cost import StepSize
from headrace.engine.engine import Engine
from headrace.engine.requests import EngineOptions, EngineRequest, NewToken, RequestDone, SamplingParams
from headrace.engine.step import Step
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import PrefixIndex
from headrace.planner.clock import Clock
from headrace.planner.decoding import Decoder
from headrace.planner.pages import Prefix
from headrace.planner.requests import Request
from headrace.planner.scenario import Instance

VOCABULARY = 1 << 20


class RealInstance:
    """An engine, and a clock that is moved from one arrival or end of a step to the next."""

    def __init__(self, spec: Instance, asked: ArrivalList) -> None:
        self._asked = asked.arrivals
        self._engine = Engine(
            pages=PagePool(spec.num_pages, PrefixIndex()),
            options=EngineOptions(
                page_size=spec.page_size,
                chunk_tokens=spec.chunk_tokens,
                max_running=spec.max_running,
                max_model_len=1 << 20,
                sample_from_prefill=spec.role == "colocated",
            ),
            salt=b"",
            vocab_size=VOCABULARY,
        )
        self._rng = random.Random(1)
        self._line: deque[EngineRequest] = deque()
        self._step: Step | None = None
        self._ends_at = inf
        self.token_s: list[list[float]] = [[] for _ in self._asked]

    def run(self) -> None:
        coming = deque(enumerate(self._asked))
        while coming or self._step is not None:
            if coming and coming[0][1].at_s < self._ends_at:
                index, arrival = coming.popleft()
                self._line.append(self._request(index, arrival.prompt_tokens, arrival.max_tokens))
                if len(self._line) == 1:
                    self._place(arrival.at_s)
            else:
                self._end_step(self._ends_at)
        self._engine.check()

    def _request(self, index: int, prompt_tokens: int, max_tokens: int) -> EngineRequest:
        return EngineRequest(
            request_id=f"{index}",
            token_ids=tuple(self._rng.randrange(VOCABULARY) for _ in range(prompt_tokens)),
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(),
        )

    def _place(self, now: float) -> None:
        while self._line and self._engine.try_admit(self._line[0]) is not None:
            self._engine.start(self._line.popleft().request_id)
            self._begin(now)

    def _begin(self, now: float) -> None:
        if self._step is not None:
            return
        self._step = self._engine.begin_step(now)
        self._ends_at = inf if self._step is None else now + COST.predict(self._size_of(self._step))

    def _size_of(self, step: Step) -> StepSize:
        """Rows come first; where not even the oldest has one, there is none."""
        num_rows, size = self._engine.statistics().num_decoding, StepSize()
        for row in step.rows:
            begin, end = row.row.begin, row.row.begin + len(row.row.token_ids)
            is_row = num_rows > 0 and row.draw is not None and end == begin + 1
            size = size.with_row(end) if is_row else size.with_chunk(begin, end)
            num_rows = num_rows - 1 if is_row else 0
        return size

    def _end_step(self, now: float) -> None:
        assert self._step is not None
        step, self._step, self._ends_at = self._step, None, inf
        tokens = [self._rng.randrange(VOCABULARY) for _ in range(step.num_draws)]
        self._engine.commit_step(step, tokens, now)
        outputs = self._engine.drain_outputs()
        for output in outputs:
            if isinstance(output, NewToken):
                self.token_s[int(output.request_id)].append(now)
        self._begin(now)
        if any(isinstance(output, RequestDone) for output in outputs):
            self._place(now)

    @property
    def num_preemptions(self) -> int:
        return self._engine.statistics().num_preemptions


class SimulatedInstance:
    def __init__(self, spec: Instance, asked: ArrivalList) -> None:
        self._clock = Clock()
        self._line: deque[Request] = deque()
        self.decoder = Decoder(spec, self._clock, closed_form=True, on_room=lambda _: self._retry(), on_end=self._ended)
        self._has_ended = False
        self.requests = []
        for index, arrival in enumerate(asked.arrivals):
            prefix = Prefix(arrival, own=index, block_tokens=512, num_tokens=arrival.prompt_tokens, page_size=16)
            request = Request(index=index, arrival=arrival, block_tokens=512, prefix=prefix)
            self.requests.append(request)
            self._clock.at(arrival.at_s, self._arrive, request)

    def run(self) -> None:
        while self._clock.step():
            pass

    def _arrive(self, request: Request) -> None:
        self._line.append(request)
        if len(self._line) == 1:
            self._place()

    def _ended(self, request: Request) -> None:
        self._has_ended = True

    def _retry(self) -> None:
        """When one has ended."""
        if self._has_ended:
            self._has_ended = False
            self._place()

    def _place(self) -> None:
        while self._line and self.decoder.try_admit(self._line[0]):
            self.decoder.start(self._line.popleft())


@st.composite
def requests(draw: st.DrawFn) -> ArrivalList:
    at_s, listed = 0.0, []
    for _ in range(draw(st.integers(1, 16))):
        at_s += draw(st.floats(1e-4, 0.1))
        listed.append((at_s, draw(st.integers(1, 330)), draw(st.integers(1, 150))))
    return arrivals(listed)


@settings(max_examples=50, deadline=None)
@given(
    requests(),
    st.sampled_from(["colocated", "decoder"]),
    st.sampled_from([32, 40, 60, 1000]),
    st.sampled_from([64, 256]),
    st.sampled_from([3, 32]),
)
def test_the_simulation_takes_the_steps_that_the_engine_takes(
    asked: ArrivalList, role: str, num_pages: int, chunk_tokens: int, max_running: int
) -> None:
    spec = instance("one", role, num_pages=num_pages, chunk_tokens=chunk_tokens, max_running=max_running)
    real, simulated = RealInstance(spec, asked), SimulatedInstance(spec, asked)
    real.run()
    simulated.run()
    event(f"preempted: {real.num_preemptions > 0}")
    assert simulated.decoder.num_preemptions == real.num_preemptions
    for request, token_s in zip(simulated.requests, real.token_s, strict=True):
        assert request.record(0.0).token_s == pytest.approx(tuple(token_s), abs=1e-9)
