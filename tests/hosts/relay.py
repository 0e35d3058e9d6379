"""Joins two network namespaces by a TUN device in each: packets pass after a fixed delay, a seeded fraction never.

    relay.py DEVICE PID_OF_B DELAY_S LOSS SEED      (run in the namespace of the first host)

Stands in for netem where the kernel has none. Asked by lines of JSON (see `line_process`): `stop` (whatever is on the
way or comes is lost, as on a link that is down), `go`, `counts`. One thread, one loop.
"""

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from line_process import say

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MOST_PACKET = 1 << 16
PER_TURN = 64


@dataclass(slots=True, kw_only=True)
class DelayLine:
    """Packets of one direction, in order; what is put in comes out `delay_s` later, or not at all."""

    delay_s: float
    loss: float
    rng: random.Random
    stopped: bool = False
    num_lost: int = 0
    num_passed: int = 0
    _waiting: deque[tuple[float, bytes]] = field(default_factory=deque)

    @property
    def next_due(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def put(self, packet: bytes, now: float) -> None:
        if self.stopped or self.rng.random() < self.loss:
            self.num_lost += 1
        else:
            self._waiting.append((now + self.delay_s, packet))

    def take_due(self, now: float) -> list[bytes]:
        due = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(self._waiting.popleft()[1])
        self.num_passed += len(due)
        return due

    def stop(self) -> None:
        self.stopped = True
        self.num_lost += len(self._waiting)
        self._waiting.clear()


def open_tun(device: str) -> int:
    """The device is there, in the namespace of the caller, as long as the descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def enter_network_of(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(namespace, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(namespace)


class Relay:
    def __init__(self, tuns: tuple[int, int], lines: tuple[DelayLine, DelayLine]) -> None:
        self._ways = [(tuns[0], tuns[1], lines[0]), (tuns[1], tuns[0], lines[1])]

    def run(self) -> None:
        """Until stdin ends."""
        say({"pid": os.getpid()})
        sources = [source for source, _, _ in self._ways]
        while True:
            due = [line.next_due for _, _, line in self._ways if line.next_due is not None]
            timeout = max(0.0, min(due) - time.monotonic()) if due else None
            readable, _, _ = select.select([0, *sources], [], [], timeout)
            for source, target, line in self._ways:
                if source in readable:
                    self._take(source, line)
                for packet in line.take_due(time.monotonic()):
                    self._give(target, packet)
            if 0 in readable:
                question = os.read(0, 4096)
                if not question:
                    return
                say(self._answer(json.loads(question)["do"]))

    def _answer(self, do: str) -> dict[str, int]:
        for _, _, line in self._ways:
            if do == "stop":
                line.stop()
            elif do == "go":
                line.stopped = False
        lines = [line for _, _, line in self._ways]
        return {"num_lost": sum(line.num_lost for line in lines), "num_passed": sum(line.num_passed for line in lines)}

    @staticmethod
    def _take(source: int, line: DelayLine) -> None:
        try:
            for _ in range(PER_TURN):
                line.put(os.read(source, MOST_PACKET), time.monotonic())
        except BlockingIOError:
            return

    @staticmethod
    def _give(target: int, packet: bytes) -> None:
        try:
            os.write(target, packet)
        except OSError:  # its device is down: lost, as on any link
            return


def main() -> None:
    device, pid_of_b, delay_s, loss, seed = sys.argv[1:]
    first = open_tun(device)
    enter_network_of(int(pid_of_b))
    second = open_tun(device)
    lines = [
        DelayLine(delay_s=float(delay_s), loss=float(loss), rng=random.Random(f"{seed}/{way}")) for way in ("ab", "ba")
    ]
    Relay((first, second), (lines[0], lines[1])).run()


if __name__ == "__main__":
    main()
