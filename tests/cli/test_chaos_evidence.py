"""What is left over is found: descriptors, memory, files of the dead, pages in no column, writes that come late."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from answering_gateway import deployment, instance

from headrace.cli.chaos import evidence
from headrace.cli.chaos.evidence import (
    MORE_BYTES,
    MORE_DESCRIPTORS,
    Evidence,
    Held,
    first_seen,
    gather,
    is_idle,
    late_writes,
    left_over,
    num_leaked_pages,
    pool_of,
    told,
)
from headrace.protocol.operator import InstanceFacts

IDLE = {"pages": 10, "pages_free": 7, "pages_cached": 3, "pages_held": 0, "pages_quarantined": 0, "tickets_open": 0}
HELD = Held(num_descriptors=20, num_threads=4, own_bytes=1 << 28)
INSTANCE = """
import mmap, os, sys
fd = os.memfd_create("headrace-kv")
os.ftruncate(fd, 65536)
mmap.mmap(fd, 65536)
print("there", flush=True)
sys.stdin.readline()
"""


def standing(*, pid: int = 1, num_running: int = 0, **gauges: float) -> InstanceFacts:
    made = instance(1, "decoder", "decoder-0")
    assert made.status is not None
    status = msgspec.structs.replace(made.status, num_running=num_running, gauges={**IDLE, **gauges})
    return msgspec.structs.replace(made, pid=pid, status=status)


@pytest.fixture
def pid() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", INSTANCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        yield process.pid
        process.kill()


@pytest.mark.parametrize("busy", ["pages_held", "pages_quarantined", "tickets_open"])
def test_who_holds_something_is_not_idle_and_is_told(busy: str) -> None:
    assert is_idle([standing()]) and told([standing()]) == []
    assert not is_idle([standing(), standing(**{busy: 2})])
    assert told([standing(**{busy: 2})]) == [f"decoder-0 says 2 {busy}"]
    assert not is_idle([standing(num_running=1)])


def test_pages_that_are_neither_free_nor_cached_have_leaked() -> None:
    assert num_leaked_pages([standing()]) == 0
    assert num_leaked_pages([standing(pages_free=5), standing(pages_cached=2)]) == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_descriptors": 20 + MORE_DESCRIPTORS}, []),
        ({"num_descriptors": 21 + MORE_DESCRIPTORS}, ["decoder-0 has 9 descriptors more"]),
        ({"own_bytes": HELD.own_bytes + MORE_BYTES + (1 << 20)}, ["decoder-0 has 161 MiB more"]),
    ],
)
def test_what_a_process_holds_more_than_before_is_said(more: dict[str, int], said: list[str]) -> None:
    before = Evidence(held={("decoder-0", 7): HELD, ("gateway", 8): HELD}, orphans=frozenset())
    after = Evidence(held={("decoder-0", 7): replace(HELD, **more)}, orphans=frozenset())
    assert left_over(before, after) == said


def test_every_process_is_held_to_what_it_held_when_it_was_first_seen() -> None:
    first = Evidence(held={("decoder-0", 7): HELD}, orphans=frozenset())
    more = replace(HELD, num_descriptors=HELD.num_descriptors + MORE_DESCRIPTORS)
    seen = first_seen(first, Evidence(held={("decoder-0", 7): more, ("gateway", 9): HELD}, orphans=frozenset()))
    assert seen.held == {("decoder-0", 7): HELD, ("gateway", 9): HELD}


def test_a_file_whose_process_is_gone_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pid: int) -> None:
    monkeypatch.setattr(evidence, "SHM", tmp_path)
    before = gather(deployment())
    for number in (pid, 2**22 + 1):  # no process has the second
        (tmp_path / f"headrace-shm-lane-{number}-1").touch()
    after = gather(deployment(standing(pid=pid)))
    assert left_over(before, after) == [f"/dev/shm/headrace-shm-lane-{2**22 + 1}-1 of a process that is gone"]
    assert left_over(after, after) == []
    assert after.held["decoder-0", pid].num_descriptors >= 4


def test_a_write_into_an_idle_pool_is_seen(pid: int) -> None:
    assert late_writes([standing(pid=pid)]) == []

    def write() -> None:
        with pool_of(pid) as pool:
            pool[100] = 1

    threading.Timer(evidence.LATE_WRITE_S / 2, write).start()
    assert late_writes([standing(pid=pid)]) == ["something landed in the idle pool of decoder-0"]
