"""The two sides of an engine's link, asked together: two processes of this host, or one and another machine's.

The first failure ends both; what is told of it is the end of a process, where there was one, rather than what the other
side saw of it. Used by one thread at a time, which blocks.
"""

import errno
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from headrace.errors import FabricError, InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.asked import LAST_WORDS_S, AskedSide
from headrace.fabric.limits.frames import read_frame, write_frame
from headrace.fabric.limits.memories import Memories
from headrace.fabric.measure import questions as q
from headrace.fabric.measure.side import Given, start_side

TIMEOUT_S = 120.0
"""Longer than a side waits for the other by itself."""

ROOM = "measure"

A = TypeVar("A", bound=wire.Message)


class OneSide(AskedSide):
    """One that an engine lives in."""

    def tell(self, question: q.Question) -> None:
        try:
            write_frame(self.stream, q.encode(question), timeout_s=TIMEOUT_S)
        except OSError as error:
            raise self.why_gone(ROOM) from error

    def answer(self, deadline: float) -> q.Answer:
        """Raises FabricError where it is gone, or answers what is no answer."""
        try:
            body = read_frame(self.stream, deadline=deadline)
            if body is not None:
                return q.answers.decode(body)
        except ValueError as error:
            raise FabricError(self._call, errno.EPROTO, str(error)) from error
        except OSError as error:
            raise self.why_gone(ROOM) from error
        raise self.why_gone(ROOM)

    @property
    def _call(self) -> str:
        return f"{ROOM}: {self.name} side"


class Sides:
    """`first` writes and pings, `second` receives and answers."""

    def __init__(self, first: OneSide, second: OneSide) -> None:
        self.first = first
        self.second = second

    def ask(self, first: q.Question | None, second: q.Question | None) -> list[q.Answer]:
        """The answers, of the first side first. Raises InputError and FabricError."""
        asked = [(side, question) for side, question in ((self.first, first), (self.second, second)) if question]
        for side, question in reversed(asked):  # who receives is ready first
            side.tell(question)
        answers: dict[str, q.Answer] = {}
        deadline = time.monotonic() + TIMEOUT_S
        with selectors.DefaultSelector() as waiting:
            for side, _ in asked:
                waiting.register(side.stream, selectors.EVENT_READ, side)
            while waiting.get_map():
                ready = waiting.select(max(deadline - time.monotonic(), 0.0))
                if not ready:
                    raise FabricError("measure", errno.ETIMEDOUT, f"no answer in {TIMEOUT_S:g} s")
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    answers[key.data.name] = self._checked(key.data, key.data.answer(deadline))
        return [answers[side.name] for side, _ in asked]

    def ask_first(self, question: q.Question, kind: type[A]) -> A:
        return expected(kind, self.ask(question, None)[0])

    def ask_second(self, question: q.Question, kind: type[A]) -> A:
        return expected(kind, self.ask(None, question)[0])

    def _checked(self, side: OneSide, answer: q.Answer) -> q.Answer:
        if not isinstance(answer, wire.Refused):
            return answer
        other = self.second if side is self.first else self.first
        if other.is_gone(LAST_WORDS_S):
            raise other.why_gone(ROOM)
        if answer.field is not None:
            raise InputError(answer.field, answer.text)
        raise FabricError(answer.call, answer.code, answer.text)


def expected(kind: type[A], answer: q.Answer) -> A:
    """Raises FabricError where a side elsewhere answers another question."""
    if not isinstance(answer, kind):
        raise FabricError("measure", errno.EPROTO, f"answered {type(answer).__name__} instead of {kind.__name__}")
    return answer


@contextmanager
def local_sides(memories: Memories, cpus: tuple[int, int]) -> Iterator[Sides]:
    """Two processes of this host, each over one of the memories."""
    src, dst = (memories.src_fd, memories.src_bytes), (memories.dst_fd, memories.dst_bytes)
    node = "127.0.0.1"
    with _ending() as started:
        started.append(_start("first", Given(memory=src, there=dst, cpu=cpus[0], node=node)))
        started.append(_start("second", Given(memory=dst, cpu=cpus[1], node=node)))
        yield Sides(*started)


@contextmanager
def far_sides(memories: Memories, cpu: int, stream: socket.socket) -> Iterator[Sides]:
    """One process here, and one that answers at the other end of `stream`, which is closed in the end. The engine here
    listens where that connection begins."""
    name: tuple[str, int] = stream.getsockname()
    with _ending() as started:
        given = Given(memory=(memories.src_fd, memories.src_bytes), cpu=cpu, node=name[0])
        second = OneSide(name="second", stream=stream)
        started.append(second)
        started.append(_start("first", given))
        sides = Sides(started[1], second)
        sides.ask_second(wire.MakeMemory(num_bytes=memories.dst_bytes), wire.Done)
        yield sides


@contextmanager
def _ending() -> Iterator[list[OneSide]]:
    started: list[OneSide] = []
    well = False
    try:
        yield started
        well = True
    finally:  # after an interrupt, too: nobody waits for sides in the middle of something
        for side in started:
            side.hang_up()
        for side in started:
            side.end(kill=not well)


def _start(name: str, given: Given) -> OneSide:
    return OneSide.start(name, lambda stream, errors: start_side(stream, given, errors=errors))
