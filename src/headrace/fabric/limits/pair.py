"""The two sides of a link, asked together: starts their processes, waits with a deadline, ends them whatever happens.

A loop whose other side has died never returns, so nothing here waits for both to be well: the first failure ends the
pair. What is told of it is the death of a process, where there was one, rather than what the other side saw of it. Used
by one thread at a time.
"""

import errno
import selectors
import socket
import time
from dataclasses import dataclass, field

from headrace.errors import Closed, FabricError, InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.asked import LAST_WORDS_S, AskedSide
from headrace.fabric.limits.names import remove_files
from headrace.fabric.limits.side import Given, start_side


@dataclass(slots=True, kw_only=True)
class _Told:
    """What came back so far."""

    answers: dict[str, wire.Answer] = field(default_factory=dict)
    gone: list[AskedSide] = field(default_factory=list)
    refused: list[wire.Refused] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.gone or self.refused)

    def check(self) -> None:
        """Raises what went wrong, the most telling first."""
        if self.gone:
            raise self.gone[0].why_gone("limits")
        if self.refused:
            raise _error_of(self.refused[0])


class Pair:
    """`first` sends and pings, `second` receives and answers."""

    def __init__(self, first: Given, second: Given | socket.socket, *, timeout_s: float) -> None:
        """A socket leads to a `serve_side` elsewhere. It is shut down in the end, and closed by whoever opened it."""
        self._timeout_s = timeout_s
        self._endpoint_names: dict[str, str] = {}
        self._sides = [_start("first", first)]
        try:
            if isinstance(second, socket.socket):
                self._sides.append(AskedSide(name="second", stream=second.dup()))
            else:
                self._sides.append(_start("second", second))
        except BaseException:
            self.close(kill=True)
            raise
        self.process_ids = [side.process.pid if side.process else None for side in self._sides]

    def name_endpoint(self, side: int, name: str) -> None:
        """Files of that name are removed in the end."""
        self._endpoint_names[self._sides[side].name] = name

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

    def _collect(self, asked: list[AskedSide], deadline: float, told: _Told) -> None:
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
            if side.name in self._endpoint_names:
                remove_files(self._endpoint_names[side.name])


def _start(name: str, given: Given) -> AskedSide:
    return AskedSide.start(name, lambda stream, errors: start_side(stream, given, errors=errors))


def _tell(side: AskedSide, question: wire.Question, timeout_s: float, told: _Told) -> None:
    try:
        wire.tell(side.stream, question, timeout_s=timeout_s)
    except TimeoutError:
        told.refused.append(_timed_out(side, "takes no question"))
    except OSError:
        told.gone.append(side)


def _take(side: AskedSide, deadline: float, told: _Told) -> None:
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


def _timed_out(side: AskedSide, text: str) -> wire.Refused:
    return wire.Refused(call=f"limits: {side.name} side", code=errno.ETIMEDOUT, text=text)


def _error_of(refused: wire.Refused) -> InputError | FabricError:
    if refused.field is not None:
        return InputError(refused.field, refused.text)
    return FabricError(refused.call, refused.code, refused.text)
