"""Own and shared memory: the kernel's record by its words, and a process that gets a page of either kind."""

import mmap
import os

import pytest

from headrace.model.footprint import Footprint, own_footprint, parse_rollup

ROLLUP = """\
55d0c7e6f000-7ffd5c9f2000 ---p 00000000 00:00 0                          [rollup]
Rss:              581000 kB
Pss:              446000 kB
Pss_Dirty:          2048 kB
Shared_Clean:      71000 kB
Shared_Dirty:     200000 kB
Private_Clean:     10000 kB
Private_Dirty:    300000 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:       0 kB
"""

MIB = 1 << 20


def test_the_kernels_record_is_read_by_its_words() -> None:
    assert parse_rollup(ROLLUP) == Footprint(
        own_bytes=310_000 << 10, shared_bytes=271_000 << 10, proportional_bytes=446_000 << 10
    )


def test_it_says_what_matters_in_one_line() -> None:
    footprint = Footprint(own_bytes=310_400_000, shared_bytes=271_000_000, proportional_bytes=400_000_000)
    assert str(footprint) == "memory: 310 MB of its own, 271 MB shared"


def test_explicit_huge_pages_count_and_older_kernels_have_no_such_lines() -> None:
    with_huge = ROLLUP.replace("Private_Hugetlb:       0", "Private_Hugetlb:    2048")
    assert parse_rollup(with_huge).own_bytes == parse_rollup(ROLLUP).own_bytes + 2 * MIB
    without = "".join(line for line in ROLLUP.splitlines(keepends=True) if "Hugetlb" not in line)
    assert parse_rollup(without) == parse_rollup(ROLLUP)


def test_memory_that_nobody_else_maps_is_a_processs_own() -> None:
    before = own_footprint()
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:: mmap.PAGESIZE] = b"x" * (64 * MIB // mmap.PAGESIZE)
        after = own_footprint()
    assert after.own_bytes - before.own_bytes == pytest.approx(64 * MIB, abs=8 * MIB)
    assert after.shared_bytes == pytest.approx(before.shared_bytes, abs=8 * MIB)


def test_memory_that_another_process_maps_is_shared() -> None:
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as memory:
        memory[:: mmap.PAGESIZE] = b"x" * (64 * MIB // mmap.PAGESIZE)
        (told, tell), (heard, say) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.read(told, 1)
            memory[:: mmap.PAGESIZE]  # mapped only when touched
            os.write(say, b"x")
            os.read(told, 1)
            os._exit(0)
        before = own_footprint()
        os.write(tell, b"x")
        os.read(heard, 1)
        after = own_footprint()
        os.write(tell, b"x")
        os.waitpid(child, 0)
        for fd in (told, tell, heard, say):
            os.close(fd)
    assert after.shared_bytes - before.shared_bytes == pytest.approx(64 * MIB, abs=8 * MIB)
    assert before.own_bytes - after.own_bytes == pytest.approx(64 * MIB, abs=8 * MIB)
    assert before.proportional_bytes - after.proportional_bytes == pytest.approx(32 * MIB, abs=8 * MIB)
