"""How a memory of packed weights is laid out, and what makes another process's one worth believing. Owns no state.

    [0, 4096)            header: magic, format, digest of the key, where the table is, whether in huge pages
    [4096, table)        the regions, each at a multiple of 64 bytes
    [table, table_end)   their sizes
    [table_end, length)  nothing, up to a multiple of 2 MiB

The header is written last and the kernel's seals come after it: a memory that has them is whole and stays as it is,
whatever becomes of whoever packed it.
"""

import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.mapping import HUGE_PAGE_BYTES

FIRST_REGION = 4096

_HEADER = struct.Struct("<8sI?3x32sQQ")
_MAGIC = b"headrace"
_FORMAT = 1
_SIZE = np.dtype("<u8")

# Not in Python 3.11's fcntl. F_SEAL_WRITE would be refused: our own writable mapping, though protected, still counts.
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Refused(Exception):
    """A memory that somebody holds is not what it is held for; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """`sizes` of the regions in bytes, in order."""

    sizes: tuple[int, ...]
    in_huge_pages: bool


def write_contents(whole: NDArray[np.uint8], digest: bytes, contents: Contents) -> None:
    """Table, then header, into a memory whose regions are filled; `digest` is the key's, 32 bytes."""
    table = _end_of_regions(contents.sizes)
    whole[table : end_of_table(table, len(contents.sizes))] = np.array(contents.sizes, _SIZE).view(np.uint8)
    header = _HEADER.pack(_MAGIC, _FORMAT, contents.in_huge_pages, digest, table, len(contents.sizes))
    whole[: len(header)] = np.frombuffer(header, np.uint8)


def add_seals(fd: int) -> None:
    """Its size and bytes stay: no write, no new writable mapping. Raises OSError."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def read_contents(fd: int, digest: bytes) -> Contents:
    """Of a memory that this user packed for the key of `digest`. Raises Refused, or OSError where it is no memfd."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise Refused(f"user {status.st_uid} made it")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise Refused("it is not sealed")
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        raise Refused("it has no header")
    magic, version, huge, its_digest, table, num_regions = _HEADER.unpack(header)
    if (magic, version) != (_MAGIC, _FORMAT):
        raise Refused("it is of another format")
    if its_digest != digest:
        raise Refused("it has another key")
    if status.st_size != in_huge_pages(end_of_table(table, num_regions)):
        raise Refused(f"{status.st_size} bytes do not fit {num_regions} regions that end at {table}")
    sizes = tuple(np.frombuffer(os.pread(fd, num_regions * _SIZE.itemsize, table), _SIZE).tolist())
    if _end_of_regions(sizes) != table:
        raise Refused("its regions do not end where its table begins")
    return Contents(sizes=sizes, in_huge_pages=huge)


def end_of_table(table: int, num_regions: int) -> int:
    return table + num_regions * _SIZE.itemsize


def in_lines(num_bytes: int) -> int:
    """Rounded up to whole 64 bytes."""
    return -(-num_bytes // 64) * 64


def in_huge_pages(num_bytes: int) -> int:
    """Rounded up to whole 2 MiB."""
    return -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _end_of_regions(sizes: Sequence[int]) -> int:
    return FIRST_REGION + sum(map(in_lines, sizes))
