"""What instances' logs at debug say of their steps (`roles.step_log`), by process. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.engine.cost import StepSize

STEP = re.compile(
    r"^\S+ \S+ (?P<process>\S+) debug +step: begin (?P<begin>\S+) took (?P<took>\S+) follows (?P<follows>[01]) "
    r"rows (?P<rows>\d+) chunk (?P<chunk>\d+) keys (?P<keys>\d+) pairs (?P<pairs>\d+)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """`follows`: at once on the one before it."""

    begin_s: float
    took_s: float
    follows: bool
    size: StepSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A step, and how long it kept its instance."""

    size: StepSize
    seconds: float


def read_steps(log: str) -> dict[str, list[LoggedStep]]:
    """By name of the process, in their order."""
    steps: dict[str, list[LoggedStep]] = {}
    for found in STEP.finditer(log):
        rows, chunk_tokens, keys, pairs = (int(found[name]) for name in ("rows", "chunk", "keys", "pairs"))
        step = LoggedStep(
            begin_s=float(found["begin"]),
            took_s=float(found["took"]),
            follows=found["follows"] == "1",
            size=StepSize(rows=rows, chunk_tokens=chunk_tokens, keys=keys, pairs=pairs),
        )
        steps.setdefault(found["process"], []).append(step)
    return steps


def begin_to_begin(steps: Sequence[LoggedStep], *, since_s: float = 0.0) -> list[Timed]:
    """Of those that began since then. What an engine does between two steps that follow each other is the first one's;
    one that nothing followed is as long as its computing."""
    timed = [
        Timed(size=step.size, seconds=after.begin_s - step.begin_s if after.follows else step.took_s)
        for step, after in pairwise(steps)
        if step.begin_s >= since_s
    ]
    if steps and steps[-1].begin_s >= since_s:
        timed.append(Timed(size=steps[-1].size, seconds=steps[-1].took_s))
    return timed
