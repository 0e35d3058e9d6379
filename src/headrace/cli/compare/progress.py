"""What a person sees while a comparison runs: what is being done, how far it is, how long it will still take.

On a terminal a bar; elsewhere a line for each session. Writes to stderr; knows no arms.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console


class Progress:
    """`with Progress(expected_s) as progress:`; `expected_s` is a first guess of all runs together."""

    def __init__(self, expected_s: float) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._expected_s, self._done_s = expected_s, 0.0
        self._begin = time.monotonic()
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("{task.percentage:>3.0f} %  {task.fields[left]}  {task.description}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0, left="")

    def expect(self, runs_s: Sequence[float]) -> None:
        """What is still to come, now that it is known."""
        self._expected_s = self._done_s + sum(runs_s)

    def say(self, text: str) -> None:
        """A session begins."""
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"{time.monotonic() - self._begin:5.0f} s  {text}", soft_wrap=True)

    def advance(self, run_s: float) -> None:
        """A run is over."""
        self._done_s += run_s
        share = min(1.0, self._done_s / max(self._expected_s, 1e-9))
        spent_s = time.monotonic() - self._begin
        left_s = spent_s * (1 - share) / share
        self._bar.update(
            self._task, completed=share, left=f"{left_s / 60:.0f} min left" if left_s > 90 else f"{left_s:.0f} s left"
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
