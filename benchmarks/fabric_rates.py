"""How fast scattered pages go from one process to another over the fabric, beside a plain copy and a plain socket.

Workload: every page of a 64 MiB memory once, in a seeded random order, one imm on each write, `--runs` times after one
run to warm up; all kinds and page sizes take turns. Clock: CLOCK_MONOTONIC from the submit in the writer to
the counter's target in the reader (to the last byte read, for the socket). Each cell is the median of the runs, with
the lowest and highest. Two processes, wherever the scheduler puts them.

With the Python of a virtual environment that has NIXL or Mooncake (`pip install nixl`, `mooncake-transfer-engine`),
they take their turns in the same run; their clock ends at the writer's completion.

    python benchmarks/fabric_rates.py [--runs 9] [--pages 4 12 64 256] [--digests]
                                      [--nixl ~/nixl/bin/python] [--mooncake ~/mooncake/bin/python]
"""

import argparse
import mmap
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from _endpoint import TRANSPORTS, positive
from _figures import spread
from _other_engines import ENGINES

from headrace.fabric.interface import Descriptor, Imm, Pages, PageWrites, PeerId, Reached
from headrace.fabric.native import NativeFabric, Transport

MEMORY_BYTES = 64 << 20


class Endpoint:
    def __init__(self) -> None:
        fd = os.memfd_create("headrace-bench", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, MEMORY_BYTES)
        self.memory = np.frombuffer(mmap.mmap(fd, MEMORY_BYTES), dtype=np.uint8)
        self.memory[:] = 1
        self.fabrics = {each: NativeFabric(fd, MEMORY_BYTES, transports=(each,)) for each in TRANSPORTS}

    @property
    def addresses(self) -> list[str]:
        """As words, one for each of TRANSPORTS."""
        return [fabric.address.hex() for fabric in self.fabrics.values()]


def wait_reached(fabric: NativeFabric) -> int:
    while True:
        for event in fabric.drain_events():
            if isinstance(event, Reached):
                return event.at_ns
        select.select([fabric.event_fd], [], [])


def serve() -> None:
    """The reader: lines of `TRANSPORT IMM EXPECTED` (answered, and again when reached) or `socket` on stdin."""
    end = Endpoint()
    grants = [
        fabric.grant(fabric.add_peer(bytes.fromhex(address))).encode().hex()
        for fabric, address in zip(end.fabrics.values(), input().split(), strict=True)
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], *end.addresses, *grants, flush=True)
    plain, _ = listener.accept()
    view = memoryview(end.memory)  # type: ignore[arg-type]
    for line in sys.stdin:
        kind, *numbers = line.split()
        if kind in end.fabrics:
            fabric = end.fabrics[kind]
            imm, expected = map(int, numbers)
            fabric.arm(Imm(imm), expected)
            print("armed", flush=True)
            reached_ns = wait_reached(fabric)
            fabric.disarm(Imm(imm))
            print(reached_ns, flush=True)
        else:
            print("ready", flush=True)
            got = 0
            while got < MEMORY_BYTES:
                got += plain.recv_into(view[got:])
            print(time.monotonic_ns(), flush=True)


class Bench:
    def __init__(self, *, digests: bool) -> None:
        self._digests = digests
        self._end = Endpoint()
        self._reader = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        port, *words = self._ask(" ".join(self._end.addresses)).split()
        addresses, grants = words[: len(TRANSPORTS)], words[len(TRANSPORTS) :]
        self._peers: dict[Transport, PeerId] = {}
        for transport, address, descriptor in zip(TRANSPORTS, addresses, grants, strict=True):
            fabric = self._end.fabrics[transport]
            self._peers[transport] = fabric.add_peer(bytes.fromhex(address))
            fabric.connect(self._peers[transport], Descriptor.decode(bytes.fromhex(descriptor)))
        self._plain = socket.create_connection(("127.0.0.1", int(port)))
        self._imm = 0
        self._copy = np.zeros(MEMORY_BYTES, dtype=np.uint8)

    def _ask(self, line: str) -> str:
        assert self._reader.stdin is not None
        self._reader.stdin.write(line + "\n")
        self._reader.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._reader.stdout is not None
        return self._reader.stdout.readline().strip()

    def fabric(self, transport: Transport, page_bytes: int) -> float:
        """GB/s of all pages in one record."""
        num_pages = MEMORY_BYTES // page_bytes
        places = np.array(random.Random(7).sample(range(num_pages), num_pages), dtype=np.int64)
        pages = Pages(offset=0, layer_stride=0, page_stride=page_bytes, indices=places)
        positions = np.arange(num_pages, dtype=np.int64)
        return self.written(
            transport,
            [PageWrites(src=pages, dst=pages, positions=positions, layer_begin=0, layer_end=1, length=page_bytes)],
        )

    def written(self, transport: Transport, records: Sequence[PageWrites]) -> float:
        """GB/s of these writes, which are of the same pages."""
        fabric = self._end.fabrics[transport]
        num_pages = len(records[0].positions) if self._digests else 0
        self._imm += 1
        self._ask(f"{transport} {self._imm} {sum(record.num_writes for record in records)}")
        begin_ns = time.monotonic_ns()
        transfer = fabric.open_transfer(self._peers[transport], Imm(self._imm), num_pages=num_pages)
        for record in records:
            fabric.submit_pages(transfer, record)
        fabric.submit_last(transfer)
        elapsed_ns = int(self._read()) - begin_ns
        fabric.drain_events()
        return sum(record.num_writes * record.length for record in records) / elapsed_ns

    def plain_socket(self, page_bytes: int) -> float:
        """The same bytes down one TCP connection, one sendall a page: no pages placed, no counting."""
        self._ask("socket")
        view = memoryview(self._end.memory)  # type: ignore[arg-type]
        begin_ns = time.monotonic_ns()
        for at in range(0, MEMORY_BYTES, page_bytes):
            self._plain.sendall(view[at : at + page_bytes])
        return MEMORY_BYTES / (int(self._read()) - begin_ns)

    def plain_copy(self, page_bytes: int) -> float:
        """numpy copying the same scattered pages inside one process."""
        num_pages = MEMORY_BYTES // page_bytes
        whole = num_pages * page_bytes
        places = random.Random(7).sample(range(num_pages), num_pages)
        src, dst = (memory[:whole].reshape(num_pages, page_bytes) for memory in (self._end.memory, self._copy))
        begin_ns = time.monotonic_ns()
        for place in places:
            dst[place] = src[place]
        return whole / (time.monotonic_ns() - begin_ns)

    def close(self) -> None:
        self._reader.kill()
        self._reader.wait()
        self._plain.close()
        for fabric in self._end.fabrics.values():
            fabric.close()


class Other:
    """Another engine, under a Python of its own."""

    def __init__(self, python: str, engine: str) -> None:
        command = [python, str(Path(__file__).with_name("_other_engines.py")), engine, "--memory", str(MEMORY_BYTES)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        while (line := self._read()) != "ready":  # what the engine has to say at its start
            assert self._process.poll() is None, f"{engine} ended: {line}"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def rate(self, page_bytes: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{page_bytes}\n")
        self._process.stdin.flush()
        return MEMORY_BYTES // page_bytes * page_bytes / float(self._read()) / 1e9

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._read() == "0", "not every byte arrived"
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, help="how many figures a cell is of", default=9)
    parser.add_argument("--pages", type=positive, nargs="+", default=[4, 12, 64, 256], help="page sizes in KiB")
    parser.add_argument("--digests", action="store_true", help="hash every page on the way")
    for engine in ENGINES:
        parser.add_argument(f"--{engine}", metavar="PYTHON", help=f"a Python that has {engine}, to stand beside")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    bench = Bench(digests=arguments.digests)
    kinds: dict[str, Callable[[int], float]] = {
        **{f"fabric ({transport})": partial(bench.fabric, transport) for transport in TRANSPORTS},
        "one TCP socket": bench.plain_socket,
        "copy": bench.plain_copy,
    }
    others = {each: Other(python, each) for each in ENGINES if (python := getattr(arguments, each))}
    kinds |= {engine: other.rate for engine, other in others.items()}
    figures: dict[tuple[str, int], list[float]] = {}
    for run in range(arguments.runs + 1):
        for kib in arguments.pages:
            for name, measure in kinds.items():
                rate = measure(kib << 10)
                if run > 0:
                    figures.setdefault((name, kib), []).append(rate)
    bench.close()
    for other in others.values():
        other.close()
    print("| GB/s, median (lowest-highest) | " + " | ".join(f"{kib} KiB" for kib in arguments.pages) + " |")
    print("|---" * (len(arguments.pages) + 1) + "|")
    for name in kinds:
        print(f"| {name} | " + " | ".join(spread(figures[name, kib], 2) for kib in arguments.pages) + " |")


if __name__ == "__main__":
    main()
