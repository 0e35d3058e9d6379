"""The process that one engine lives in: does what it is asked, one thing at a time, until nobody asks any more.

How it is started, and how it ends, is `limits.answering`'s: not later than the one that started it, nor than the
connection of a client elsewhere.
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from headrace.errors import InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.answering import answer_all, asker, offsets, start_process
from headrace.fabric.limits.loops import CopyLoop, copy_methods
from headrace.fabric.measure import questions as q
from headrace.fabric.measure.engine import Engine
from headrace.fabric.measure.marked import MarkedMemory
from headrace.fabric.native import available_transports

RDMA = ("efa", "verbs")
"""Transports whose provider chooses the NIC."""


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a side gets from the process that starts it, and no question can change: open files by their numbers, the
    owner's CPU, and where to listen (None: where the questions arrive)."""

    memory: tuple[int, int] | None = None  # descriptor, length
    there: tuple[int, int] | None = None  # the other side's, on one host
    cpu: int | None = None
    node: str | None = None

    def descriptors(self) -> list[int]:
        return [memory[0] for memory in (self.memory, self.there) if memory is not None]


def start_side(stream: socket.socket, given: Given, *, errors: int | None = None) -> subprocess.Popen[bytes]:
    return start_process(__name__, stream, given, errors=errors)


class Side:
    """What there is of one process: a memory, at most one engine."""

    def __init__(self, stream: socket.socket, given: Given) -> None:
        self._stream = stream
        self._given = given
        self._memory = MarkedMemory(*given.memory) if given.memory else None
        self._engine: Engine | None = None
        self._copies: CopyLoop | None = None

    def answer(self, question: q.Question) -> q.Answer:
        """Raises InputError and FabricError."""
        match question:
            case q.Describe():
                return q.Described(transports=list(available_transports()))
            case wire.MakeMemory(num_bytes=num_bytes):
                self._make_memory(num_bytes)
            case q.Fill(seed=seed):
                with self._on_cpu():
                    self._need_memory().fill(seed)
            case q.Poison():
                with self._on_cpu():
                    self._need_memory().poison()
            case q.DigestPages():
                digest = self._need_memory().digest(offsets(question.offsets), question.page_bytes)
                return q.Digested(digest=digest)
            case q.CountChanged():
                changed = self._need_memory().num_changed_beside(offsets(question.offsets), question.page_bytes)
                return q.Changed(num_bytes=changed)
            case q.CopyPages():
                return self._copy(question)
            case q.Open(transport=transport):
                return q.Opened(address=self._open(transport))
            case _:
                return _ask_engine(self._need_engine(), question)
        return wire.Done()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _make_memory(self, num_bytes: int) -> None:
        if self._memory is not None:
            raise InputError("memory", "must be made once, and not where one was given")
        fd = os.memfd_create("headrace-measure", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        self._memory = MarkedMemory(fd, num_bytes)

    def _open(self, transport: str) -> bytes:
        self.close()
        memory = self._need_memory()
        nodes = () if transport in RDMA else (self._node(),)
        self._engine = Engine(memory.fd, memory.length, transport, nodes=nodes, cpu=self._given.cpu)
        return self._engine.address

    def _node(self) -> str:
        if self._given.node is not None:
            return self._given.node
        name: tuple[str, int] = self._stream.getsockname()
        return name[0]

    def _copy(self, question: q.CopyPages) -> q.Copied:
        memory, there = self._need_memory(), self._given.there
        if there is None:
            raise InputError("question", "this side has no other memory on its host")
        if self._copies is None:
            self._copies = CopyLoop(memory.fd, memory.length, *there)
        method = copy_methods()[0]
        src, dst = offsets(question.src_offsets), offsets(question.dst_offsets)
        with self._on_cpu():
            ns, cpu_ns = self._copies.copy(src, dst, question.page_bytes, method)
        return q.Copied(method=method, spent=wire.Spent(ns=ns, cpu_ns=cpu_ns))

    @contextmanager
    def _on_cpu(self) -> Iterator[None]:
        """The owner's, where it would have been done by the engine. Otherwise this thread keeps out of its way."""
        usable = os.sched_getaffinity(0)
        os.sched_setaffinity(0, usable if self._given.cpu is None else {self._given.cpu})
        try:
            yield
        finally:
            os.sched_setaffinity(0, usable)

    def _need_memory(self) -> MarkedMemory:
        if self._memory is None:
            raise InputError("question", "must come after MakeMemory")
        return self._memory

    def _need_engine(self) -> Engine:
        if self._engine is None:
            raise InputError("question", "must come after Open")
        return self._engine


def _ask_engine(engine: Engine, question: q.Question) -> q.Answer:
    match question:
        case q.Admit(address=address):
            return q.Admitted(descriptor=engine.admit(address))
        case q.Join(descriptor=descriptor):
            engine.join(descriptor)
        case q.WritePages():
            src, dst = offsets(question.src_offsets), offsets(question.dst_offsets)
            return engine.write_pages(src, dst, question.page_bytes)
        case q.ReceivePages(num_pages=num_pages):
            return engine.receive_pages(num_pages)
        case q.SubmitPages():
            src, dst = offsets(question.src_offsets), offsets(question.dst_offsets)
            return engine.submit_pages(src, dst, question.page_bytes, question.num_rounds)
        case q.CollectPages(num_pages=num_pages, num_rounds=num_rounds):
            return engine.collect_pages(num_pages, num_rounds)
        case q.Ping(by=by, num_rounds=num_rounds, pause_ns=pause_ns):
            return engine.ping(by, num_rounds, pause_ns)
        case q.Pong(by=by, num_rounds=num_rounds):
            engine.pong(by, num_rounds)
        case q.Idle(ns=ns):
            return engine.idle(ns)
    return wire.Done()


def main() -> None:
    stream, given_as = asker()
    with stream:
        answer_all(stream, Side(stream, msgspec.json.decode(given_as, type=Given)), q.questions.decode)
