"""How fast scattered pages go from one process to another over the fabric, beside a plain copy and a plain socket.

Workload: every page of a 64 MiB memory once, in a seeded random order, one imm on each write, `--runs` times after one
run to warm up; the three kinds and all page sizes take turns. Clock: CLOCK_MONOTONIC from the submit in the writer to
the counter's target in the reader (to the last byte read, for the socket). Each cell is the median of the runs, with
the lowest and highest. Two processes, wherever the scheduler puts them.

    python benchmarks/fabric_rates.py [--runs 9] [--pages 4 12 64 256] [--digests]
"""

import argparse
import mmap
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _endpoint import positive

from headrace.fabric.interface import Descriptor, Event, Imm, Pages, PageWrites, Reached
from headrace.fabric.native import NativeFabric

MEMORY_BYTES = 64 << 20


class Endpoint:
    def __init__(self) -> None:
        fd = os.memfd_create("headrace-bench")
        os.ftruncate(fd, MEMORY_BYTES)
        self.memory = np.frombuffer(mmap.mmap(fd, MEMORY_BYTES), dtype=np.uint8)
        self.memory[:] = 1
        self.fabric = NativeFabric(fd, MEMORY_BYTES)

    def wait_reached(self) -> int:
        while True:
            for event in self.drain():
                if isinstance(event, Reached):
                    return event.at_ns
            select.select([self.fabric.event_fd], [], [])

    def drain(self) -> list[Event]:
        return self.fabric.drain_events()


def serve() -> None:
    """The reader: lines of `arm IMM EXPECTED` (answered, then answered again when reached) or `socket` on stdin."""
    end = Endpoint()
    writer = end.fabric.add_peer(bytes.fromhex(input()))
    listener = socket.create_server(("127.0.0.1", 0))
    print(end.fabric.address.hex(), end.fabric.grant(writer).encode().hex(), listener.getsockname()[1], flush=True)
    plain, _ = listener.accept()
    view = memoryview(end.memory)  # type: ignore[arg-type]
    for line in sys.stdin:
        words = line.split()
        if words[0] == "arm":
            end.fabric.arm(Imm(int(words[1])), int(words[2]))
            print("armed", flush=True)
            reached_ns = end.wait_reached()
            end.fabric.disarm(Imm(int(words[1])))
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
        address, descriptor, port = self._ask(self._end.fabric.address.hex()).split()
        self._peer = self._end.fabric.add_peer(bytes.fromhex(address))
        self._end.fabric.connect(self._peer, Descriptor.decode(bytes.fromhex(descriptor)))
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

    def fabric(self, page_bytes: int) -> float:
        """GB/s."""
        num_pages = MEMORY_BYTES // page_bytes
        places = np.array(random.Random(7).sample(range(num_pages), num_pages), dtype=np.int64)
        pages = Pages(offset=0, layer_stride=0, page_stride=page_bytes, indices=places)
        self._imm += 1
        self._ask(f"arm {self._imm} {num_pages}")
        positions = np.arange(num_pages, dtype=np.int64)
        writes = PageWrites(src=pages, dst=pages, positions=positions, layer_begin=0, layer_end=1, length=page_bytes)
        begin_ns = time.monotonic_ns()
        transfer = self._end.fabric.open_transfer(
            self._peer, Imm(self._imm), num_pages=num_pages if self._digests else 0
        )
        self._end.fabric.submit_pages(transfer, writes)
        self._end.fabric.submit_last(transfer)
        seconds = (int(self._read()) - begin_ns) / 1e9
        self._end.drain()
        return num_pages * page_bytes / seconds / 1e9

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
        self._end.fabric.close()


def cell(figures: list[float]) -> str:
    return f"{statistics.median(figures):.2f} ({min(figures):.2f}-{max(figures):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, help="how many figures a cell is of", default=9)
    parser.add_argument("--pages", type=positive, nargs="+", default=[4, 12, 64, 256], help="page sizes in KiB")
    parser.add_argument("--digests", action="store_true", help="hash every page on the way")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    bench = Bench(digests=arguments.digests)
    kinds = {"fabric (tcp;ofi_rxm)": bench.fabric, "one TCP socket": bench.plain_socket, "copy": bench.plain_copy}
    figures: dict[tuple[str, int], list[float]] = {}
    for run in range(arguments.runs + 1):
        for kib in arguments.pages:
            for name, measure in kinds.items():
                rate = measure(kib << 10)
                if run > 0:
                    figures.setdefault((name, kib), []).append(rate)
    bench.close()
    print("| GB/s, median (lowest-highest) | " + " | ".join(f"{kib} KiB" for kib in arguments.pages) + " |")
    print("|---" * (len(arguments.pages) + 1) + "|")
    for name in kinds:
        print(f"| {name} | " + " | ".join(cell(figures[name, kib]) for kib in arguments.pages) + " |")


if __name__ == "__main__":
    main()
