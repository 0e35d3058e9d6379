"""The native fabric between processes: bytes, messages, readers that are killed, stopped or closed in the middle."""

import ctypes
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xxhash
from native_reader import LENGTH, POISON, ReaderProcess
from numpy.typing import NDArray

from headrace.fabric.interface import (
    LAYERS_PER_STEP,
    Descriptor,
    Event,
    Imm,
    Pages,
    PageWrites,
    PeerId,
    SendFailed,
    TransferDone,
    TransferId,
)
from headrace.fabric.native import NativeFabric, Transport

PAGE = 64 << 10


class Writer:
    def __init__(self, transport: Transport) -> None:
        self.fd = os.memfd_create("headrace-writer", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, LENGTH)
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, LENGTH), dtype=np.uint8)
        self.memory[:] = np.random.default_rng(3).integers(0, 256, LENGTH, dtype=np.uint8)
        self.transport = transport
        self.fabric = NativeFabric(self.fd, LENGTH, transports=(transport,))
        self.events: list[Event] = []

    def connect(self, reader: ReaderProcess) -> PeerId:
        peer = self.fabric.add_peer(bytes.fromhex(reader.ask("address")))
        self.reconnect(peer, reader)
        return peer

    def reconnect(self, peer: PeerId, reader: ReaderProcess) -> None:
        wire = bytes.fromhex(reader.ask("grant", self.fabric.address.hex()))
        self.fabric.connect(peer, Descriptor.decode(wire))

    def write(self, peer: PeerId, imm: int, pages: int, *, length: int = PAGE) -> TransferId:
        """Pages 0.. of ours to the same pages there."""
        places = Pages(offset=0, layer_stride=0, page_stride=length, indices=np.arange(pages, dtype=np.int64))
        writes = PageWrites(src=places, dst=places, positions=places.indices, layer_begin=0, layer_end=1, length=length)
        transfer = self.fabric.open_transfer(peer, Imm(imm))
        self.fabric.submit_pages(transfer, writes)
        self.fabric.submit_last(transfer)
        return transfer

    def wait(self, wanted: Callable[[Event], bool], seconds: float = 20.0) -> Event | None:
        """The first such event, None when it does not come in time."""
        deadline = time.monotonic() + seconds
        while True:
            self.events += self.fabric.drain_events()
            for event in self.events:
                if wanted(event):
                    return event
            rest = deadline - time.monotonic()
            if rest <= 0:
                return None
            select.select([self.fabric.event_fd], [], [], rest)

    def done(self, transfer: TransferId, seconds: float = 20.0) -> TransferDone | None:
        event = self.wait(lambda event: isinstance(event, TransferDone) and event.transfer == transfer, seconds)
        return event if isinstance(event, TransferDone) else None

    def hash(self, begin: int, end: int) -> str:
        return xxhash.xxh3_64_hexdigest(self.memory[begin:end].tobytes())


@pytest.fixture(params=["tcp", "mapped", "shm"])
def writer(request: pytest.FixtureRequest) -> Iterator[Writer]:
    made = Writer(request.param)
    yield made
    made.fabric.close()
    os.close(made.fd)


@pytest.fixture
def reader(writer: Writer) -> Iterator[ReaderProcess]:
    with ReaderProcess(writer.transport) as made:
        yield made


def poison_hash(length: int) -> str:
    return xxhash.xxh3_64_hexdigest(POISON * length)


def begin_large_write(writer: Writer, peer: PeerId, reader: ReaderProcess) -> TransferId:
    """One write over all of the memory; returns when its first byte has landed."""
    writer.memory[1] = 0x11
    transfer = writer.fabric.open_transfer(peer, Imm(9))
    writer.fabric.submit_write(transfer, src_offset=1, dst_offset=0, length=LENGTH - 1)
    writer.fabric.submit_last(transfer)
    while reader.ask("first_byte", 0) != str(0x11):
        pass
    return transfer


def test_pages_and_messages_arrive_in_another_process(writer: Writer, reader: ReaderProcess) -> None:
    peer = writer.connect(reader)
    reader.ask("arm", 5, 100)
    transfer = writer.write(peer, 5, 100)
    message = bytes(range(256)) * 3000
    writer.fabric.send(peer, message)
    assert 0 < int(reader.ask("reached", 5)) <= time.monotonic_ns()
    assert reader.ask("hash", 0, 100 * PAGE) == writer.hash(0, 100 * PAGE)
    assert reader.ask("hash", 100 * PAGE, LENGTH) == poison_hash(LENGTH - 100 * PAGE)
    assert reader.ask("message") == xxhash.xxh3_64_hexdigest(message)
    done = writer.done(transfer)
    assert done is not None and (done.num_posted, done.num_failed, done.complete) == (100, 0, True)


def test_a_killed_reader_ends_or_parks_its_transfer_and_another_peer_goes_on(
    writer: Writer, reader: ReaderProcess
) -> None:
    with ReaderProcess(writer.transport) as other:
        peer, kept = writer.connect(reader), writer.connect(other)
        reader.ask("arm", 5, 1)
        writer.write(peer, 5, 1)
        reader.ask("reached", 5)
        reader.process.kill()
        reader.process.wait()
        lost = writer.write(peer, 6, 500)
        writer.fabric.send(peer, b"anybody?")
        other.ask("arm", 7, 300)
        assert writer.done(writer.write(kept, 7, 300)) is not None
        other.ask("reached", 7)
        assert other.ask("hash", 0, 300 * PAGE) == writer.hash(0, 300 * PAGE)
        done = writer.done(lost, seconds=1.0)
        if done is None:  # parked: the provider never told; the caller's deadline closes it
            writer.fabric.close_transfer(lost)
            writer.fabric.remove_peer(peer)
            done = writer.done(lost)
        assert done is not None and not done.complete
        assert done.num_failed == 0 or (done.code > 0 and done.text)
        assert not [event for event in writer.events if isinstance(event, SendFailed) and event.peer == kept]
        other.ask("arm", 8, 20)
        writer.write(kept, 8, 20)
        other.ask("reached", 8)


def test_a_parked_peer_costs_the_owner_next_to_nothing(writer: Writer, reader: ReaderProcess) -> None:
    peer = writer.connect(reader)
    reader.process.kill()
    reader.process.wait()
    writer.write(peer, 6, 500)
    time.sleep(0.3)
    before = writer.fabric.owner_cpu_ns()
    time.sleep(1.0)
    assert writer.fabric.owner_cpu_ns() - before < 50_000_000


def test_a_stopped_reader_takes_its_window_and_gets_the_rest_when_it_goes_on(
    writer: Writer, reader: ReaderProcess
) -> None:
    with ReaderProcess(writer.transport) as other:
        peer, kept = writer.connect(reader), writer.connect(other)
        for each, target in ((reader, peer), (other, kept)):
            each.ask("arm", 5, 1)
            writer.write(target, 5, 1)
            each.ask("reached", 5)
        reader.stop()
        # More than the window of the one and the lane of the other takes.
        num_pages, length = (400, PAGE) if writer.transport == "tcp" else (9000, 3072)
        held = writer.write(peer, 6, num_pages, length=length)
        other.ask("arm", 7, 400)
        assert writer.done(writer.write(kept, 7, 400)) is not None
        other.ask("reached", 7)
        assert writer.done(held, seconds=0.2) is None
        reader.go_on()
        reader.ask("arm", 8, 1)
        done = writer.done(held)
        assert done is not None and (done.num_posted, done.num_failed) == (num_pages, 0)
        writer.write(peer, 8, 1)
        reader.ask("reached", 8)
        assert reader.ask("hash", 0, num_pages * length) == writer.hash(0, num_pages * length)


def test_a_half_received_write_misses_the_memory_after_a_revoke(writer: Writer, reader: ReaderProcess) -> None:
    peer = writer.connect(reader)
    begin_large_write(writer, peer, reader)
    reader.ask("revoke", writer.fabric.address.hex())
    reader.ask("poison")
    time.sleep(0.3)
    assert reader.ask("hash", 0, LENGTH) == poison_hash(LENGTH)
    writer.reconnect(peer, reader)
    reader.ask("arm", 5, 1)
    writer.write(peer, 5, 1)
    reader.ask("reached", 5)


def test_a_reader_closes_with_a_half_received_write(writer: Writer, reader: ReaderProcess) -> None:
    peer = writer.connect(reader)
    begin_large_write(writer, peer, reader)
    assert reader.ask("close") == "closed"
    reader.process.stdin.close()  # type: ignore[union-attr]
    assert reader.process.wait(10) == 0


def test_a_writer_closes_with_everything_under_way(writer: Writer, reader: ReaderProcess) -> None:
    peer = writer.connect(reader)
    begin_large_write(writer, peer, reader)
    writer.write(peer, 5, 300)
    writer.fabric.send(peer, bytes(1 << 20))
    writer.fabric.close()
    assert int(reader.ask("arrivals")) <= 301


@pytest.mark.parametrize("writer", ["tcp"], indirect=True)
def test_a_half_received_writer_may_be_removed_and_the_reader_goes_on(writer: Writer, reader: ReaderProcess) -> None:
    """fi_av_remove would crash the reader here (libfabric 1.17)."""
    peer = writer.connect(reader)
    begin_large_write(writer, peer, reader)
    reader.ask("remove", writer.fabric.address.hex())
    reader.ask("poison")
    time.sleep(0.3)
    assert reader.ask("hash", 0, LENGTH) == poison_hash(LENGTH)
    writer.reconnect(peer, reader)
    reader.ask("arm", 5, 1)
    writer.write(peer, 5, 1)
    reader.ask("reached", 5)


@pytest.mark.timing
def test_a_layer_leaves_while_the_model_thread_holds_the_gil(writer: Writer, reader: ReaderProcess) -> None:
    """The owner sleeps when the counter is raised, and Python runs nothing for 200 ms afterwards."""
    peer = writer.connect(reader)
    places = Pages(offset=0, layer_stride=0, page_stride=PAGE, indices=np.arange(16, dtype=np.int64))
    layers = PageWrites(src=places, dst=places, positions=places.indices, layer_begin=0, layer_end=2, length=PAGE)
    usleep = ctypes.PyDLL(None).usleep  # a PyDLL keeps the GIL
    delays_ms = []
    for step in range(1, 6):
        reader.ask("arm", step, 16)
        transfer = writer.fabric.open_transfer(peer, Imm(step))
        writer.fabric.submit_program(step, [(transfer, layers)])
        time.sleep(0.05)
        raised_ns = time.monotonic_ns()
        writer.fabric.raise_layers(step * LAYERS_PER_STEP + 1)
        usleep(200_000)
        delays_ms.append((int(reader.ask("reached", step)) - raised_ns) / 1e6)
        writer.fabric.fail_step(step)
    assert sorted(delays_ms)[-2] < 10, delays_ms  # one of five may meet a neighbour
    assert max(delays_ms) < 100, delays_ms
