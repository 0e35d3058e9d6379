"""The process that one engine lives in: does what it is asked, one thing at a time, until nobody asks any more.

Its main thread reads questions and plays the engine's part. A second thread only waits for the questioner to go away:
the process must not outlive the one that started it, nor the connection of a client elsewhere.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from headrace.errors import FabricError, InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.loops import CopyLoop, copy_methods
from headrace.fabric.limits.placement import Offsets
from headrace.fabric.measure import questions as q
from headrace.fabric.measure.engine import Engine
from headrace.fabric.measure.frames import read_frame, write_frame
from headrace.fabric.measure.marked import MarkedMemory
from headrace.fabric.native import available_transports

GRACE_S = 1.0
"""How long an orderly end may take once the questioner is gone."""

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
    """Its questions come through `stream`, of which it has a copy. `errors` is a file for what it writes to stderr
    (None: it goes where ours goes)."""
    program = "from headrace.fabric.measure.side import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, str(stream.fileno()), msgspec.json.encode(given).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[stream.fileno(), *given.descriptors()],
    )


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
                digest = self._need_memory().digest(_offsets(question.offsets), question.page_bytes)
                return q.Digested(digest=digest)
            case q.CountChanged():
                changed = self._need_memory().num_changed_beside(_offsets(question.offsets), question.page_bytes)
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
        fd = os.memfd_create("headrace-measure", os.MFD_CLOEXEC)
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
        src, dst = _offsets(question.src_offsets), _offsets(question.dst_offsets)
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
            src, dst = _offsets(question.src_offsets), _offsets(question.dst_offsets)
            return engine.write_pages(src, dst, question.page_bytes)
        case q.ReceivePages(num_pages=num_pages):
            return engine.receive_pages(num_pages)
        case q.SubmitPages():
            src, dst = _offsets(question.src_offsets), _offsets(question.dst_offsets)
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


def _offsets(wired: bytes) -> Offsets:
    if len(wired) % 8:
        raise InputError("offsets", f"must be of 8 bytes each, are {len(wired)} bytes")
    return np.frombuffer(wired, dtype="<i8").astype(np.int64)


# ---- the process -----------------------------------------------------------------------------------------------


def _end_with(stream: socket.socket) -> None:
    """In a thread: when the questioner is gone and the main thread does not notice, ends the process."""
    gone = select.poll()
    gone.register(stream, select.POLLRDHUP)
    gone.poll()
    time.sleep(GRACE_S)
    os._exit(1)


def _refused(error: InputError | FabricError) -> wire.Refused:
    if isinstance(error, InputError):
        return wire.Refused(field=error.field, text=str(error).removeprefix(f"{error.field}: ")[:4096])
    return wire.Refused(call=error.call[:256], code=error.code, text=error.text[:4096])


def _answer_all(stream: socket.socket, side: Side) -> None:
    while (body := read_frame(stream)) is not None:
        question = q.questions.decode(body)
        try:
            answer = side.answer(question)
        except (InputError, FabricError) as error:
            answer = _refused(error)
        except OSError as error:
            answer = wire.Refused(
                call=type(question).__name__, code=error.errno or 0, text=(error.strerror or str(error))[:4096]
            )
        write_frame(stream, q.encode(answer))


def main() -> None:
    given = msgspec.json.decode(sys.argv[2], type=Given)
    # Ctrl-C reaches the whole group of a terminal: whoever started this ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as stream:
        side = Side(stream, given)
        threading.Thread(target=_end_with, args=(stream,), daemon=True).start()
        try:
            _answer_all(stream, side)
        except OSError:
            pass  # the questioner is gone in the middle of something
        except ValueError as error:
            sys.exit(f"not a question: {error}")
        finally:
            side.close()
