"""A side as it is seen by whoever asks it: a process of this host, or the stream to another. Owns both.

What is told of a side that is gone is the end of its process, where there is one, with its last words.
"""

import errno
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Self

from headrace.errors import FabricError
from headrace.fabric.limits.answering import GRACE_S

LAST_WORDS_S = 0.5
"""After one side's failure: how long the other may take to tell of a worse one."""


@dataclass(slots=True, kw_only=True)
class AskedSide:
    """`process` and `errors` (its stderr) are None for one on another host."""

    name: str
    stream: socket.socket
    process: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = None

    @classmethod
    def start(cls, name: str, start: Callable[[socket.socket, int], "subprocess.Popen[bytes]"]) -> Self:
        """`start` is given the side's stream, and a file for its stderr."""
        with ExitStack() as opened:
            ours, theirs = socket.socketpair()
            opened.enter_context(ours)
            errors = opened.enter_context(tempfile.TemporaryFile())
            with theirs:
                process = start(theirs, errors.fileno())
            opened.pop_all()
            return cls(name=name, stream=ours, process=process, errors=errors)

    def is_gone(self, within_s: float) -> bool:
        """Its process has ended; False where there is none here."""
        if self.process is None:
            return False
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        return self.process.returncode is not None

    def why_gone(self, room: str) -> FabricError:
        """`room` stands before its name."""
        call = f"{room}: {self.name} side"
        if self.process is None:
            return FabricError(call, errno.ECONNRESET, "closed the connection")
        if not self.is_gone(LAST_WORDS_S):
            return FabricError(call, errno.ECONNRESET, "takes no more questions")
        code = self.process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return FabricError(call, errno.ECONNRESET, f"its process ended with {how}{self._last_error()}")

    def _last_error(self) -> str:
        if self.errors is None:
            return ""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").splitlines()
        return next((f": {line}" for line in reversed(lines) if line.strip()), "")

    def hang_up(self) -> None:
        """A process then ends by itself."""
        with suppress(OSError):  # it may be gone
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()

    def end(self, *, kill: bool) -> None:
        if self.process is not None:
            if kill or not self.is_gone(2 * GRACE_S):
                self.process.kill()
            self.process.wait()
        if self.errors is not None:
            self.errors.close()
