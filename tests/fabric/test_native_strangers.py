"""Somebody who found the port and holds no key: counters, memory and honest peers are not disturbed."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.fabric.interface import Event, Imm, MessageReceived
from headrace.fabric.native import NativeFabric

SOURCE = Path(__file__).with_name("hostile_peer.cpp")
LENGTH = 1 << 20
IMM = Imm(0x1234)  # hostile_peer.cpp's
NUM_RECEIVES = 128  # posted by an endpoint
NAME_BYTES = 16  # of an IPv4 endpoint; the address ends with it


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler for the hostile peer")
    built = tmp_path_factory.mktemp("hostile") / "hostile_peer"
    command = [compiler, "-std=c++20", "-O1", str(SOURCE), "-o", str(built), "-lfabric"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return built


@dataclass
class Victim:
    fabric: NativeFabric
    friend: NativeFabric
    events: list[Event] = field(default_factory=list)

    def suffer(self, stranger: Path, mode: str, count: int) -> None:
        nic = self.fabric.address[-NAME_BYTES:]  # what libfabric calls it
        command = [str(stranger), nic.hex(), mode, str(count)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert ended.stdout == f"ended {count}\n"
        self.events += self.fabric.drain_events()

    def hears(self, message: bytes) -> bool:
        self.friend.send(self.friend.add_peer(self.fabric.address), message)
        deadline = time.monotonic() + 10.0
        while MessageReceived(message=message) not in self.events and time.monotonic() < deadline:
            time.sleep(0.01)
            self.events += self.fabric.drain_events()
        return self.events[-1:] == [MessageReceived(message=message)]


@pytest.fixture
def victim() -> Iterator[Victim]:
    fd = os.memfd_create("headrace-strangers", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LENGTH)
    made = Victim(*(NativeFabric(fd, LENGTH, transports=("tcp",)) for _ in range(2)))
    os.close(fd)
    yield made
    made.fabric.close()
    made.friend.close()


def test_messages_that_carry_an_imm_count_for_nothing_and_use_up_no_receives(stranger: Path, victim: Victim) -> None:
    victim.fabric.arm(IMM, 5)
    victim.suffer(stranger, "data", 3 * NUM_RECEIVES)
    assert victim.events == [] and victim.fabric.statistics().num_arrivals == 0
    assert victim.fabric.num_fragments_dropped() == 3 * NUM_RECEIVES
    assert victim.hears(b"an honest word")


def test_messages_larger_than_a_fragment_are_dropped(stranger: Path, victim: Victim) -> None:
    victim.suffer(stranger, "oversized", 2 * NUM_RECEIVES)
    assert victim.events == []
    assert victim.hears(b"an honest word")


def test_messages_begun_with_a_short_fragment_are_not_kept(stranger: Path, victim: Victim) -> None:
    """One byte each would cost its bookkeeping, a hundred times what it is counted with."""
    victim.suffer(stranger, "begun", 1000)
    assert victim.events == [] and victim.fabric.num_fragments_dropped() == 1000
    assert victim.hears(b"an honest word")
