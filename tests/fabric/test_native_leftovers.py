"""Peers that come and go leave nothing behind, killed processes neither, and whoever has nothing to do does nothing.

`HEADRACE_PEERS=1000` for as many peers, one after the other, as the fabric promises to forget.
"""

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from native_reader import ReaderProcess
from native_side import NativeSide, closing, link, shm_files

from headrace.fabric.interface import Imm, MessageReceived, PeerLost, Reached, Revoked
from headrace.fabric.native import Transport

NUM_PEERS = int(os.environ.get("HEADRACE_PEERS", "0"))
FEW = {"tcp": 60, "mapped": 200, "shm": 60}  # seconds
MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this process holds of the system."""

    files: int
    threads: int
    mappings: int
    resident_mib: float

    @staticmethod
    def now() -> "Held":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return Held(
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            mappings=len(Path("/proc/self/maps").read_text().splitlines()),
            resident_mib=int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MEGABYTE,
        )


@pytest.fixture(params=["tcp", "mapped", "shm"])
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@pytest.fixture
def side(transport: Transport) -> Iterator[NativeSide]:
    made = NativeSide(transports=(transport,))
    with closing(made):
        yield made


def meets_a_newcomer(side: NativeSide, transport: Transport) -> None:
    """Writes both ways and a message; each second one is not removed before it is gone, but after."""
    side.events.clear()
    newcomer = NativeSide(transports=(transport,))
    there, here = link(newcomer, side)
    side.fabric.connect(here, newcomer.fabric.grant(there))
    for writer, peer, reader in ((newcomer, there, side), (side, here, newcomer)):
        reader.fabric.arm(Imm(5), 1)
        done = writer.done(writer.write(peer, 5, 65536))
        assert done is not None and done.complete
        assert reader.waits(lambda reader=reader: bool(reader.told(Reached)))  # type: ignore[misc]
        reader.fabric.disarm(Imm(5))
    newcomer.fabric.send(there, bytes(20_000))
    assert side.waits(lambda: bool(side.told(MessageReceived)))
    if here % 2:
        newcomer.fabric.close()
        assert side.waits(lambda: bool(side.told(PeerLost)))
    elif not side.fabric.revoke(here):
        assert side.hears(Revoked(peer=here))
    side.fabric.remove_peer(here)
    newcomer.fabric.close()


def test_peers_that_come_and_go_leave_nothing_behind(side: NativeSide, transport: Transport) -> None:
    for _ in range(10):
        meets_a_newcomer(side, transport)
    before = Held.now()
    for _ in range(NUM_PEERS or FEW[transport]):
        meets_a_newcomer(side, transport)
    assert side.waits(lambda: Held.now().files <= before.files, 5.0), (before, Held.now())
    after = Held.now()
    assert after.threads <= before.threads
    assert after.mappings <= before.mappings + 4, "the allocator's own may differ"
    # Libfabric keeps an entry and buffers for each address that it has ever met (native/nics/endpoint.h says why).
    assert after.resident_mib <= before.resident_mib + (4.0 if transport == "mapped" else 32.0)
    counts = side.fabric.statistics()
    assert (counts.num_peers_now, counts.num_transfers_now, counts.num_counters_now) == (0, 0, 0)


def test_processes_that_are_killed_leave_nothing_here_nor_in_shared_memory(
    side: NativeSide, transport: Transport
) -> None:
    shared = set(os.listdir("/dev/shm"))
    before = Held.now()
    with ExitStack() as held:
        processes = [held.enter_context(ReaderProcess(transport)) for _ in range(3)]
        peers = [side.knows(process) for process in processes]
        for process, peer in zip(processes, peers, strict=True):
            side.enter(process, peer)
            side.admit(process, peer)
            process.ask("arm", 1, 1)
            side.write(peer, 1, 65536)
            process.ask("reached", 1)
            process.ask("write", side.fabric.address.hex(), 2, 16, 65536)
        for process in processes:
            process.process.kill()
        assert side.waits(lambda: len(side.told(PeerLost)) == 3)
        for peer in peers:
            if not side.fabric.revoke(peer):
                assert side.hears(Revoked(peer=peer))
            side.fabric.remove_peer(peer)
    # libfabric sees the end of its connections when it is asked next, and closes its files by and by.
    assert side.waits(lambda: Held.now().files <= before.files, 5.0), (before, Held.now())
    assert Held.now().threads == before.threads
    assert not shm_files(*processes)
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("headrace-shm-")} <= shared


@pytest.mark.timing
def test_an_idle_pair_uses_next_to_nothing_of_a_core(side: NativeSide, transport: Transport) -> None:
    """Less than 1 % of one each, owner and control thread and all: two fabrics in this process, 2 seconds."""
    with closing(other := NativeSide(transports=(transport,))):
        there, _ = link(side, other)
        other.fabric.arm(Imm(5), 1)
        side.write(there, 5, 65536)
        assert other.waits(lambda: bool(other.told(Reached)))
        time.sleep(0.2)
        owners = [each.fabric.owner_cpu_ns() for each in (side, other)]
        spent, begun = time.process_time(), time.monotonic()
        threading.Event().wait(2.0)
        seconds = time.monotonic() - begun
        spent = time.process_time() - spent
        assert spent < 0.02 * seconds, f"{spent / seconds:.2%} for both"
        for each, before in zip((side, other), owners, strict=True):
            assert (each.fabric.owner_cpu_ns() - before) / 1e9 < 0.01 * seconds
