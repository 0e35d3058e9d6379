"""The two memories between which pages are carried: the caller's, so that loops and engine work on the same bytes, or
fresh ones. Owns the descriptors of fresh ones only."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Memories:
    """Files that can be mapped for reading and writing (memfds), and how many bytes of each."""

    src_fd: int
    src_bytes: int
    dst_fd: int
    dst_bytes: int


@contextmanager
def fresh_memories(num_bytes: int) -> Iterator[Memories]:
    """Two of `num_bytes`, zeroed, in small pages; a fabric may seal them. Raises OSError."""
    src_fd = os.memfd_create("headrace-limits-src", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        dst_fd = os.memfd_create("headrace-limits-dst", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for fd in (src_fd, dst_fd):
                os.ftruncate(fd, num_bytes)
            yield Memories(src_fd=src_fd, src_bytes=num_bytes, dst_fd=dst_fd, dst_bytes=num_bytes)
        finally:
            os.close(dst_fd)
    finally:
        os.close(src_fd)
