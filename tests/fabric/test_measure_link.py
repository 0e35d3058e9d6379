"""Two engines in processes of their own: what they carry is right, what they tell is of everything that was asked, and
whatever dies in the middle is told and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from limits_memories import is_running, placed
from measured_links import open_files, side_processes

from headrace.errors import FabricError, InputError
from headrace.fabric.limits import wire
from headrace.fabric.limits.links import HERE
from headrace.fabric.limits.memories import fresh_memories
from headrace.fabric.limits.placement import Placement, scattered
from headrace.fabric.limits.records import LinkRun
from headrace.fabric.measure import questions as q
from headrace.fabric.measure.limits import BareCopies
from headrace.fabric.measure.link import EngineLink
from headrace.fabric.measure.marked import POISON, MarkedMemory
from headrace.fabric.measure.side import Given, Side
from headrace.fabric.measure.sides import Sides, local_sides

LENGTH = 8 << 20
PAGES = scattered(page_bytes=4096, num_bytes=1 << 20, region_bytes=LENGTH, seed=1)[0]
THOUSAND = scattered(page_bytes=4096, num_bytes=1000 * 4096, region_bytes=LENGTH, seed=1)[0]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = open_files()
    yield
    assert side_processes(os.getpid()) == []
    assert open_files() <= before


@contextmanager
def started() -> Iterator[Sides]:
    with fresh_memories(LENGTH) as memories, local_sides(memories, HERE.two_cpus()) as sides:
        sides.ask_first(q.Fill(seed=7), wire.Done)
        yield sides


def process_ids(sides: Sides) -> list[int]:
    return [side.process.pid for side in (sides.first, sides.second) if side.process is not None]


# ---- what is carried and told


class Forgetful(EngineLink):
    """Says that it has carried all pages, and has carried one less."""

    def run(self, placement: Placement) -> LinkRun:
        some = placed(list(placement.src_offsets[:-1]), list(placement.dst_offsets[:-1]), placement.page_bytes)
        return super().run(some)


class Spilling(EngineLink):
    """Carries all pages, and one byte too many."""

    def run(self, placement: Placement) -> LinkRun:
        beside = next(at for at in range(0, LENGTH, 4096) if at not in placement.dst_offsets)
        super().run(placed([0], [beside + 17], 1))
        return super().run(placement)


@pytest.mark.parametrize("transport", ["mapped", "tcp"])
def test_an_engine_carries_pages_and_words_and_rests(transport: str) -> None:
    with started() as sides:
        link = EngineLink(sides, transport, one_clock=transport == "mapped")
        assert link.carries_whole(PAGES)
        assert link.carries_whole(placed([5, 9000], [70_000, 3], 4097))
        run = link.run(PAGES)
        assert run.num_bytes == 1 << 20
        assert run.seconds > 0 and run.sender_cpu_s > 0 and run.receiver_cpu_s > 0
        for by in ("owner", "python", "message"):
            for _ in range(2):
                times = link.rounds(by, 20, 0.0)
                assert times.num_rounds == 20 and 0 < times.p50_ns <= times.p99_ns
        for times in link.submits(THOUSAND, 3):
            assert 0 < times.p50_ns <= times.p99_ns
        rest = link.rest(0.1)
        assert 0 <= rest.owner <= rest.process < 1
        assert link.rounds("python", 5, 0.001).p50_ns > 0  # it listens again
        assert link.carries_whole(PAGES)


def test_wrong_bytes_are_seen_however_fast_they_came() -> None:
    with started() as sides:
        for kind in (Forgetful, Spilling):
            assert not kind(sides, "mapped", one_clock=True).carries_whole(PAGES)
        assert EngineLink(sides, "mapped", one_clock=True).carries_whole(PAGES)


def test_the_bare_copies_are_of_the_same_bytes_to_the_same_places() -> None:
    with started() as sides:
        sides.ask_second(q.Poison(), wire.Done)
        copies = BareCopies(sides)
        assert copies.run(PAGES).seconds > 0
        assert copies.name.startswith("copy ")
        src, dst = q.wired(PAGES.src_offsets), q.wired(PAGES.dst_offsets)
        sent, came = sides.ask(q.DigestPages(offsets=src, page_bytes=4096), q.DigestPages(offsets=dst, page_bytes=4096))
        assert sent == came
        changed = sides.ask_second(q.CountChanged(offsets=dst, page_bytes=4096), q.Changed)
        assert changed.num_bytes == 0


def test_a_memory_counts_what_changed_beside_pages_and_tells_bytes_apart() -> None:
    with fresh_memories(LENGTH) as memories:
        memory = MarkedMemory(memories.dst_fd, LENGTH)
        memory.poison()
        offsets = np.array([8192, 0, 4096 * 100], dtype=np.int64)
        assert memory.num_changed_beside(offsets, 4096) == 0
        before = memory.digest(offsets, 4096)
        for at in (0, 8192, 8192 + 4095, 4096, 12288, LENGTH - 1):  # three in pages, three beside them
            os.pwrite(memories.dst_fd, bytes([POISON ^ 1]), at)
        assert memory.num_changed_beside(offsets, 4096) == 3
        assert memory.digest(offsets, 4096) != before
        assert memory.digest(offsets[::-1].copy(), 4096) != memory.digest(offsets, 4096)
        with pytest.raises(InputError, match="offsets"):
            memory.digest(np.array([LENGTH - 4095], dtype=np.int64), 4096)
        memory.fill(3)
        seeded = memory.digest(offsets, 4096)
        memory.fill(4)
        assert memory.digest(offsets, 4096) != seeded


# ---- what is refused


@pytest.mark.parametrize(
    ("question", "told"),
    [
        (q.ReceivePages(num_pages=1), "question: must come after Open"),
        (wire.MakeMemory(num_bytes=4096), "memory: must be made once"),
        (q.Open(transport="pigeons"), "transports: must be of"),
        (q.DigestPages(offsets=bytes(7), page_bytes=1), "offsets: must be of 8 bytes each"),
        (q.DigestPages(offsets=q.wired(np.array([4096])), page_bytes=1), "offsets: must lie in"),
        (q.CopyPages(src_offsets=b"", dst_offsets=b"", page_bytes=1), "question: this side has no other memory"),
    ],
)
def test_questions_out_of_place_are_refused(question: q.Question, told: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, fresh_memories(4096) as memories:
        side = Side(ours, Given(memory=(memories.src_fd, 4096), node="127.0.0.1"))
        with pytest.raises(InputError, match=told):
            side.answer(question)
        with pytest.raises(InputError, match="question: must come after MakeMemory"):
            Side(ours, Given()).answer(q.Poison())


def test_an_engine_is_asked_in_the_order_of_its_life() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, fresh_memories(4096) as memories:
        side = Side(ours, Given(memory=(memories.src_fd, 4096), node="127.0.0.1"))
        opened = side.answer(q.Open(transport="mapped"))
        with pytest.raises(InputError, match="question: must come after Admit"):
            side.answer(q.Join(descriptor=bytes(30)))
        assert isinstance(opened, q.Opened)
        side.answer(q.Admit(address=opened.address))
        with pytest.raises(InputError, match="question: must come after Join"):
            side.answer(q.ReceivePages(num_pages=1))
        side.close()


def test_a_provider_that_is_not_there_is_told_with_its_call() -> None:
    with pytest.raises(FabricError, match="fi_getinfo"), started() as sides:
        EngineLink(sides, "efa", one_clock=False)


# ---- what dies


@pytest.mark.parametrize(("dying", "transport"), [(0, "mapped"), (1, "mapped"), (1, "tcp")])
def test_a_side_that_dies_in_the_middle_is_told_within_seconds(dying: int, transport: str) -> None:
    name = ("first", "second")[dying]
    with suppress(FabricError), started() as sides:
        link = EngineLink(sides, transport, one_clock=False)
        killer = threading.Timer(0.2, os.kill, (process_ids(sides)[dying], signal.SIGKILL))
        killer.start()
        began = time.monotonic()
        with pytest.raises(FabricError, match=f"measure: {name} side: its process ended with signal SIGKILL") as told:
            link.rounds("python", 10**6, 0.0)
        killer.join()
        assert time.monotonic() - began < 10
        raise told.value


def test_an_interrupt_in_between_leaves_no_process() -> None:
    ids = []
    with suppress(KeyboardInterrupt), started() as sides:
        ids = process_ids(sides)
        raise KeyboardInterrupt
    assert len(ids) == 2 and not any(is_running(each) for each in ids)


KILLED_PARENT = """
from headrace.fabric.limits.links import HERE
from headrace.fabric.limits.memories import fresh_memories
from headrace.fabric.measure.link import EngineLink
from headrace.fabric.measure.sides import local_sides
with fresh_memories(1 << 20) as memories, local_sides(memories, HERE.two_cpus()) as sides:
    link = EngineLink(sides, "mapped", one_clock=True)
    print(sides.first.process.pid, sides.second.process.pid, flush=True)
    link.rounds("python", 10**6, 0.0)
"""


def test_sides_end_with_the_process_that_started_them() -> None:
    parent = subprocess.Popen([sys.executable, "-c", KILLED_PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        ids = [int(word) for word in parent.stdout.readline().split()]
    assert len(ids) == 2 and all(is_running(each) for each in ids)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 10
    while any(is_running(each) for each in ids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_running(each) for each in ids)
