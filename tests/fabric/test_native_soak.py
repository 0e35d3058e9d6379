"""A long random life of three processes: sizes, orders, cancels, two readers that are killed and come back.

A writer here, two readers in processes of their own at fixed ports. Every round one of them gets a transfer of random
shape, now and then closed in the middle; what was posted is counted there, and what is whole compared. `make soak`
moves 24 GiB over each transport, `make test` a little.
"""

import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
import xxhash
from fixed_port import fixed_port
from native_reader import LENGTH, ReaderProcess
from test_native_processes import Writer

from headrace.fabric.interface import Imm, Pages, PageWrites, PeerId, TransferId
from headrace.fabric.native import Transport

SOAK_GIB = float(os.environ.get("HEADRACE_SOAK_GIB", "0.25"))


@dataclass(slots=True)
class Reader:
    """One of the two; `lives` counts its processes."""

    port: int
    transport: Transport
    process: ReaderProcess | None = None
    peer: PeerId | None = None
    lives: int = 0

    def meet(self, writer: Writer) -> None:
        """Start (again), and be connected."""
        self.end()
        self.process = ReaderProcess(self.transport, self.port).__enter__()
        self.lives += 1
        if self.peer is None:
            self.peer = writer.fabric.add_peer(bytes.fromhex(self.process.ask("address")))
        writer.reconnect(self.peer, self.process)

    def end(self) -> None:
        if self.process is not None:
            self.process.__exit__(None, None, None)
            self.process = None


def random_pages(rng: random.Random) -> PageWrites:
    """Distinct pages of one size at both ends, in two random orders."""
    length = rng.choice([1, 777, 4096, 12288, 65536, 262144, 1 << 20])
    stride = -(-length // 64) * 64
    room = LENGTH // stride
    num_pages = rng.randint(1, min(room, max(1, (8 << 20) // stride), 4000))
    indices = [np.array(rng.sample(range(room), num_pages), dtype=np.int64) for _ in range(2)]
    src, dst = (Pages(offset=0, layer_stride=0, page_stride=stride, indices=each) for each in indices)
    positions = np.arange(num_pages, dtype=np.int64)
    return PageWrites(src=src, dst=dst, positions=positions, layer_begin=0, layer_end=1, length=length)


def carried(writer: Writer, writes: PageWrites) -> str:
    """What the reader's pages, in the order of the writes, must hash to."""
    parts = (int(at) * writes.src.page_stride for at in writes.src.indices)
    hashed = xxhash.xxh3_64()
    for at in parts:
        hashed.update(writer.memory[at : at + writes.length].tobytes())
    return hashed.hexdigest()


def submit(writer: Writer, reader: Reader, imm: int, writes: PageWrites) -> TransferId:
    assert reader.peer is not None
    transfer = writer.fabric.open_transfer(reader.peer, Imm(imm))
    writer.fabric.submit_pages(transfer, writes)
    return transfer


@pytest.mark.parametrize("transport", ["mapped", "shm", "tcp"])
def test_a_long_life_with_cancels_and_restarts_loses_no_byte_and_no_count(transport: Transport) -> None:
    rng = random.Random(5)
    writer = Writer(transport)
    readers = [Reader(fixed_port(), transport) for _ in range(2)]
    left = int(SOAK_GIB * 2**30)
    imm = 0
    try:
        for reader in readers:
            reader.meet(writer)
        while left > 0:
            reader = rng.choice(readers)
            if rng.random() < 0.02:
                kill_in_the_middle(writer, reader, rng, imm := imm + 1)
            imm = (imm + 1) % (1 << 32)
            left -= one_round(writer, reader, rng, imm)
        assert writer.fabric.statistics().num_transfers_now == 0
        # At least once each, however little was to be moved.
        for reader in readers:
            kill_in_the_middle(writer, reader, rng, imm := imm + 1)
            one_round(writer, reader, rng, imm := imm + 1)
            assert reader.lives >= 2
    finally:
        for reader in readers:
            reader.end()
        writer.fabric.close()


def one_round(writer: Writer, reader: Reader, rng: random.Random, imm: int) -> int:
    """-> bytes moved."""
    assert reader.process is not None
    writes = random_pages(rng)
    reader.process.ask("arm", imm, writes.num_writes)
    transfer = submit(writer, reader, imm, writes)
    is_cut = rng.random() < 0.15
    if is_cut:
        num_posted = writer.fabric.close_transfer(transfer)
        reader.process.ask("retarget", imm, num_posted)
    else:
        writer.fabric.submit_last(transfer)
    done = writer.done(transfer)
    assert done is not None and done.num_failed == 0
    assert int(reader.process.ask("count", imm)) == done.num_posted
    if not is_cut:
        stride = writes.dst.page_stride
        pages = ",".join(map(str, writes.dst.indices.tolist()))
        assert reader.process.ask("hash_pages", stride, writes.length, pages) == carried(writer, writes)
    reader.process.ask("disarm", imm)
    return done.num_posted * writes.length


def kill_in_the_middle(writer: Writer, reader: Reader, rng: random.Random, imm: int) -> None:
    assert reader.process is not None
    reader.process.ask("arm", imm, 1 << 20)
    transfer = submit(writer, reader, imm, random_pages(rng))
    reader.process.process.kill()
    reader.process.process.wait()
    reader.meet(writer)  # closes what was open to its predecessor
    assert writer.done(transfer) is not None
