"""Other transfer engines as the writer and the reader of pages, run under the Python that has them.

    PYTHON _other_engines.py nixl|mooncake [--memory BYTES]

Reads page sizes in bytes from stdin. For each it writes all pages of the memory once, in a seeded random order, into
the same places of another process's memory, and prints the seconds it took, from handing the list over to its
completion at the writer. The calling threads make the progress: a thread for it costs NIXL most on few cores.
"""

import argparse
import multiprocessing
import random
import sys
import time
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

HOST = "127.0.0.1"
BATCH = 1024
"""Pages that Mooncake takes at a time: with four times as many its connections break."""

Address = tuple[object, int]
"""How the engine is met, and where its memory begins."""


def order(num_pages: int) -> list[int]:
    return random.Random(7).sample(range(num_pages), num_pages)


class Nixl:
    """UCX underneath; lists of pages are prepared once for each size, as its users do for a KV pool."""

    def __init__(self, name: str, memory: NDArray[np.uint8]) -> None:
        api = import_module("nixl._api")
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
        self._memory = memory
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self._lists: dict[int, tuple[Any, Any]] = {}

    @property
    def address(self) -> Address:
        return self._agent.get_agent_metadata(), self._memory.ctypes.data

    def meet(self, address: Address) -> None:
        metadata, self._there = address
        self._agent.add_remote_agent(metadata)

    def serve(self) -> None:
        self._agent.get_new_notifs()

    def write(self, page_bytes: int, places: list[int]) -> float:
        if page_bytes not in self._lists:
            whole = range(0, len(places) * page_bytes, page_bytes)
            ours = [(self._memory.ctypes.data + at, page_bytes, 0) for at in whole]
            theirs = [(self._there + at, page_bytes, 0) for at in whole]
            self._lists[page_bytes] = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM"),
                self._agent.prep_xfer_dlist("reader", theirs, "DRAM"),
            )
        ours, theirs = self._lists[page_bytes]
        begin = time.perf_counter()
        transfer = self._agent.make_prepped_xfer("WRITE", ours, places, theirs, places, b"")
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        seconds = time.perf_counter() - begin
        assert state == "DONE", state
        self._agent.release_xfer_handle(transfer)
        return seconds


class Mooncake:
    """Over TCP, the one of its transports that needs no RDMA NIC."""

    def __init__(self, _name: str, memory: NDArray[np.uint8]) -> None:
        self._engine = import_module("mooncake.engine").TransferEngine()
        assert self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
        self._memory = memory
        assert self._engine.register_memory(memory.ctypes.data, memory.nbytes) == 0

    @property
    def address(self) -> Address:
        return f"{HOST}:{self._engine.get_rpc_port()}", self._memory.ctypes.data

    def meet(self, address: Address) -> None:
        self._segment, self._there = address

    def serve(self) -> None:
        time.sleep(0.001)

    def write(self, page_bytes: int, places: list[int]) -> float:
        ours = [self._memory.ctypes.data + place * page_bytes for place in places]
        theirs = [self._there + place * page_bytes for place in places]
        begin = time.perf_counter()
        for at in range(0, len(places), BATCH):
            batch = slice(at, at + BATCH)
            sizes = [page_bytes] * len(ours[batch])
            failed = self._engine.batch_transfer_sync_write(self._segment, ours[batch], theirs[batch], sizes)
            assert failed == 0, failed
        return time.perf_counter() - begin


ENGINES: dict[str, type[Nixl] | type[Mooncake]] = {"nixl": Nixl, "mooncake": Mooncake}


def read(engine: str, num_bytes: int, asked: Connection) -> None:
    """The reader's process: makes progress from each "begin" to the "end", and sleeps otherwise, so that nobody else is
    disturbed; says at last how many of its bytes are wrong."""
    memory = np.zeros(num_bytes, dtype=np.uint8)
    here = ENGINES[engine]("reader", memory)
    asked.send(here.address)
    here.meet(asked.recv())
    asked.send(None)
    while asked.recv() == "begin":
        asked.send(None)
        while not asked.poll():
            here.serve()
        assert asked.recv() == "end"
    asked.send(int((memory != 7).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--memory", type=int, default=64 << 20)
    arguments = parser.parse_args()
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    reader = spawning.Process(target=read, args=(arguments.engine, arguments.memory, theirs), daemon=True)
    reader.start()
    memory = np.full(arguments.memory, 7, dtype=np.uint8)
    here = ENGINES[arguments.engine]("writer", memory)
    address = ours.recv()
    ours.send(here.address)
    here.meet(address)
    ours.recv()
    print("ready", flush=True)
    for line in sys.stdin:
        page_bytes = int(line)
        places = order(arguments.memory // page_bytes)
        ours.send("begin")
        ours.recv()
        seconds = here.write(page_bytes, places)
        ours.send("end")
        print(seconds, flush=True)
    ours.send("how many bytes are wrong")
    print(ours.recv(), flush=True)
    reader.join(10)


if __name__ == "__main__":
    main()
