"""The two sides of a link, asked together: starts their processes, waits with a deadline, ends them whatever happens.

A loop whose other side has died never returns, so nothing here waits for both to be well: the first failure ends the
pair. What is told of it is the death of a process, where there was one, rather than what the other side saw of it. Used
by one thread at a time.
"""

import errno
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import IO

from headrace.errors import Closed, FabricError, InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.names import remove_files
from headrace.fabric.limits.side import GRACE_S, Given, start_side

LAST_WORDS_S = 0.5
"""After one side's failure: how long the other may take to tell of a worse one."""


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A side as it is seen from here; `process` is None for one on another host."""

    name: str
    stream: socket.socket
    process: subprocess.Popen[bytes] | None = None
    errors: IO[bytes] | None = None
    endpoint_name: str | None = None

    def why_gone(self) -> FabricError:
        call = f"limits: {self.name} side"
        if self.process is None:
            return FabricError(call, errno.ECONNRESET, "closed the connection")
        try:
            code = self.process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return FabricError(call, errno.ECONNRESET, "takes no more questions")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return FabricError(call, errno.ECONNRESET, f"its process ended with {how}{self._last_error()}")

    def _last_error(self) -> str:
        if self.errors is None:
            return ""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").splitlines()
        return next((f": {line}" for line in reversed(lines) if line.strip()), "")

    def hang_up(self) -> None:
        with suppress(OSError):  # it may be gone
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()

    def end(self, *, kill: bool) -> None:
        if self.process is not None:
            if kill:
                self.process.kill()
            try:
                self.process.wait(2 * GRACE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.errors is not None:
            self.errors.close()
        if self.endpoint_name is not None:
            remove_files(self.endpoint_name)


@dataclass(slots=True, kw_only=True)
class _Told:
    """What came back so far."""

    answers: dict[str, wire.Answer] = field(default_factory=dict)
    gone: list[_Asked] = field(default_factory=list)
    refused: list[wire.Refused] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.gone or self.refused)

    def check(self) -> None:
        """Raises what went wrong, the most telling first."""
        if self.gone:
            raise self.gone[0].why_gone()
        if self.refused:
            raise _error_of(self.refused[0])


class Pair:
    """`first` sends and pings, `second` receives and answers."""

    def __init__(self, first: Given, second: Given | socket.socket, *, timeout_s: float) -> None:
        """A socket leads to a `serve_side` elsewhere. It is shut down in the end, and closed by whoever opened it."""
        self._timeout_s = timeout_s
        self._sides = [_start("first", first)]
        try:
            if isinstance(second, socket.socket):
                self._sides.append(_Asked(name="second", stream=second.dup()))
            else:
                self._sides.append(_start("second", second))
        except BaseException:
            self.close(kill=True)
            raise
        self.process_ids = [side.process.pid if side.process else None for side in self._sides]

    def name_endpoint(self, side: int, name: str) -> None:
        """Files of that name are removed in the end."""
        self._sides[side].endpoint_name = name

    def ask(self, first: wire.Question | None, second: wire.Question | None) -> list[wire.Answer]:
        """The answers, of the first side first. Raises InputError for what nobody could answer, and Closed; whatever
        else goes wrong raises InputError or FabricError and closes the pair."""
        if not self._sides:
            raise Closed("the link was closed")
        asked = [(side, question) for side, question in zip(self._sides, (first, second), strict=True) if question]
        for _, question in asked:
            wire.check(question)
        deadline = time.monotonic() + self._timeout_s
        told = _Told()
        try:
            for side, question in reversed(asked):  # who receives is ready first
                _tell(side, question, self._timeout_s, told)
            self._collect([side for side, _ in asked], deadline, told)
            told.check()
        except BaseException:  # an interrupt, too, leaves loops behind that would wait for ever
            self.close(kill=True)
            raise
        return [told.answers[side.name] for side, _ in asked]

    def _collect(self, asked: list[_Asked], deadline: float, told: _Told) -> None:
        """Until each has answered or failed, or has had the time for it."""
        with selectors.DefaultSelector() as waiting:
            for side in asked:
                waiting.register(side.stream, selectors.EVENT_READ, side)
            while waiting.get_map():
                if told.failed:
                    deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
                ready = waiting.select(max(deadline - time.monotonic(), 0.0))
                if not ready and not told.failed:
                    raise FabricError("limits", errno.ETIMEDOUT, f"no answer in {self._timeout_s:g} s")
                if not ready:
                    return
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    _take(key.data, deadline, told)

    def close(self, *, kill: bool = False) -> None:
        """Idempotent. Processes end by themselves when nobody asks any more; `kill` does not wait for that."""
        sides, self._sides = self._sides, []
        for side in sides:
            side.hang_up()
        for side in sides:
            side.end(kill=kill)


def _start(name: str, given: Given) -> _Asked:
    with ExitStack() as opened:
        ours, theirs = socket.socketpair()
        opened.enter_context(ours)
        errors = opened.enter_context(tempfile.TemporaryFile())
        with theirs:
            process = start_side(theirs, given, errors=errors.fileno())
        opened.pop_all()
        return _Asked(name=name, stream=ours, process=process, errors=errors)


def _tell(side: _Asked, question: wire.Question, timeout_s: float, told: _Told) -> None:
    try:
        wire.tell(side.stream, question, timeout_s=timeout_s)
    except TimeoutError:
        told.refused.append(_timed_out(side, "takes no question"))
    except OSError:
        told.gone.append(side)


def _take(side: _Asked, deadline: float, told: _Told) -> None:
    try:
        answer = wire.next_answer(side.stream, deadline=deadline)
    except TimeoutError:
        answer = _timed_out(side, "stopped in the middle of an answer")
    except OSError:
        answer = None
    match answer:
        case None:
            told.gone.append(side)
        case wire.Refused():
            told.refused.append(answer)
        case _:
            told.answers[side.name] = answer


def _timed_out(side: _Asked, text: str) -> wire.Refused:
    return wire.Refused(call=f"limits: {side.name} side", code=errno.ETIMEDOUT, text=text)


def _error_of(refused: wire.Refused) -> InputError | FabricError:
    if refused.field is not None:
        return InputError(refused.field, refused.text)
    return FabricError(refused.call, refused.code, refused.text)
