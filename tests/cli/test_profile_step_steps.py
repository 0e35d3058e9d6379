"""Where a step's time goes, on a clock that is moved: the parts are the whole, and each moment is in the right one."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli.profile_step import steps, stopwatch
from headrace.cli.profile_step.steps import StepTimes, StepWatch
from headrace.engine.cost import StepSize
from headrace.engine.requests import SamplingParams
from headrace.engine.step import Draw, Step, StepRow
from headrace.model import timed_ops
from headrace.model.batch import Row
from headrace.model.timed_ops import OpTimes

MS = 1_000_000


def step_of(*kv_lens: int, chunk: int = 0) -> Step:
    draw = Draw(sampling=SamplingParams(), position=1)
    rows = [
        StepRow(row=Row(token_ids=(1,), begin=kv_len - 1, page_table=(0,), wants_logits=True), draw=draw)
        for kv_len in kv_lens
    ]
    if chunk:
        rows.append(StepRow(row=Row(token_ids=(1,) * chunk, begin=0, page_table=(0,), wants_logits=False), draw=None))
    return Step(number=1, began_at=0.0, rows=tuple(rows), size=StepSize())


class Process:
    """A role's calls, as a script makes them: each takes its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        clock = SimpleNamespace(monotonic_ns=lambda: self.now_ns)
        monkeypatch.setattr(stopwatch, "time", clock)
        monkeypatch.setattr(timed_ops, "time", clock)
        self.times = OpTimes()
        process = self

        class Engine:
            def begin_step(self, step: Step | None) -> Step | None:
                process.passes(0.5)
                return step

            def commit_step(self) -> None:
                process.passes(0.25)

        class Links:
            def send(self) -> None:
                process.passes(0.125)

        class Runner:
            def run(self, step: Step, fails: bool) -> list[int]:
                for kind, ms in (("linear", 10), ("norms", 2), ("linear", 1), ("attention", 3), ("logits", 4)):
                    began_ns = process.now_ns
                    process.passes(ms)
                    process.times.add(kind, began_ns)  # type: ignore[arg-type]
                process.passes(0.75)
                if fails:
                    raise RuntimeError
                return [process.runner.sample() for _ in range(step.num_draws)]

        self.engine, self.links, self.run = Engine(), Links(), Runner()
        self.runner = SimpleNamespace(sample=lambda: self.passes(1))
        for name, owner in {"Engine": Engine, "Links": Links, "Runner": Runner, "runner": self.runner}.items():
            monkeypatch.setattr(steps, name, owner)

    def passes(self, ms: float) -> None:
        self.now_ns += int(ms * MS)

    def turn(self, step: Step | None, *, fails: bool = False) -> None:
        """As the decoder's, with a Status that is sent while the model runs."""
        if self.engine.begin_step(step) is None:
            self.passes(1000)  # idle
            return
        self.passes(0.0625)  # to the model thread
        self.links.send()
        try:
            self.run.run(step, fails)
        except RuntimeError:
            return
        self.passes(0.03125)  # and back
        self.engine.commit_step()
        self.passes(0.5)  # outputs
        for _ in step.rows if step else ():
            self.links.send()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def kept(process: Process, num_rows: int, num_steps: int, play: Callable[[], None]) -> list[StepTimes]:
    async def watching() -> list[StepTimes]:
        watch = StepWatch(process.times)
        with watch.watching():
            wanted = asyncio.ensure_future(watch.steps(num_rows, num_steps))
            await asyncio.sleep(0)
            play()
            return await asyncio.wait_for(wanted, 1)

    return asyncio.run(watching())


def in_ms(step: StepTimes) -> dict[Any, float]:
    return {name: ns / MS for name, ns in step.parts_ns.items()}


def test_each_moment_of_a_step_is_in_one_part(process: Process) -> None:
    def play() -> None:
        for _ in range(2):
            process.turn(step_of(7, 9))

    (step,) = kept(process, 2, 1, play)
    assert in_ms(step) == {
        "linear": 11,
        "attention": 3,
        "norms": 2,
        "logits": 4,
        "sampling": 2,
        "python": 0.75,
        "engine": 0.5 + 0.25 + 0.5,
        "messaging": 2 * 0.125,
        "waiting": 0.0625 + 0.125 + 0.03125,
    }
    assert sum(step.parts_ns.values()) == step.whole_ns
    assert step.kv_lens == (7, 9)
    assert step.num_op_calls == 5


def test_only_steps_of_so_many_decoding_rows_are_kept(process: Process) -> None:
    def play() -> None:
        for step in (step_of(3), step_of(3, 4), step_of(3, chunk=5), step_of(5, 6), step_of(3, 4, 5), step_of(7, 8)):
            process.turn(step)
        process.turn(None)

    found = kept(process, 2, 3, play)
    assert [step.kv_lens for step in found] == [(3, 4), (5, 6), (7, 8)]
    assert {in_ms(step)["linear"] for step in found} == {11}


def test_a_step_ends_where_the_next_is_planned_though_none_follows(process: Process) -> None:
    def play() -> None:
        process.turn(step_of(3))
        process.turn(None)
        process.turn(step_of(4))
        process.turn(None)

    first, second = kept(process, 1, 2, play)
    assert first.whole_ns == second.whole_ns < 30 * MS


def test_a_step_that_fails_is_none_and_leaves_nothing_to_the_next(process: Process) -> None:
    def play() -> None:
        process.turn(step_of(3), fails=True)
        process.turn(step_of(4))
        process.turn(None)

    (step,) = kept(process, 1, 1, play)
    assert step.kv_lens == (4,) and in_ms(step)["linear"] == 11


def test_the_next_steps_are_asked_for_anew(process: Process) -> None:
    async def watching() -> None:
        watch = StepWatch(process.times)
        with watch.watching():
            for kv_len in (10, 20):
                wanted = asyncio.ensure_future(watch.steps(1, 2))
                await asyncio.sleep(0)
                for late in range(4):
                    process.turn(step_of(kv_len + late))
                process.turn(None)
                found = await asyncio.wait_for(wanted, 1)
                assert [step.kv_lens for step in found] == [(kv_len,), (kv_len + 1,)]

    asyncio.run(watching())


def test_nothing_is_watched_afterwards(process: Process) -> None:
    run = type(process.run).run
    kept(process, 1, 1, lambda: [process.turn(step_of(3)), process.turn(None)][0])
    assert type(process.run).run is run
