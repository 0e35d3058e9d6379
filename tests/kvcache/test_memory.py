"""The memfd and its mapping: aligned, resident, shared, in huge pages or one line about it, gone after close."""

import errno
import fcntl
import gc
import logging
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import Closed, InputError
from headrace.kvcache import mapping as mapping_module
from headrace.kvcache.mapping import HUGE_PAGE_BYTES
from headrace.kvcache.memory import PoolMemory

LENGTH = 2 * HUGE_PAGE_BYTES


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mapping_at(address: int) -> dict[str, int] | None:
    """The smaps record, in bytes, of the mapping that begins at `address`."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            record = {}
            for entry in lines:
                name, _, value = entry.partition(":")
                if not value.endswith(" kB"):
                    break
                record[name] = 1024 * int(value.split()[0])
            return record
    return None


def test_it_keeps_its_length_whoever_has_the_file() -> None:
    memory = PoolMemory(LENGTH)
    for length in (0, 2 * LENGTH):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, length)
    memory.close()


@pytest.mark.parametrize("length", [0, -LENGTH, LENGTH + 4096])
def test_a_length_that_is_not_whole_huge_pages_is_refused_before_anything_is_opened(length: int) -> None:
    before = open_descriptors()
    with pytest.raises(InputError, match="length: must be a positive multiple of 2097152 bytes"):
        PoolMemory(length)
    assert open_descriptors() == before


def test_the_memory_is_aligned_zeroed_writable_and_resident() -> None:
    memory = PoolMemory(LENGTH)
    try:
        assert memory.bytes.dtype == np.uint8
        assert memory.bytes.shape == (LENGTH,)
        assert memory.bytes.ctypes.data % HUGE_PAGE_BYTES == 0
        assert memory.bytes.flags.writeable
        assert not memory.bytes.any()
        mapping = mapping_at(memory.bytes.ctypes.data)
        assert mapping is not None
        assert (mapping["Size"], mapping["Rss"]) == (LENGTH, LENGTH)
        if memory.huge_pages:
            assert mapping["ShmemPmdMapped"] == LENGTH
    finally:
        memory.close()


def test_another_mapping_of_the_descriptor_sees_the_same_bytes() -> None:
    memory = PoolMemory(LENGTH)
    with mmap.mmap(memory.fd, LENGTH) as other:
        memory.bytes[12345] = 77
        other[LENGTH - 1] = 99
        assert other[12345] == 77
        assert memory.bytes[-1] == 99
    memory.close()


def test_the_descriptor_is_named_and_does_not_survive_exec() -> None:
    memory = PoolMemory(LENGTH)
    assert os.readlink(f"/proc/self/fd/{memory.fd}").startswith("/memfd:headrace-kv")
    assert fcntl.fcntl(memory.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert os.fstat(memory.fd).st_size == LENGTH
    memory.close()


def test_refused_huge_pages_cost_one_line_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, int]] = []

    def refuse(address: int, length: int, advice: int) -> None:
        asked.append((length, advice))
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mapping_module, "_madvise", refuse)
    with caplog.at_level(logging.DEBUG):
        memory = PoolMemory(LENGTH)
    assert asked == [(LENGTH, 25)]  # the whole mapping in one call
    assert [record.getMessage() for record in caplog.records] == [
        f"no huge pages for the KV memory of {LENGTH} bytes: Invalid argument (22)"
    ]
    assert not memory.huge_pages
    mapping = mapping_at(memory.bytes.ctypes.data)
    assert mapping is not None
    assert mapping["Rss"] == LENGTH
    memory.bytes[:] = 1
    assert memory.bytes.all()
    memory.close()


def test_closing_gives_back_descriptor_and_mapping_and_may_be_repeated() -> None:
    before = open_descriptors()
    memory = PoolMemory(LENGTH)
    address = memory.bytes.ctypes.data
    assert repr(memory).startswith(f"PoolMemory(length={LENGTH}, huge_pages=")
    memory.close()
    memory.close()
    assert open_descriptors() == before
    assert mapping_at(address) is None
    assert repr(memory).endswith("closed)")
    for name in ("fd", "bytes"):
        with pytest.raises(Closed):
            getattr(memory, name)


def test_closing_twice_never_closes_somebody_elses_descriptor() -> None:
    memory = PoolMemory(LENGTH)
    number = memory.fd
    memory.close()
    other = os.open("/dev/null", os.O_RDONLY)
    try:
        assert other == number  # the number was used again
        memory.close()
        os.fstat(other)
    finally:
        os.close(other)


def test_a_view_that_outlives_the_memory_stays_valid_and_takes_the_mapping_with_it() -> None:
    memory = PoolMemory(LENGTH)
    address = memory.bytes.ctypes.data
    view = memory.bytes[100:200]
    memory.close()
    view[:] = 5
    assert view.sum() == 500
    assert mapping_at(address) is not None
    del view
    assert mapping_at(address) is None


def test_a_forgotten_memory_leaks_nothing() -> None:
    before = open_descriptors()
    memory = PoolMemory(LENGTH)
    address = memory.bytes.ctypes.data
    del memory
    gc.collect()
    assert open_descriptors() == before
    assert mapping_at(address) is None


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_refused_mapping_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, failing_call: int) -> None:
    before = open_descriptors()
    real = mapping_module._mmap
    reserved: list[int] = []

    def fail_once(address: int, length: int, protection: int, flags: int, fd: int) -> int:
        if len(reserved) + 1 == failing_call:
            raise OSError(errno.ENOMEM, "no memory")
        reserved.append(real(address, length, protection, flags, fd))
        return reserved[-1]

    monkeypatch.setattr(mapping_module, "_mmap", fail_once)
    with pytest.raises(OSError, match="no memory") as refused:
        PoolMemory(LENGTH)
    assert open_descriptors() == before, f"although somebody keeps {refused.value!r} and its frames"
    assert all(mapping_at(address) is None for address in reserved)


def test_more_memory_than_there_are_addresses_is_an_error_of_the_system() -> None:
    before = open_descriptors()
    with pytest.raises(OSError, match="mmap of"):
        PoolMemory(1 << 50)
    assert open_descriptors() == before
