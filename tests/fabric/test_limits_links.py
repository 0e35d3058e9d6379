"""The bare loops between two processes: every page arrives at its place, counts are right, and whatever dies or stops,
the caller is told soon and nothing is left behind."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest
from limits_memories import Filled, endpoint_files, filled_memories, half_of_all_pages, is_running, placed

from headrace.errors import Closed, FabricError, InputError
from headrace.fabric.limits.links import Link, PageLink, Sides, libfabric_link, socket_link, wake_link
from headrace.fabric.limits.memories import Memories, fresh_memories
from headrace.fabric.limits.rates import libfabric_rates, libfabric_times, socket_rates, socket_times, wake_times

LINKS = ["tcp", "tcp;ofi_rxm", "shm"]
WAKES = ["futex", "eventfd", "spin"]
TWO_CPUS = len(os.sched_getaffinity(0)) > 1


@pytest.fixture
def filled() -> Iterator[Filled]:
    with filled_memories() as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    yield
    assert endpoint_files() == []
    assert open_files() <= before


def page_link(name: str, memories: Memories, sides: Sides) -> AbstractContextManager[PageLink]:
    if name == "tcp":
        return socket_link(memories, sides=sides)
    return libfabric_link(name, memories, sides=sides)


@contextmanager
def any_link(name: str, *, timeout_s: float = 20.0) -> Iterator[Link]:
    sides = Sides(timeout_s=timeout_s)
    if name in WAKES:
        if name == "spin" and not TWO_CPUS:
            pytest.skip("spinning needs two CPUs")
        with wake_link(name, sides=sides) as link:  # type: ignore[arg-type]
            yield link
    else:
        with fresh_memories(4096) as memories, page_link(name, memories, sides) as link:
            yield link


def process_ids(link: Link) -> list[int]:
    return [process_id for process_id in link.process_ids if process_id is not None]


# ---- what is carried -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINKS)
def test_pages_land_at_their_offsets_and_nothing_else_changes(name: str, filled: Filled) -> None:
    with page_link(name, filled.memories, Sides(timeout_s=20)) as link:
        for placement in (
            half_of_all_pages(4096),
            half_of_all_pages(1 << 16),
            placed([3, 3, 1], [7, 900_001, 5], 1),
            placed([0], [0], 1 << 20),
            placed([], [], 64),
        ):
            run = link.run(placement)
            filled.assert_carried(placement)
            filled.poison()
            assert run.num_bytes == placement.num_bytes
            assert run.seconds > 0 and run.sender_cpu_s > 0 and run.receiver_cpu_s > 0


def test_round_trips_between_runs_carry_eight_bytes_and_no_more(filled: Filled) -> None:
    page = placed([8192], [8192], 4096)
    with libfabric_link("tcp;ofi_rxm", filled.memories, window=1, sides=Sides(timeout_s=20)) as link:
        for _ in range(2):
            link.run(page)
            link.round_trips(20)
    filled.assert_carried(page, placed([0], [0], 8))


def test_rates_hold_every_repetition() -> None:
    placement = placed([0, 64], [128, 0], 64)
    sides = Sides(timeout_s=20)
    for rates in (
        socket_rates([placement], repetitions=3, sides=sides),
        libfabric_rates([placement], provider="shm", repetitions=3, sides=sides),
    ):
        assert rates.link in ("tcp", "shm") and rates.page_bytes == 64
        assert [run.num_bytes for run in rates.runs] == [128] * 3
        assert len(rates.bytes_per_s) == len(rates.cpu_s_per_gb) == 3
        assert min(rates.bytes_per_s) > 0 and min(rates.cpu_s_per_gb) > 0


def test_times_hold_every_repetition() -> None:
    sides = Sides(timeout_s=20)
    for times in (
        wake_times("futex", num_rounds=10, pause_s=0.002, repetitions=2, sides=sides),
        wake_times("eventfd", num_rounds=10, repetitions=2, sides=sides),
        socket_times(num_rounds=10, repetitions=2, sides=sides),
        libfabric_times(provider="shm", num_rounds=10, repetitions=2, sides=sides),
    ):
        assert [run.num_rounds for run in times.runs] == [10, 10]
        assert all(0 < run.p50_ns <= run.p99_ns for run in times.runs)
        assert times.pause_s == (0.002 if times.link == "futex" else 0.0)


@pytest.mark.skipif(not TWO_CPUS, reason="spinning needs two CPUs")
def test_a_word_that_both_spin_on_goes_to_and_fro() -> None:
    (run,) = wake_times("spin", num_rounds=10, repetitions=1, sides=Sides(timeout_s=20)).runs
    assert run.p50_ns > 0


def test_a_pause_is_slept_before_every_round() -> None:
    with any_link("futex") as link:
        began = time.monotonic()
        link.round_trips(1, pause_s=0.002)
        assert time.monotonic() - began >= 101 * 0.002  # a hundred rounds warm up


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "src", "dst", "field"),
    [
        ("tcp", 1 << 20, 0, "src_offsets"),
        ("tcp", 0, (1 << 20) - 7, "dst_offsets"),
        ("tcp;ofi_rxm", 0, (1 << 20) - 7, "dst_offsets"),
    ],
)
def test_places_beyond_the_memories_are_refused_and_end_the_link(
    name: str, src: int, dst: int, field: str, filled: Filled
) -> None:
    with page_link(name, filled.memories, Sides(timeout_s=20)) as link:
        with pytest.raises(InputError) as refused:
            link.run(placed([0, src], [0, dst], 8))
        assert refused.value.field == field
        with pytest.raises(Closed):
            link.round_trips(1)
    filled.assert_carried()


def test_counts_out_of_range_are_refused_and_the_link_goes_on() -> None:
    with any_link("tcp") as link:
        for num_rounds, pause_s, field in ((0, 0.0, "num_rounds"), (1, -1.0, "pause_ns"), (1, 1.5, "pause_ns")):
            with pytest.raises(InputError) as refused:
                link.round_trips(num_rounds, pause_s=pause_s)
            assert refused.value.field == field
        assert link.round_trips(1).p50_ns > 0
    with (
        fresh_memories(4096) as memories,
        libfabric_link("tcp;ofi_rxm", memories, window=0) as pages,
        pytest.raises(InputError, match="window"),
    ):
        pages.run(placed([0], [0], 8))


def test_an_unknown_provider_is_a_fabric_error_with_its_call() -> None:
    with (
        fresh_memories(4096) as memories,
        pytest.raises(FabricError, match="fi_getinfo.nothing.*No data"),
        libfabric_link("nothing", memories),
    ):
        pytest.fail("opened")


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    cpu = min(os.sched_getaffinity(0))
    with pytest.raises(InputError, match="kind"), wake_link("spin", sides=Sides(cpus=(cpu, cpu))):
        pytest.fail("opened")
    with pytest.raises(FabricError, match="second side.*exit code"), wake_link("futex", sides=Sides(cpus=(cpu, 9999))):
        pytest.fail("opened")


# ---- what dies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tcp", "shm", "futex"])
def test_a_dead_second_side_is_told_within_seconds(name: str) -> None:
    with any_link(name) as link:
        first, second = process_ids(link)
        os.kill(second, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(FabricError, match="limits: second side: its process ended with signal SIGKILL"):
            link.round_trips(10)
        assert time.monotonic() - began < 5
        assert not is_running(first) and not is_running(second)
        assert endpoint_files() == []


@pytest.mark.parametrize(
    ("name", "dying"), [*((name, 1) for name in (*LINKS, *WAKES)), ("tcp;ofi_rxm", 0), ("eventfd", 0)]
)
def test_a_side_that_dies_in_the_middle_is_told_within_seconds(name: str, dying: int) -> None:
    with any_link(name) as link:
        link.round_trips(10)
        ids = process_ids(link)
        killer = threading.Timer(0.1, os.kill, (ids[dying], signal.SIGKILL))
        killer.start()
        began = time.monotonic()
        with pytest.raises(FabricError, match=f"limits: {['first', 'second'][dying]} side.*SIGKILL"):
            link.round_trips(10_000_000)
        killer.join()
        assert time.monotonic() - began < 5
        assert not any(is_running(each) for each in ids)


def test_a_stopped_side_is_told_when_the_time_is_over() -> None:
    with any_link("tcp", timeout_s=3.0) as link:
        ids = process_ids(link)
        os.kill(ids[1], signal.SIGSTOP)
        with pytest.raises(FabricError) as told:
            link.round_trips(10)
        assert told.value.code == errno.ETIMEDOUT
        assert not any(is_running(each) for each in ids)


def test_an_exception_in_between_leaves_no_process() -> None:
    ids = []
    with suppress(KeyboardInterrupt), any_link("shm") as link:
        ids = process_ids(link)
        raise KeyboardInterrupt
    assert len(ids) == 2 and not any(is_running(each) for each in ids)


KILLED_PARENT = """
from headrace.fabric.limits.links import *
from headrace.fabric.limits.memories import fresh_memories
with fresh_memories(4096) as memories, libfabric_link("shm", memories) as link:
    print(*link.process_ids, flush=True)
    link.round_trips(10_000_000)
"""


def test_sides_end_with_the_process_that_started_them_and_take_their_files_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", KILLED_PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        ids = [int(word) for word in parent.stdout.readline().split()]
    assert len(ids) == 2 and endpoint_files() != []
    parent.kill()
    parent.wait()
    until = time.monotonic() + 10
    while any(is_running(each) for each in ids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_running(each) for each in ids)
