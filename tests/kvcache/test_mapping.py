"""Mappings: aligned wherever the reserve lands, gone after the last view, read-only when asked for or made so."""

import ctypes
import errno
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.kvcache import mapping as mapping_module
from headrace.kvcache.mapping import HUGE_PAGE_BYTES, forbid_writes, map_shared, try_collapse

LENGTH = 2 * HUGE_PAGE_BYTES


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("mapped", os.MFD_CLOEXEC)
    os.ftruncate(fd, LENGTH)
    yield fd
    os.close(fd)


def spans() -> list[tuple[int, int, str]]:
    """Begin, end and rights of all mappings of this process."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [(*(int(end, 16) for end in span.split("-")), rights) for span, rights, *_ in lines]  # type: ignore[misc]


def rights_at(address: int) -> str | None:
    return next((rights for begin, end, rights in spans() if begin <= address < end), None)


@pytest.mark.parametrize("shift", [0, 4096, HUGE_PAGE_BYTES - 4096])
def test_the_mapping_is_aligned_wherever_the_reserve_lands_and_the_rest_is_given_back(
    monkeypatch: pytest.MonkeyPatch, fd: int, shift: int
) -> None:
    real = mapping_module._mmap
    reserve_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    hole = real(0, 4 * LENGTH, 0, reserve_flags, -1)
    aligned = -(-hole // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    mapping_module._libc.munmap(hole, 4 * LENGTH)

    def land_there(address: int, length: int, protection: int, flags: int, fd: int) -> int:
        return real(address or aligned + shift, length, protection, flags, fd)

    monkeypatch.setattr(mapping_module, "_mmap", land_there)
    array = map_shared(fd, LENGTH)
    address = array.ctypes.data
    assert address == aligned + (HUGE_PAGE_BYTES if shift else 0)
    reserve = range(aligned + shift, aligned + shift + LENGTH + HUGE_PAGE_BYTES)
    assert [(begin, end) for begin, end, _ in spans() if begin in reserve] == [(address, address + LENGTH)]


def test_two_mappings_share_their_bytes_and_the_read_only_one_cannot_be_made_writable(fd: int) -> None:
    writable, read_only = map_shared(fd, LENGTH), map_shared(fd, LENGTH, writable=False)
    writable[12345] = 77
    assert read_only[12345] == 77
    with pytest.raises(ValueError, match="read-only"):
        read_only[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        read_only.flags.writeable = True
    assert rights_at(read_only.ctypes.data) == "r--s"
    assert rights_at(writable.ctypes.data) == "rw-s"


def test_a_mapping_goes_with_its_last_view(fd: int) -> None:
    array = map_shared(fd, LENGTH)
    address, view = array.ctypes.data, array[100:200].view(np.uint32)
    del array
    gc.collect()
    view[0] = 5
    assert rights_at(address) == "rw-s"
    del view
    gc.collect()
    assert rights_at(address) is None


def test_a_read_only_mapping_gets_huge_pages_too(fd: int) -> None:
    writable = map_shared(fd, LENGTH)
    writable.fill(3)
    expected = try_collapse(writable, "test's first mapping")
    read_only = map_shared(fd, LENGTH, writable=False)
    assert try_collapse(read_only, "test's second mapping") == expected
    assert (read_only == 3).all()


def test_madvise_raises_what_the_kernel_said() -> None:
    with pytest.raises(OSError, match="Invalid argument") as refused:
        mapping_module._madvise(4096 + 1, 4096, 25)  # not page aligned
    assert refused.value.errno == errno.EINVAL


def test_only_whole_mapped_pages_can_be_protected() -> None:
    with pytest.raises(OSError, match="mprotect of 10 bytes: Invalid argument"):
        forbid_writes(np.frombuffer((ctypes.c_uint8 * 8192)(), np.uint8)[1:11])


STRAY_WRITE = """
import os
from headrace.kvcache.mapping import HUGE_PAGE_BYTES, forbid_writes, map_shared
fd = os.memfd_create("mapped")
os.ftruncate(fd, HUGE_PAGE_BYTES)
array = map_shared(fd, HUGE_PAGE_BYTES)
array[7] = 1
forbid_writes(array)
print(array[7], flush=True)
array[7] = 2
print("written", flush=True)
"""


def test_a_write_where_writes_are_forbidden_faults() -> None:
    answer = subprocess.run([sys.executable, "-c", STRAY_WRITE], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (-11, "1\n")
