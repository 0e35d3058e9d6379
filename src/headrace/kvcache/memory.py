"""The bytes of a KV pool: one memfd and our mapping of it, resident and, where the kernel allows it, in huge pages.

Owns the file descriptor and the mapping; knows no layout. Whoever needs another view of the same bytes (a fabric's
alias for one peer, a rank's process) maps the descriptor again. Made and closed by one thread at a time; the array
may be used from any. Linux only.
"""

import fcntl
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from headrace.errors import Closed, InputError
from headrace.kvcache.mapping import HUGE_PAGE_BYTES, map_shared, try_collapse


class PoolMemory:
    """`length` bytes, 2 MiB aligned: `bytes` here, `fd` for everybody else. Zeroed; with a `fd`, which it takes over,
    they are those of the process that made it."""

    def __init__(self, length: int, fd: int | None = None) -> None:
        """Raises InputError, or OSError when the system has no such memory."""
        if length < 1 or length % HUGE_PAGE_BYTES:
            raise InputError("length", f"must be a positive multiple of {HUGE_PAGE_BYTES} bytes, is {length}")
        self.length = length
        is_new = fd is None
        self._fd = os.memfd_create("headrace-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if fd is None else fd
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        try:
            if is_new:
                os.ftruncate(self._fd, length)
                # Prefillers of this host map it: memory that went away under them would kill them.
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = map_shared(self._fd, length)
        except OSError:
            self._close_fd()
            raise
        if is_new:
            # Written, not only reserved: resident before the first request, and only filled pages can be collapsed.
            memory.fill(0)
        self.huge_pages = try_collapse(memory, "KV memory")
        self._bytes: NDArray[np.uint8] | None = memory

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
