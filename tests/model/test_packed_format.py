"""What is read of another's memory is what was written, and every way in which it may be something else is refused."""

import fcntl
import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.kvcache.mapping import HUGE_PAGE_BYTES, forbid_writes, map_shared
from headrace.model.packed_format import (
    FIRST_REGION,
    Contents,
    Refused,
    add_seals,
    read_contents,
    write_contents,
)

DIGEST = bytes(range(32))
CONTENTS = Contents(sizes=(1000, 64, 3000, 1), in_huge_pages=True)
TABLE = FIRST_REGION + 1024 + 64 + 3008 + 64
VERSION, ITS_DIGEST, ITS_TABLE, NUM_REGIONS = 8, 16, 48, 56
"""Where the header has them."""


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("packed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, HUGE_PAGE_BYTES)
    yield fd
    os.close(fd)


@pytest.fixture
def whole(fd: int) -> NDArray[np.uint8]:
    array = map_shared(fd, HUGE_PAGE_BYTES)
    write_contents(array, DIGEST, CONTENTS)
    return array


def test_what_was_written_is_read(fd: int, whole: NDArray[np.uint8]) -> None:
    add_seals(fd)
    assert read_contents(fd, DIGEST) == CONTENTS
    assert not whole[FIRST_REGION:TABLE].any()  # header and table lie around the regions


def test_no_regions_are_contents_too(fd: int, whole: NDArray[np.uint8]) -> None:
    nothing = Contents(sizes=(), in_huge_pages=False)
    write_contents(whole, DIGEST, nothing)
    add_seals(fd)
    assert read_contents(fd, DIGEST) == nothing


def test_a_sealed_memory_can_be_neither_written_nor_resized_nor_mapped_for_writing(
    fd: int, whole: NDArray[np.uint8]
) -> None:
    forbid_writes(whole)
    add_seals(fd)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        for act in (
            lambda: os.pwrite(again, b"x", 0),
            lambda: os.ftruncate(again, 0),
            lambda: os.ftruncate(again, 2 * HUGE_PAGE_BYTES),
            lambda: map_shared(again, HUGE_PAGE_BYTES),
            lambda: fcntl.fcntl(again, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                act()
    finally:
        os.close(again)


DAMAGES = {
    "it is of another format": [(0, b"headrack"), (VERSION, b"\x02")],
    "it has another key": [(ITS_DIGEST, b"\x01"), (ITS_DIGEST + 31, b"\x00")],
    "bytes do not fit": [
        (ITS_TABLE, struct.pack("<Q", HUGE_PAGE_BYTES)),
        (NUM_REGIONS, struct.pack("<Q", HUGE_PAGE_BYTES)),
        (NUM_REGIONS, struct.pack("<Q", 2**64 - 1)),
    ],
    "its regions do not end where its table begins": [
        (ITS_TABLE, struct.pack("<Q", TABLE + 64)),
        (NUM_REGIONS, b"\x03"),
        (TABLE, struct.pack("<Q", 1025)),
    ],
}


@pytest.mark.parametrize(
    ("said", "offset", "damage"), [(said, *where) for said, wheres in DAMAGES.items() for where in wheres]
)
def test_another_header_is_refused(fd: int, whole: NDArray[np.uint8], said: str, offset: int, damage: bytes) -> None:
    whole[offset : offset + len(damage)] = np.frombuffer(damage, np.uint8)
    add_seals(fd)
    with pytest.raises(Refused, match=said):
        read_contents(fd, DIGEST)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL, 0x10])
def test_a_memory_that_may_still_change_is_refused(fd: int, whole: NDArray[np.uint8], missing: int) -> None:
    assert read_refusal(fd) == "it is not sealed"
    every = 0x10 | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, every & ~missing)
    assert read_refusal(fd) == "it is not sealed"


def test_an_empty_memory_is_refused() -> None:
    fd = os.memfd_create("packed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    add_seals(fd)
    assert read_refusal(fd) == "it has no header"
    os.close(fd)


def test_another_users_memory_is_refused(fd: int, whole: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch) -> None:
    add_seals(fd)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert read_refusal(fd) == f"user {owner} made it"


def test_what_is_no_memory_at_all_is_an_error_of_the_system() -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(OSError, match="Invalid argument"):
        read_contents(read_end, DIGEST)
    os.close(read_end)
    os.close(write_end)


def read_refusal(fd: int) -> str:
    with pytest.raises(Refused) as refused:
        read_contents(fd, DIGEST)
    return str(refused.value)
