"""How long a layer's bytes wait after the model thread raised the layer counter, while Python holds the GIL.

Two endpoints in one process; 16 pages of 12 KiB a layer (SmolLM2-135M: 16 tokens, one layer). The model thread raises
the counter and then holds the GIL for 200 ms (`usleep` through a PyDLL). Clock: CLOCK_MONOTONIC from just before the
raise to the arrival of the layer's last byte, as the reader's owner thread saw it. Beside it the same bytes posted by a
Python thread that the model thread wakes, which is how a messenger in Python would do it.

    python benchmarks/layer_delay.py [--runs 15] [--transport mapped]
"""

import argparse
import ctypes
import select
import threading
import time
from contextlib import ExitStack

import numpy as np
from _endpoint import add_transport, endpoint, positive
from _figures import spread

from headrace.fabric.interface import LAYERS_PER_STEP, Imm, Pages, PageWrites, PeerId, Reached
from headrace.fabric.native import Transport

NUM_PAGES, PAGE_BYTES = 16, 12 << 10
GIL_HELD_S = 0.2
PLACES = Pages(offset=0, layer_stride=0, page_stride=PAGE_BYTES, indices=np.arange(NUM_PAGES, dtype=np.int64))
LAYER = PageWrites(
    src=PLACES, dst=PLACES, positions=PLACES.indices, layer_begin=0, layer_end=1, length=PAGE_BYTES
)  # fmt: skip
hold_the_gil = ctypes.PyDLL(None).usleep


class Bench:
    def __init__(self, stack: ExitStack, transport: Transport) -> None:
        self._writer, self._reader = endpoint(stack, transport), endpoint(stack, transport)
        descriptor = self._reader.grant(self._reader.add_peer(self._writer.address))
        self._peer: PeerId = self._writer.add_peer(self._reader.address)
        self._writer.connect(self._peer, descriptor)
        self._imm = 0

    def _arm(self) -> Imm:
        self._imm += 1
        self._reader.arm(Imm(self._imm), NUM_PAGES)
        return Imm(self._imm)

    def _arrived_ns(self) -> int:
        while True:
            for event in self._reader.drain_events():
                if isinstance(event, Reached):
                    self._reader.disarm(event.imm)
                    self._writer.drain_events()
                    return event.at_ns
            select.select([self._reader.event_fd], [], [])

    def by_counter(self) -> float:
        """Milliseconds; the owner posts."""
        imm = self._arm()
        transfer = self._writer.open_transfer(self._peer, imm)
        self._writer.submit_program(imm, [(transfer, LAYER)])
        time.sleep(0.02)  # the owner sleeps by then
        begin_ns = time.monotonic_ns()
        self._writer.raise_layers(imm * LAYERS_PER_STEP + 1)
        hold_the_gil(int(GIL_HELD_S * 1e6))
        delay_ms = (self._arrived_ns() - begin_ns) / 1e6
        self._writer.close_transfer(transfer)
        return delay_ms

    def by_thread(self) -> float:
        """Milliseconds; a Python thread posts when it is woken."""
        imm = self._arm()
        computed = threading.Event()

        def post() -> None:
            transfer = self._writer.open_transfer(self._peer, imm)
            computed.wait()
            self._writer.submit_pages(transfer, LAYER)
            self._writer.submit_last(transfer)

        poster = threading.Thread(target=post)
        poster.start()
        time.sleep(0.02)
        begin_ns = time.monotonic_ns()
        computed.set()
        hold_the_gil(int(GIL_HELD_S * 1e6))
        delay_ms = (self._arrived_ns() - begin_ns) / 1e6
        poster.join()
        return delay_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, help="how many figures a cell is of", default=15)
    add_transport(parser)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        bench = Bench(stack, arguments.transport)
        bench.by_counter(), bench.by_thread()  # connections, memory
        pairs = [(bench.by_counter(), bench.by_thread()) for _ in range(arguments.runs)]
    counter, thread = ([pair[i] for pair in pairs] for i in (0, 1))
    print(f"| ms until a layer's bytes are there ({arguments.transport}), GIL held for 200 ms: median (range) | |")
    print("|---|---|")
    print(f"| layer counter, native owner | {spread(counter, 2)} |")
    print(f"| Python thread | {spread(thread, 2)} |")


if __name__ == "__main__":
    main()
