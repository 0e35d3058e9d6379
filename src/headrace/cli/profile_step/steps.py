"""Where the time of an engine's steps goes, in a process where a role runs: `StepWatch`.

Owns what was measured, not the calls. Two threads note, the loop and the model thread, and never at once: a step's rows
run between begin_step and commit_step. A step lasts from its begin_step to the next:

    [begin_step)      engine
    [.., Runner.run)  waiting: the step travels to the model thread
    [Runner.run)      the operations' sums, sampling, and python, which is what is left of it
    [.., commit_step) waiting: the loop notices that it is done
    [commit_step, ..) engine; but messaging, while a message is sent

So the parts are the whole, with nothing counted twice.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from headrace.cli.profile_step.stopwatch import watched
from headrace.engine import runner
from headrace.engine.engine import Engine
from headrace.engine.runner import Runner
from headrace.engine.step import Step
from headrace.model.timed_ops import OpKind, OpSums, OpTimes
from headrace.roles.links import Links

PartName = Literal["linear", "attention", "norms", "logits", "sampling", "python", "engine", "messaging", "waiting"]
PARTS: tuple[PartName, ...] = get_args(PartName)
OPERATIONS: tuple[OpKind, ...] = get_args(OpKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step that drew a token for each of its rows, and computed no prompt."""

    kv_lens: tuple[int, ...]  # of its rows
    began_ns: int
    ended_ns: int
    parts_ns: dict[PartName, int]
    num_op_calls: int
    num_watched_calls: int

    @property
    def whole_ns(self) -> int:
        return self.ended_ns - self.began_ns


@dataclass(slots=True)
class _Open:
    """A step that the next one has not followed yet. 0: it has not come to that."""

    kv_lens: tuple[int, ...]  # none: it computes prompts
    began: int
    planned: int
    ran: int = 0
    done: int = 0
    committed: int = 0
    sampling: int = 0
    messaging: int = 0
    num_watched_calls: int = 4  # begin_step, run, commit_step, and the next begin_step


class StepWatch:
    """`ops` are the times of the operations of the model that the runner runs. Steps of `num_rows` are kept."""

    def __init__(self, ops: OpTimes) -> None:
        self._ops = ops
        self._open: _Open | None = None
        self._steps: list[StepTimes] = []
        self._wanted = (0, 0)  # rows, steps
        self._are_there = asyncio.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as watches:
            for owner, name, note in (
                (Engine, "begin_step", self._on_begin),
                (Runner, "run", self._on_run),
                (runner, "sample", self._on_sample),
                (Engine, "commit_step", self._on_commit),
                (Links, "send", self._on_send),
            ):
                watches.enter_context(watched(owner, name, note))
            yield

    async def steps(self, num_rows: int, num_steps: int) -> list[StepTimes]:
        """The next so many of so many rows."""
        self._steps, self._wanted = [], (num_rows, num_steps)
        self._are_there.clear()
        await self._are_there.wait()
        return self._steps

    def _on_begin(self, began_ns: int, ended_ns: int, step: Step | None) -> None:
        sums = self._ops.take()
        if self._open is not None and self._open.committed:
            self._keep(_closed(self._open, began_ns, sums))
        self._open = None if step is None else _Open(_kv_lens(step), began_ns, ended_ns)

    def _on_run(self, began_ns: int, ended_ns: int, tokens: list[int]) -> None:
        if self._open is not None:
            self._open.ran, self._open.done = began_ns, ended_ns

    def _on_sample(self, began_ns: int, ended_ns: int, token: int) -> None:
        if self._open is not None:
            self._open.sampling += ended_ns - began_ns
            self._open.num_watched_calls += 1

    def _on_commit(self, began_ns: int, ended_ns: int, nothing: None) -> None:
        if self._open is not None:
            self._open.committed = began_ns

    def _on_send(self, began_ns: int, ended_ns: int, nothing: None) -> None:
        if self._open is not None and self._open.committed:  # what is sent while the model runs costs the step nothing
            self._open.messaging += ended_ns - began_ns
            self._open.num_watched_calls += 1

    def _keep(self, step: StepTimes) -> None:
        num_rows, num_steps = self._wanted
        if len(step.kv_lens) == num_rows and len(self._steps) < num_steps:
            self._steps.append(step)
            if len(self._steps) == num_steps:
                self._are_there.set()


def _closed(step: _Open, ended_ns: int, operations: OpSums) -> StepTimes:
    operations_ns: dict[PartName, int] = {kind: operations.ns.get(kind, 0) for kind in OPERATIONS}
    parts_ns: dict[PartName, int] = {
        **operations_ns,
        "sampling": step.sampling,
        "python": step.done - step.ran - step.sampling - sum(operations_ns.values()),
        "engine": step.planned - step.began + ended_ns - step.committed - step.messaging,
        "messaging": step.messaging,
        "waiting": step.ran - step.planned + step.committed - step.done,
    }
    return StepTimes(
        kv_lens=step.kv_lens,
        began_ns=step.began,
        ended_ns=ended_ns,
        parts_ns=parts_ns,
        num_op_calls=operations.num_calls,
        num_watched_calls=step.num_watched_calls,
    )


def _kv_lens(step: Step) -> tuple[int, ...]:
    """Of its rows, where all decode."""
    decodes = all(row.draw is not None and len(row.row.token_ids) == 1 for row in step.rows)
    return tuple(row.row.begin + 1 for row in step.rows) if decodes else ()
