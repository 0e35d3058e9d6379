"""A child process that is asked by lines of JSON on stdin and answers each with one line on stdout.

`LineProcess` is the test's side, `serve` the child's. The child greets with a line of its own when it is ready, and
ends when its stdin does: no child outlives the test, however that ends.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

ANSWER_S = 60.0


class LineProcess:
    """Starts the process, without waiting for its greeting; kills it on leaving, whatever state it is in by then."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        # A group of its own: Ctrl-C is for the test, which then ends its children in order.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            env={**os.environ, **(environment or {})},
        )
        self._hear, self._say = self.process.stdout, self.process.stdin

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self._hear, self._say):
            assert pipe is not None
            pipe.close()

    @cached_property
    def greeting(self) -> Any:
        """Waited for."""
        return self.answer()

    def ask(self, do: str, **arguments: object) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: object) -> None:
        """Ask without waiting; `answer` must follow before the next question."""
        assert self._say is not None and self.greeting is not None
        self._say.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self, seconds: float = ANSWER_S) -> Any:
        assert self._hear is not None
        # One line per question, so nothing is ever left in a buffer that select would not see.
        assert select.select([self._hear], [], [], seconds)[0], f"no answer in {seconds} s from {self._command}"
        line = self._hear.readline()
        assert line, f"ended with {self.process.wait()}: {self._command}"
        return json.loads(line)


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def serve(subject: object, greeting: object) -> None:
    """Each question is the name of a method of `subject` with its keyword arguments."""
    say(greeting)
    for line in sys.stdin:
        request = json.loads(line)
        say(getattr(subject, request.pop("do"))(**request))
