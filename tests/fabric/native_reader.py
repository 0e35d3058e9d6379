"""An endpoint in a process of its own for the native fabric's tests, over one poisoned memory: told what to do by lines
on stdin, answering each with one line on stdout. `ReaderProcess` is the test's side of it; it can write, too."""

import mmap
import os
import select
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

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
    TransferDone,
)
from headrace.fabric.native import NativeFabric

LENGTH = 32 << 20
POISON = b"\xa5"
DEADLINE_S = 20.0


class _Reader:
    """Each method is one verb; its parameters and its answer are words."""

    def __init__(self, port: int = 0) -> None:
        self._fd = os.memfd_create("headrace-reader")
        os.ftruncate(self._fd, LENGTH)
        self._memory = mmap.mmap(self._fd, LENGTH)
        self._memory[:] = POISON * LENGTH
        self._fabric = NativeFabric(self._fd, LENGTH, port=port)
        self._peers: dict[str, PeerId] = {}
        self._events: list[Event] = []

    def address(self) -> str:
        return self._fabric.address.hex()

    def grant(self, address: str) -> str:
        if address not in self._peers:
            self._peers[address] = self._fabric.add_peer(bytes.fromhex(address))
        return self._fabric.grant(self._peers[address]).encode().hex()

    def revoke(self, address: str) -> str:
        self._fabric.revoke(self._peers[address])
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

    def first_byte(self, offset: str) -> str:
        return str(self._memory[int(offset)])

    def arrivals(self) -> str:
        return str(self._fabric.statistics().num_arrivals)

    def close(self) -> str:
        self._fabric.close()
        return "closed"

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

    def __init__(self, port: int = 0) -> None:
        self._port = port

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__, str(self._port)],
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

    def ask(self, *words: str | int) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the reader ended with {self.process.wait()} at {words}"
        return answer.rstrip("\n")


def _serve() -> None:
    reader = _Reader(int(sys.argv[1]))
    for line in sys.stdin:
        verb, *arguments = line.split()
        print(getattr(reader, verb)(*arguments), flush=True)


if __name__ == "__main__":
    _serve()
