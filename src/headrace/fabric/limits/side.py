"""One of the two processes of a link: does what it is asked, one thing at a time, until nobody asks any more.

How it is started, and how it ends, is `answering`'s. The loops run on its main thread.
"""

import os
import socket
import subprocess

import msgspec
import numpy as np

from headrace.errors import InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.answering import answer_all, asker, offsets, start_process
from headrace.fabric.limits.loops import StreamLoop, WakeLoop, WriteLoop
from headrace.fabric.limits.names import remove_files


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a side of this host gets from the one that starts it: open files by their numbers, and where to run."""

    memory: tuple[int, int] | None = None  # descriptor, length
    wake: tuple[int, int, int] | None = None  # words, ping, pong
    cpu: int | None = None

    def descriptors(self) -> list[int]:
        return [*(self.memory or ())[:1], *(self.wake or ())]


def start_side(stream: socket.socket, given: Given, *, errors: int | None = None) -> subprocess.Popen[bytes]:
    return start_process(__name__, stream, given, errors=errors)


def serve_side(
    connection: socket.socket, *, cpu: int | None = None, errors: int | None = None
) -> subprocess.Popen[bytes]:
    """The second side for somebody on another host, in a process that ends with the connection. The caller closes his
    own copy of that at once, and waits for the process some time.

    Whoever is at the other end can keep a core busy and fill 1 GiB for as long as he stays connected: only for peers
    that may do so.
    """
    return start_side(connection, Given(cpu=cpu), errors=errors)


class Side:
    """The loops of one process, by the questions that make and run them."""

    def __init__(self, stream: socket.socket, given: Given) -> None:
        self._stream = stream
        self._wake = given.wake
        self._memory = given.memory
        self._listener: socket.socket | None = None
        self._loop: WakeLoop | StreamLoop | WriteLoop | None = None
        self.endpoint_name: str | None = None

    def answer(self, question: wire.Question) -> wire.Answer:
        """Raises InputError and FabricError."""
        match question:
            case wire.MakeMemory(num_bytes=num_bytes):
                self._make_memory(num_bytes)
            case wire.OpenWake(kind=kind):
                self._loop = WakeLoop(kind, *self._given_wake())
            case wire.Listen():
                return self._listen()
            case wire.Connect(host=host, port=port):
                with socket.create_connection((host, port)) as connection:
                    self._join(connection)
            case wire.OpenEndpoint():
                return self._open_endpoint(question)
            case wire.ConnectEndpoint(target=target):
                self._endpoint().connect(target.address, target.base, target.key, target.length)
            case wire.Send():
                return self._send(question)
            case wire.Receive():
                return self._receive(question)
            case wire.Ping(num_rounds=num_rounds, pause_ns=pause_ns):
                return self._ping(num_rounds, pause_ns)
            case wire.Pong(num_rounds=num_rounds):
                self._joined().pong(num_rounds)
        return wire.Done()

    def close(self) -> None:
        """Endpoints close in order, and take their files with them."""
        self._loop = None
        if self._listener is not None:
            self._listener.close()

    def remove_files(self) -> None:
        """Of an endpoint that is not closed any more."""
        if self.endpoint_name is not None:
            remove_files(self.endpoint_name)

    def _make_memory(self, num_bytes: int) -> None:
        if self._memory is not None:
            raise InputError("memory", "must be made once, and not where one was given")
        fd = os.memfd_create("headrace-limits", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        self._memory = fd, num_bytes

    def _listen(self) -> wire.Listening:
        family, host = self._own_address()
        self._listener = socket.create_server((host, 0), family=family, backlog=1)
        return wire.Listening(port=self._listener.getsockname()[1])

    def _own_address(self) -> tuple[socket.AddressFamily, str]:
        if self._stream.family in (socket.AF_INET, socket.AF_INET6):
            return socket.AddressFamily(self._stream.family), self._stream.getsockname()[0]
        return socket.AF_INET, "127.0.0.1"

    def _join(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._loop = StreamLoop(connection.fileno(), *self._given_memory())

    def _open_endpoint(self, question: wire.OpenEndpoint) -> wire.Target:
        self.endpoint_name = question.name
        node = question.name or question.node
        if node is None:
            node = self._own_address()[1] if question.provider.startswith("tcp") else ""
        self._loop = WriteLoop(question.provider, node, *self._given_memory())
        address, base, key, length = self._loop.target
        return wire.Target(address=address, base=base, key=key, length=length)

    def _send(self, question: wire.Send) -> wire.Spent:
        src, dst = offsets(question.src_offsets), offsets(question.dst_offsets)
        match self._joined():
            case StreamLoop() as loop:
                return _spent(loop.send(src, question.page_bytes))
            case WriteLoop() as loop:
                return _spent(loop.send(src, dst, question.page_bytes, question.window))
            case _:
                raise InputError("question", "a wake loop carries no pages")

    def _receive(self, question: wire.Receive) -> wire.Spent:
        dst = offsets(question.dst_offsets)
        match self._joined():
            case StreamLoop() as loop:
                return _spent(loop.receive(dst, question.page_bytes))
            case WriteLoop() as loop:
                return _spent(loop.receive(len(dst)))
            case _:
                raise InputError("question", "a wake loop carries no pages")

    def _ping(self, num_rounds: int, pause_ns: int) -> wire.Times:
        times = self._joined().ping(num_rounds, pause_ns)
        p50, p99 = np.percentile(times, [50, 99], method="inverted_cdf")
        return wire.Times(p50_ns=int(p50), p99_ns=int(p99))

    def _joined(self) -> WakeLoop | StreamLoop | WriteLoop:
        if self._listener is not None:
            with self._listener as listener:
                connection, _ = listener.accept()
            self._listener = None
            with connection:
                self._join(connection)
        if self._loop is None:
            raise InputError("question", "must come after one that opens a loop")
        return self._loop

    def _endpoint(self) -> WriteLoop:
        if not isinstance(self._loop, WriteLoop):
            raise InputError("question", "must come after OpenEndpoint")
        return self._loop

    def _given_wake(self) -> tuple[int, int, int]:
        if self._wake is None:
            raise InputError("question", "this side shares no words with another")
        return self._wake

    def _given_memory(self) -> tuple[int, int]:
        if self._memory is None:
            raise InputError("question", "must come after MakeMemory")
        return self._memory


def _spent(told: tuple[int, int]) -> wire.Spent:
    return wire.Spent(ns=told[0], cpu_ns=told[1])


def main() -> None:
    stream, given_as = asker()
    given = msgspec.json.decode(given_as, type=Given)
    if given.cpu is not None:
        os.sched_setaffinity(0, {given.cpu})
    with stream:
        side = Side(stream, given)
        answer_all(stream, side, wire.questions.decode, last_act=side.remove_files)
