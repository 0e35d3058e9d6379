"""How far the fetching of a model is, for the person who waits: a bar on a terminal, now and then a line elsewhere.

Runs in the command line's process, before any other is started.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from headrace.model.checkpoint import read_shape
from headrace.model.locate import locate_model
from headrace.model.progress import Progress
from headrace.roles.options import InstanceOptions

LINE_EVERY_S = 5.0


def fetch_model(name: str) -> Path:
    """The model's directory, fetched first where it is not here yet. Raises InputError, also where it is of a kind
    that we do not know: a process that loads it would find out seconds later."""
    with shown(sys.stderr) as progress:
        return locate_model(name, progress)


def require_pool(options: InstanceOptions) -> None:
    """Raises InputError where model and KV memory do not fit: the process itself would find out seconds later."""
    # Function-local: it loads numpy, which is not needed to show help or to refuse an option.
    from headrace.roles.pool_plan import plan_pool

    plan_pool(read_shape(options.model_dir), options)


@contextmanager
def shown(stream: TextIO) -> Iterator[Progress]:
    """A Progress that writes to `stream`. Nothing is written where nothing is fetched."""
    if not stream.isatty():
        yield Lines(stream)
        return
    bars = Bars(stream)
    try:
        yield bars
    finally:
        bars.close()


class Lines:
    """A line when a stage begins, every five seconds, and when it ends."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._stage = ""
        self._is_told = False  # the end of this stage
        self._next_at = 0.0

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        if stage != self._stage:
            self._stage, self._is_told, self._next_at = stage, False, now
        is_done = done_bytes >= total_bytes
        if self._is_told or (now < self._next_at and not is_done):
            return
        self._is_told, self._next_at = is_done, now + LINE_EVERY_S
        share = f"{done_bytes / total_bytes:.0%} of {total_bytes / 1e6:,.1f} MB"
        self._stream.write(f"headrace: {stage}: {share}\n")
        self._stream.flush()


class Bars:
    """One bar a stage, drawn by rich from the first call on."""

    def __init__(self, stream: TextIO) -> None:
        self._rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if stage not in self._tasks:
            self._rich.start()  # again is harmless
            self._tasks[stage] = self._rich.add_task(stage, total=total_bytes)
        self._rich.update(self._tasks[stage], completed=done_bytes, total=total_bytes)

    def close(self) -> None:
        self._rich.stop()
