"""Mappings of whole descriptors: 2 MiB aligned and, where the kernel allows it, in huge pages. Owns no state.

What Python's mmap cannot do: choose an address, collapse into huge pages, take the right to write away again. Callable
from any thread. Linux only.
"""

import ctypes
import logging
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

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
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_shared(fd: int, length: int, *, writable: bool = True) -> NDArray[np.uint8]:
    """The first `length` bytes of `fd`, shared with whoever else maps it, at a multiple of 2 MiB. Raises OSError.

    Unmapped after the last array or tensor over it, so that no view ever dangles.
    """
    address = _map_aligned(fd, length, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    mapping = (ctypes.c_uint8 * length).from_address(address)
    # Every array over the mapping keeps `mapping` alive. At exit the kernel unmaps, when nothing can run any more.
    weakref.finalize(mapping, _libc.munmap, address, length).atexit = False
    view = memoryview(mapping)
    return np.frombuffer(view if writable else view.toreadonly(), dtype=np.uint8)


def try_collapse(array: NDArray[np.uint8], name: str) -> bool:
    """Whether all of `array`, whole filled huge pages of a mapping, is in huge pages now; `name` is for the log.

    Shared mappings get none by themselves, and a decode step reads its KV a fifth slower from 4 KiB pages (24-26
    against 31.6 GB/s): worth a line, not worth refusing to start.
    """
    try:
        _madvise(array.ctypes.data, array.nbytes, _MADV_COLLAPSE)
    except OSError as error:
        _log.warning("no huge pages for the %s of %d bytes: %s (%d)", name, array.nbytes, error.strerror, error.errno)
        return False
    return True


def forbid_writes(array: NDArray[np.uint8]) -> None:
    """From now on a write to the mapping under `array` faults, whoever does it. Raises OSError."""
    if _libc.mprotect(array.ctypes.data, array.nbytes, mmap.PROT_READ):
        raise _last_error(f"mprotect of {array.nbytes} bytes: ")


def _map_aligned(fd: int, length: int, protection: int) -> int:
    """-> address.

    The kernel aligns a small-page mapping to 4 KiB: so reserve too much, map over the aligned part of it, give the rest
    back.
    """
    reserved = length + HUGE_PAGE_BYTES
    reserve_flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _mmap(0, reserved, 0, reserve_flags, -1)  # 0: PROT_NONE
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _mmap(address, length, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
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
        raise _last_error(f"mmap of {length} bytes: ")
    return mapped


def _madvise(address: int, length: int, advice: int) -> None:
    if _libc.madvise(address, length, advice):
        raise _last_error()


def _last_error(call: str = "") -> OSError:
    code = ctypes.get_errno()
    return OSError(code, call + os.strerror(code))
