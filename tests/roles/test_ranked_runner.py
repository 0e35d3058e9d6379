"""The lead's half of a step. The other rank is a thread here, which says what a test has it say."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from unittest.mock import Mock

import pytest

from headrace.engine.requests import SamplingParams
from headrace.engine.step import Draw, StepRow
from headrace.engine.step_memory import StepLimits, StepMemory
from headrace.errors import InputError, RankLost
from headrace.model.batch import Batch, Row
from headrace.model.interface import AfterLayer, nothing_after
from headrace.roles.ranks import processes as rank_processes
from headrace.roles.ranks import watch as rank_watch
from headrace.roles.ranks.messages import Compute, Computed, Failed, RankMessage, Refused, receive, send
from headrace.roles.ranks.processes import RankProcesses
from headrace.roles.ranks.runner import RankedRunner
from headrace.roles.ranks.watch import RankWatch

LIMITS = StepLimits.of(chunk_tokens=4, max_running=4, max_model_len=16, page_size=4)


class OwnRunner:
    """Rank 0: its token is the number of the batch's tokens; or it raises."""

    error: Exception | None = None

    def batch(self, rows: Sequence[StepRow]) -> Batch:
        return Batch.of([row.row for row in rows], page_size=4, num_pages=8, vocab_size=100)

    def compute(self, batch: Batch, draws: Sequence[Draw], after_layer: AfterLayer = nothing_after) -> list[int]:
        if self.error is not None:
            raise self.error
        after_layer(0)
        return [batch.num_tokens for _ in draws]


class Step:
    """A lead of two groups of one rank each. `answers` are the other rank's, one for each step."""

    def __init__(self, steps: StepMemory, link: socket.socket) -> None:
        self.own = OwnRunner()
        self.answers: list[RankMessage] = []
        self.num_computed = 0
        self._steps = steps
        watch = RankWatch((), (), on_lost=lambda loss: None)
        self.others = RankProcesses([link], watch, steps=steps, meeting_points=Mock())
        self.runner = RankedRunner(self.own, self.others)  # type: ignore[arg-type]

    def be_the_other(self, link: socket.socket) -> None:
        while isinstance(receive(link), Compute):
            time.sleep(0.02)  # whoever does not wait for the answer is ahead
            self.num_computed += 1
            batch, draws = self._steps.read(1)
            self._steps.write_tokens(1, [10 + batch.num_tokens for _ in draws])
            answer = self.answers.pop(0)
            if isinstance(answer, Computed | Refused | Failed):
                send(link, answer)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    monkeypatch.setattr(rank_watch, "BEAT_S", 0.05)  # how long the watch of nobody takes to close
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(StepMemory(LIMITS, 2)) as steps, theirs:
        one = Step(steps, ours)
        other = threading.Thread(target=one.be_the_other, args=(theirs,))
        other.start()
        try:
            yield one
        finally:
            one.others.close()
            other.join()


def rows(num_tokens: int) -> list[StepRow]:
    row = Row(token_ids=range(num_tokens), begin=0, page_table=(0, 1, 2, 3), wants_logits=True)
    return [StepRow(row=row, draw=Draw(sampling=SamplingParams(), position=num_tokens))]


def test_each_group_gets_its_rows_and_gives_its_tokens(step: Step) -> None:
    step.answers = [Computed()]
    layers: list[int] = []
    assert step.runner.run([rows(2), rows(3)], layers.append) == [[2], [13]]
    assert layers == [0]


def test_rows_outside_of_the_pool_are_refused_before_any_rank_is_told(step: Step) -> None:
    beyond = [StepRow(row=Row(token_ids=(1,), begin=0, page_table=(8,), wants_logits=False), draw=None)]
    with pytest.raises(InputError, match="page ids in"):
        step.runner.run([rows(2), beyond])
    step.answers = [Computed()]
    assert step.runner.run([rows(1), rows(1)]) == [[1], [11]]
    assert step.num_computed == 1


@pytest.mark.parametrize("whose", [0, 1])
def test_logits_that_are_no_numbers_fail_the_step_and_the_next_one_is_computed(step: Step, whose: int) -> None:
    step.answers = [Computed(), Computed()]
    if whose == 0:
        step.own.error = InputError("logits", "must be numbers")
    else:
        step.answers[0] = Refused.of(InputError("logits", "must be numbers"))
    with pytest.raises(InputError, match=r"^logits: must be numbers" + (r" \(rank 1\)$" if whose else "$")):
        step.runner.run([rows(2), rows(3)])
    step.own.error = None
    assert step.runner.run([rows(2), rows(1)]) == [[2], [11]]
    assert step.num_computed == 2


Fails = Callable[[Step], None]


def own_fails(step: Step) -> None:
    step.own.error = RuntimeError("no answer")
    step.answers = [Computed()]


def other_fails(step: Step) -> None:
    step.answers = [Failed(text="no memory")]


def other_hangs(step: Step) -> None:
    step.answers = [Compute()]


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (own_fails, "rank 0 failed: no answer"),
        (other_fails, "rank 1 failed: no memory"),
        (other_hangs, "rank 1 has not answered for 0.2 s"),
    ],
)
def test_a_step_that_was_not_computed_to_its_end_is_the_last(
    step: Step, fail: Fails, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_watch, "WORDS_S", 0.05)
    monkeypatch.setattr(rank_processes, "COLLECTIVE_S", 0.2)
    fail(step)
    with pytest.raises(RankLost, match=f"^{said}$"):
        step.runner.run([rows(2), rows(3)])
