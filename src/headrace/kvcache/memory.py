"""The bytes of a KV pool: one memfd and our mapping of it, resident and, where the kernel allows it, in huge pages.

Owns the file descriptor and the mapping; knows no layout. Whoever needs another view of the same bytes (a fabric's
alias for one peer, a rank's process) maps the descriptor again. Made and closed by the process's main thread; the
array may be used from any. Linux only.
"""

import ctypes
import logging
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Closed, InputError

HUGE_PAGE_BYTES = 2 << 20

# Not in Python 3.11's mmap module; values of Linux on x86-64 and arm64.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_COLLAPSE = 25
_MAP_FAILED = ctypes.c_void_p(-1).value

_log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PoolMemory:
    """`length` zeroed bytes, 2 MiB aligned: `bytes` here, `fd` for everybody else."""

    def __init__(self, length: int) -> None:
        """Raises InputError, or OSError when the system has no such memory."""
        if length < 1 or length % HUGE_PAGE_BYTES:
            raise InputError("length", f"must be a positive multiple of {HUGE_PAGE_BYTES} bytes, is {length}")
        self.length = length
        self._fd = os.memfd_create("headrace-kv", os.MFD_CLOEXEC)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        try:
            os.ftruncate(self._fd, length)
            address = _map_aligned(self._fd, length)
        except OSError:
            self._close_fd()
            raise
        mapping = (ctypes.c_uint8 * length).from_address(address)
        # Every array and tensor over the mapping keeps `mapping` alive, so it is unmapped after the last of them and
        # no view ever dangles. At exit the kernel does it, when nothing can run any more.
        weakref.finalize(mapping, _libc.munmap, address, length).atexit = False
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(memoryview(mapping), dtype=np.uint8)
        # Written, not only reserved: resident before the first request, and only filled pages can be collapsed.
        ctypes.memset(address, 0, length)
        self.huge_pages = _try_collapse(address, length)

    @property
    def fd(self) -> int:
        """The memfd, close-on-exec. Raises Closed."""
        if self._bytes is None:
            raise Closed("the KV memory was closed")
        return self._fd

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All of it, writable, `[length] uint8`. Raises Closed."""
        if self._bytes is None:
            raise Closed("the KV memory was closed")
        return self._bytes

    def close(self) -> None:
        """Close the descriptor and let go of the mapping; idempotent.

        The mapping goes with the last array or tensor over it, at once when there is none; those that remain stay
        valid.
        """
        self._bytes = None
        self._close_fd()

    def __repr__(self) -> str:
        state = "closed" if self._bytes is None else f"fd={self._fd}"
        return f"PoolMemory(length={self.length}, huge_pages={self.huge_pages}, {state})"


def _map_aligned(fd: int, length: int) -> int:
    """Map all of `fd` at a multiple of 2 MiB. -> address.

    Python's mmap cannot choose an address, and the kernel aligns a small-page mapping to 4 KiB: so reserve too much,
    map over the aligned part of it, give the rest back.
    """
    reserved = length + HUGE_PAGE_BYTES
    reserve_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _mmap(0, reserved, 0, reserve_flags, -1)  # 0: PROT_NONE
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(start, reserved)
        raise
    head, tail = address - start, start + reserved - (address + length)
    if head:
        _libc.munmap(start, head)
    if tail:
        _libc.munmap(address + length, tail)
    return address


def _mmap(address: int, length: int, protection: int, flags: int, fd: int) -> int:
    mapped: int | None = _libc.mmap(address, length, protection, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {length} bytes: {os.strerror(code)}")
    return mapped


def _try_collapse(address: int, length: int) -> bool:
    """Whether the mapping is in huge pages now. Shared mappings get none by themselves, and a decode step reads its
    KV a fifth slower from 4 KiB pages (24-26 against 31.6 GB/s): worth a line, not worth refusing to start."""
    try:
        _madvise(address, length, _MADV_COLLAPSE)
    except OSError as error:
        _log.warning("no huge pages for the KV memory of %d bytes: %s (%d)", length, error.strerror, error.errno)
        return False
    return True


def _madvise(address: int, length: int, advice: int) -> None:
    if _libc.madvise(address, length, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
