"""Late writes on the real fabric: what a stopped, woken or unaware writer still has under way lands in nobody's memory.

The memory is this process's own, so every byte of it can be looked at; the writer is another process.
"""

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from fixed_port import fixed_port
from native_reader import ReaderProcess
from numpy.typing import NDArray

from headrace.fabric.interface import Event, Imm, PeerId, Reached
from headrace.fabric.native import NativeFabric, Transport
from headrace.kvcache.memory import PoolMemory

PAGE = 64 << 10
LENGTH = 32 << 20
NUM_PAGES = LENGTH // PAGE
POISON, WRITTEN = 0xEE, 0xAA
FOREIGN = Imm(77)


class Target:
    def __init__(self) -> None:
        pool = PoolMemory(LENGTH)
        self.pool = pool
        self.memory: NDArray[np.uint8] = pool.bytes
        self.fabric = NativeFabric(pool.fd, LENGTH, transports=("tcp",))
        self.events: list[Event] = []
        self.poison()

    def poison(self) -> None:
        self.memory[:] = POISON

    def grant(self, writer: ReaderProcess, peer: PeerId) -> None:
        descriptor = self.fabric.grant(peer).encode().hex()
        writer.ask("connect", self.fabric.address.hex(), descriptor)

    def other_peers_come_and_go(self) -> None:
        for _ in range(3):
            other = NativeFabric(self.pool.fd, LENGTH, transports=("tcp",))
            peer = self.fabric.add_peer(other.address)
            other.connect(other.add_peer(self.fabric.address), self.fabric.grant(peer))
            self.fabric.remove_peer(peer)
            other.close()

    def half_received(self) -> int | None:
        """A page whose first byte has landed and whose last has not."""
        pages = self.memory.reshape(NUM_PAGES, PAGE)
        found = np.flatnonzero((pages[:, 0] == WRITTEN) & (pages[:, -1] == POISON))
        return int(found[0]) if len(found) else None

    def reaches(self, imm: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            self.events += self.fabric.drain_events()
            if any(isinstance(event, Reached) and event.imm == imm for event in self.events):
                return True
            rest = deadline - time.monotonic()
            if rest <= 0:
                return False
            select.select([self.fabric.event_fd], [], [], rest)


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.fabric.close()


@contextmanager
def stopped(writer: ReaderProcess) -> Iterator[None]:
    writer.stop()
    try:
        yield
    finally:
        writer.go_on()


def test_a_revoke_in_the_middle_of_a_64_kib_write_keeps_the_rest_of_it_out(target: Target) -> None:
    """The writer streams 64 KiB pages and is stopped; when a page stands half received, its access is revoked and the
    memory is given to somebody else. Then the writer goes on. Bare libfabric lets the rest land: docs/fabric.md."""
    with ReaderProcess("tcp") as writer:
        writer.ask("fill", WRITTEN)
        peer = target.fabric.add_peer(bytes.fromhex(writer.ask("address")))
        for attempt in range(100):
            target.poison()
            target.grant(writer, peer)
            imm = 100 + attempt
            target.fabric.arm(Imm(imm), NUM_PAGES)
            writer.ask("write", target.fabric.address.hex(), imm, NUM_PAGES, PAGE)
            time.sleep(0.001 + 0.0001 * attempt)
            with stopped(writer):
                time.sleep(0.05)  # what is in the sockets comes in
                page = target.half_received()
                if page is None:
                    continue  # between two pages: again
                target.fabric.arm(FOREIGN, 1)
                target.fabric.revoke(peer)
                target.other_peers_come_and_go()  # mappings are given back then, never the one half received into
                target.poison()
            assert not target.reaches(imm, 0.5), "the counter of the revoked writer went on"
            assert not target.reaches(FOREIGN, 0.0)
            assert (target.memory == POISON).all(), f"bytes landed after the revoke in the middle of page {page}"
            target.grant(writer, peer)
            writer.ask("write", target.fabric.address.hex(), FOREIGN, 1, PAGE)
            assert target.reaches(FOREIGN, 20.0), "a new key works afterwards"
            assert (target.memory[:PAGE] == WRITTEN).all()
            # It came after everything older on that connection, however late that was.
            assert (target.memory[PAGE:] == POISON).all()
            return
    pytest.fail("no page stood half received in 100 attempts")


@pytest.mark.parametrize("transport", ["tcp", "mapped", "shm"])
def test_writes_for_a_process_that_was_killed_miss_the_next_one_at_its_address(transport: Transport) -> None:
    """A decoder is killed and started again at the same port; a writer that knows nothing of it goes on with the old
    descriptor. The new one has other keys: no byte lands, no counter moves."""
    port = fixed_port()
    with ReaderProcess(transport) as writer:
        writer.ask("fill", WRITTEN)
        with ReaderProcess(transport, port) as old:
            address = old.ask("address")
            writer.ask("connect", address, old.ask("grant", writer.ask("address")))
            old.ask("arm", 5, 1)
            writer.ask("write", address, 5, 1, PAGE)
            old.ask("reached", 5)
            writer.ask("write", address, 6, NUM_PAGES, PAGE)
            old.process.kill()
            old.process.wait()
        with ReaderProcess(transport, port) as new:
            assert new.ask("address") == address, "the test is about the same address"
            new.ask("grant", writer.ask("address"))  # it, too, expects this writer, under its own key
            new.ask("arm", 6, 1)
            for imm in (6, 7):
                writer.ask("write", address, imm, NUM_PAGES, PAGE)
                time.sleep(0.3)
            poison = new.ask("hash", 0, LENGTH)
            new.ask("poison")
            assert new.ask("hash", 0, LENGTH) == poison, "bytes for the old process landed in the new one"
            assert new.ask("arrivals") == "0", "a counter of the new process moved"
            new.ask("arm", 8, 1)
            writer.ask("connect", address, new.ask("grant", writer.ask("address")))
            writer.ask("write", address, 8, 1, PAGE)
            new.ask("reached", 8)  # so the writer does reach the new process, and what it sent before is over
            assert new.ask("arrivals") == "1"
            rest = new.ask("hash", PAGE, LENGTH)
            new.ask("poison")
            assert new.ask("hash", PAGE, LENGTH) == rest
