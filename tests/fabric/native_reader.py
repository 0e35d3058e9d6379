"""An endpoint in a process of its own for the native fabric's tests, over one poisoned memory: told what to do by lines
on stdin, answering each with one line on stdout. `ReaderProcess` is the test's side of it; it can write, too."""

import ctypes
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import numpy as np
import xxhash

from headrace.fabric.interface import (
    Descriptor,
    Event,
    Imm,
    MessageReceived,
    Pages,
    PageWrites,
    PeerId,
    Reached,
    Revoked,
    TransferDone,
)
from headrace.fabric.native import NativeFabric, Transport

LENGTH = 32 << 20
POISON = b"\xa5"
DEADLINE_S = 20.0


class _Reader:
    """Each method is one verb; its parameters and its answer are words."""

    def __init__(self, transport: Transport, port: int, silence_s: float) -> None:
        self._fd = os.memfd_create("headrace-reader", os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, LENGTH)
        self._memory = mmap.mmap(self._fd, LENGTH)
        self._memory[:] = POISON * LENGTH
        self._fabric = NativeFabric(self._fd, LENGTH, transports=(transport,), port=port, silence_s=silence_s)
        self._peers: dict[str, PeerId] = {}
        self._events: list[Event] = []

    def address(self) -> str:
        return self._fabric.address.hex()

    def grant(self, address: str) -> str:
        if address not in self._peers:
            self._peers[address] = self._fabric.add_peer(bytes.fromhex(address))
        return self._fabric.grant(self._peers[address]).encode().hex()

    def revoke(self, address: str) -> str:
        """Answers when nothing of that peer can land any more."""
        peer = self._peers[address]
        if not self._fabric.revoke(peer):
            self._wait(lambda event: event == Revoked(peer=peer))
        return "revoked"

    def remove(self, address: str) -> str:
        self._fabric.remove_peer(self._peers.pop(address))
        return "removed"

    def connect(self, address: str, descriptor: str) -> str:
        if address not in self._peers:
            self._peers[address] = self._fabric.add_peer(bytes.fromhex(address))
        self._fabric.connect(self._peers[address], Descriptor.decode(bytes.fromhex(descriptor)))
        return "connected"

    def fill(self, byte: str) -> str:
        self._memory[:] = bytes([int(byte)]) * LENGTH
        return "filled"

    def write(self, address: str, imm: str, num_pages: str, page_bytes: str) -> str:
        """Pages 0.. of ours to the same pages there; nothing is waited for."""
        places = Pages(
            offset=0, layer_stride=0, page_stride=int(page_bytes), indices=np.arange(int(num_pages), dtype=np.int64)
        )
        writes = PageWrites(
            src=places, dst=places, positions=places.indices, layer_begin=0, layer_end=1, length=int(page_bytes)
        )
        transfer = self._fabric.open_transfer(self._peers[address], Imm(int(imm)))
        self._fabric.submit_pages(transfer, writes)
        self._fabric.submit_last(transfer)
        return str(transfer)

    def write_once(self, address: str, imm: str, length: str) -> str:
        """One write of our first bytes to the same place there."""
        transfer = self._fabric.open_transfer(self._peers[address], Imm(int(imm)))
        self._fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=int(length))
        self._fabric.submit_last(transfer)
        return str(transfer)

    def send(self, address: str, num_bytes: str) -> str:
        """A message of our first bytes."""
        if address not in self._peers:
            self._peers[address] = self._fabric.add_peer(bytes.fromhex(address))
        self._fabric.send(self._peers[address], self._memory[: int(num_bytes)])
        return "queued"

    def done(self, transfer: str) -> str:
        event = self._wait(lambda event: isinstance(event, TransferDone) and event.transfer == int(transfer))
        assert isinstance(event, TransferDone)
        return f"{event.num_posted} {event.num_failed}"

    def poison(self) -> str:
        self._memory[:] = POISON * LENGTH
        return "poisoned"

    def arm(self, imm: str, expected: str) -> str:
        self._fabric.arm(Imm(int(imm)), int(expected))
        return "armed"

    def reached(self, imm: str) -> str:
        event = self._wait(lambda event: isinstance(event, Reached) and event.imm == int(imm))
        assert isinstance(event, Reached)
        return str(event.at_ns)

    def message(self) -> str:
        event = self._wait(lambda event: isinstance(event, MessageReceived))
        assert isinstance(event, MessageReceived)
        return xxhash.xxh3_64_hexdigest(event.message)

    def hash(self, begin: str, end: str) -> str:
        return xxhash.xxh3_64_hexdigest(self._memory[int(begin) : int(end)])

    def hash_pages(self, stride: str, length: str, pages: str) -> str:
        """Of these pages, in this order."""
        hashed = xxhash.xxh3_64()
        for page in map(int, pages.split(",")):
            hashed.update(self._memory[page * int(stride) : page * int(stride) + int(length)])
        return hashed.hexdigest()

    def retarget(self, imm: str, expected: str) -> str:
        self._fabric.retarget(Imm(int(imm)), int(expected))
        return "retargeted"

    def disarm(self, imm: str) -> str:
        self._fabric.disarm(Imm(int(imm)))
        return "disarmed"

    def count(self, imm: str) -> str:
        """Arrivals, once its target is met."""
        event = self._wait(lambda event: isinstance(event, Reached) and event.imm == int(imm))
        assert isinstance(event, Reached)
        return str(event.arrivals)

    def first_byte(self, offset: str) -> str:
        return str(self._memory[int(offset)])

    def arrivals(self) -> str:
        return str(self._fabric.statistics().num_arrivals)

    def close(self) -> str:
        self._fabric.close()
        return "closed"

    def fork(self) -> str:
        """A child that sleeps, and holds all that a child inherits; its pid."""
        child = os.fork()
        if child == 0:
            time.sleep(60.0)
            os._exit(0)
        return str(child)

    def hold_the_gil(self, seconds: str) -> str:
        ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))  # a PyDLL keeps it
        return "back"

    def num_events(self, kind: str) -> str:
        self._events += self._fabric.drain_events()
        return str(sum(type(event).__name__ == kind for event in self._events))

    def _wait(self, wanted: Callable[[Event], bool]) -> Event:
        while True:
            for event in self._events:
                if wanted(event):
                    self._events.remove(event)
                    return event
            readable, _, _ = select.select([self._fabric.event_fd], [], [], DEADLINE_S)
            if not readable:
                raise TimeoutError(f"never told; {self._events}, {self._fabric}")
            self._events += self._fabric.drain_events()


class ReaderProcess:
    """Starts a reader; ends it, however it is by then, on leaving the context."""

    def __init__(self, transport: Transport, port: int = 0, *, silence_s: float = 2.0) -> None:
        self._arguments = (transport, str(port), str(silence_s))

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def stop(self) -> None:
        """Every thread of it has stopped when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        threads = [thread / "stat" for thread in Path(f"/proc/{self.process.pid}/task").iterdir()]
        while any(thread.read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
            time.sleep(0)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def ask(self, *words: str | int) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the reader ended with {self.process.wait()} at {words}"
        return answer.rstrip("\n")


def _serve() -> None:
    reader = _Reader(cast("Transport", sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    for line in sys.stdin:
        verb, *arguments = line.split()
        print(getattr(reader, verb)(*arguments), flush=True)


if __name__ == "__main__":
    _serve()
