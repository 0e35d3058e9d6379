"""An endpoint on one of two hosts, asked by lines of JSON (see `line_process`): host_endpoint.py ADDRESS TRANSPORT..

    [0, HALF)          inbox: poison until others write
    [HALF, 2 * HALF)   outbox: bytes that follow from the host's address, so that the other side knows them, too

Its memory has these two halves. One thread; what the fabric tells is kept for the question that asks for it.
"""

import mmap
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from ipaddress import ip_address
from typing import Any, cast

import numpy as np
import xxhash
from line_process import serve
from numpy.typing import NDArray

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
from headrace.fabric.native import NativeFabric, Transport

MIB = 1 << 20
HALF = 72 * MIB
POISON = 0xA5
SRC_STRIDE = 64 << 10
DST_STRIDE = SRC_STRIDE + 4096  # between pages there is always a gap, and the last page ends before HALF
MOST_PAGES = HALF // DST_STRIDE


def open_fabric(memory_fd: int, length: int, address: str, transports: Sequence[Transport] = ("tcp",)) -> NativeFabric:
    """The one place that says how a fabric between hosts is made."""
    return NativeFabric(memory_fd, length, transports=transports, nodes=(address,))


@cache
def outbox_of(address: str) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(int(ip_address(address))).bytes(HALF), dtype=np.uint8)


def scattered(imm: int, num_pages: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the pages of the transfer with this imm lie: in the outbox, and in the inbox."""
    rng = np.random.default_rng(imm)
    return rng.permutation(MOST_PAGES)[:num_pages], rng.permutation(MOST_PAGES)[:num_pages]


class HostEndpoint:
    """Each method is one question; a wait tells None when nothing came in time."""

    def __init__(self, address: str, transports: Sequence[Transport]) -> None:
        fd = os.memfd_create("headrace-host", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 2 * HALF)
        self._memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, 2 * HALF), dtype=np.uint8)
        self._memory[:HALF] = POISON
        self._memory[HALF:] = outbox_of(address)
        self.fabric = open_fabric(fd, 2 * HALF, address, transports)
        self._peers: dict[str, PeerId] = {}
        self._events: list[Event] = []

    # ---- peers

    def grant(self, to: str) -> str:
        return self.fabric.grant(self._peer(to)).encode().hex()

    def connect(self, to: str, descriptor: str) -> None:
        self.fabric.connect(self._peer(to), Descriptor.decode(bytes.fromhex(descriptor)))

    def revoke(self, to: str) -> bool:
        return self.fabric.revoke(self._peer(to))

    def transport(self, to: str) -> str:
        return self.fabric.transport(self._peer(to))

    def remove(self, to: str) -> None:
        self.fabric.remove_peer(self._peers.pop(to))

    # ---- writes

    def arm(self, imm: int, expected: int) -> None:
        self.fabric.arm(Imm(imm), expected)

    def write(self, to: str, imm: int, num_pages: int, length: int) -> dict[str, int]:
        """-> the transfer, and when it was begun."""
        sources, targets = scattered(imm, num_pages)
        writes = PageWrites(
            src=Pages(offset=HALF, layer_stride=0, page_stride=SRC_STRIDE, indices=sources),
            dst=Pages(offset=0, layer_stride=0, page_stride=DST_STRIDE, indices=targets),
            positions=np.arange(num_pages, dtype=np.int64),
            layer_begin=0,
            layer_end=1,
            length=length,
        )
        at_ns = time.monotonic_ns()
        transfer = self.fabric.open_transfer(self._peer(to), Imm(imm))
        self.fabric.submit_pages(transfer, writes)
        self.fabric.submit_last(transfer)
        return {"transfer": transfer, "at_ns": at_ns}

    def done(self, transfer: int, seconds: float = 20.0) -> dict[str, Any] | None:
        event = self._wait(lambda event: isinstance(event, TransferDone) and event.transfer == transfer, seconds)
        return None if event is None else asdict(event)

    def reached(self, imm: int, seconds: float = 20.0) -> dict[str, Any] | None:
        event = self._wait(lambda event: isinstance(event, Reached) and event.imm == imm, seconds)
        return None if event is None else asdict(event)

    def num_told(self, transfer: int) -> int:
        """How often the end of a transfer was told."""
        self._events += self.fabric.drain_events()
        return sum(isinstance(event, TransferDone) and event.transfer == transfer for event in self._events)

    # ---- bytes

    def poison(self) -> None:
        self._memory[:HALF] = POISON

    def wrong_bytes(self, sender: str, imm: int, num_pages: int, length: int) -> dict[str, int]:
        """`missing`: bytes of the transfer's pages that are not there. `foreign`: bytes of the inbox that are neither
        poison nor what that transfer puts there."""
        outbox, inbox = outbox_of(sender), self._memory[:HALF]
        expected = np.full(HALF, POISON, dtype=np.uint8)
        for source, target in zip(*scattered(imm, num_pages), strict=True):
            begin = source * SRC_STRIDE
            expected[target * DST_STRIDE :][:length] = outbox[begin : begin + length]
        differs = inbox != expected
        return {
            "missing": int((differs & (inbox == POISON)).sum()),
            "foreign": int((differs & (inbox != POISON)).sum()),
        }

    # ---- messages

    def send(self, to: str, num_bytes: int, seed: int) -> str:
        """-> the message's digest."""
        message = np.random.default_rng(seed).bytes(num_bytes)
        self.fabric.send(self._peer(to), message)
        return xxhash.xxh3_64_hexdigest(message)

    def message(self, seconds: float = 20.0) -> str | None:
        event = self._wait(lambda event: isinstance(event, MessageReceived), seconds)
        return xxhash.xxh3_64_hexdigest(event.message) if isinstance(event, MessageReceived) else None

    def echo(self, to: str, num_messages: int) -> None:
        for _ in range(num_messages):
            event = self._wait(lambda event: isinstance(event, MessageReceived), 20.0)
            assert isinstance(event, MessageReceived), "nothing to echo"
            self.fabric.send(self._peer(to), event.message)

    def round_trips(self, to: str, num_messages: int) -> list[float]:
        """Seconds, of messages that the other side echoes."""
        took = []
        for number in range(num_messages):
            begin = time.monotonic()
            self.fabric.send(self._peer(to), bytes([number + 1]))
            event = self._wait(lambda event: isinstance(event, MessageReceived), 20.0)
            assert isinstance(event, MessageReceived) and event.message == bytes([number + 1])
            took.append(time.monotonic() - begin)
        return took

    # ---- the endpoint

    def statistics(self) -> dict[str, Any]:
        return asdict(self.fabric.statistics())

    def close(self) -> float:
        """-> the seconds it took."""
        begin = time.monotonic()
        self.fabric.close()
        return time.monotonic() - begin

    def _peer(self, address: str) -> PeerId:
        if address not in self._peers:
            self._peers[address] = self.fabric.add_peer(bytes.fromhex(address))
        return self._peers[address]

    def _wait(self, wanted: Callable[[Event], bool], seconds: float) -> Event | None:
        deadline = time.monotonic() + seconds
        while True:
            self._events += self.fabric.drain_events()
            for event in self._events:
                if wanted(event):
                    if isinstance(event, MessageReceived):
                        self._events.remove(event)
                    return event
            rest = deadline - time.monotonic()
            if rest <= 0:
                return None
            select.select([self.fabric.event_fd], [], [], rest)


if __name__ == "__main__":
    _endpoint = HostEndpoint(sys.argv[1], cast(list[Transport], sys.argv[2:]))
    serve(_endpoint, {"address": _endpoint.fabric.address.hex()})
