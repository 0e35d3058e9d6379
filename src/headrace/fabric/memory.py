"""Memory that transfers read and write: a memfd of our own, seen as numpy arrays and torch tensors.

Owns the file descriptor and one mapping. Whatever is to be sent or received lies in such memory (or in any other memory
file that a `NativeFabric` is given): a peer of this host maps the file, every other peer gets a mapping of its own that
can be taken away from it, and both need a file. Arrays from elsewhere are copied in.
"""

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from headrace.errors import InputError


class _Tensor(Protocol):
    """A torch tensor, as far as its place is concerned."""

    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...
    def element_size(self) -> int: ...
    def numel(self) -> int: ...


class SharedMemory:
    """`num_bytes` zeroed bytes. Views stay valid when it is collected; the descriptor goes with it."""

    def __init__(self, num_bytes: int) -> None:
        """Raises InputError, or OSError when the system has no such memory."""
        if num_bytes < 1:
            raise InputError("num_bytes", f"must be at least 1, is {num_bytes}")
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("headrace-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._finalizer = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, num_bytes)
        # Whoever maps it writes there: memory that went away under them would kill them.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, num_bytes), dtype=np.uint8)

    def array(self, shape: int | Sequence[int], dtype: DTypeLike, *, offset: int = 0) -> NDArray[np.generic]:
        """A view at `offset`, `[*shape] dtype`; `torch.from_numpy` makes a tensor of the same bytes (of bfloat16 by way
        of an int16 array and `.view(torch.bfloat16)`). Raises InputError where it does not fit or is not aligned."""
        kind = np.dtype(dtype)
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = math.prod(dims) * kind.itemsize
        if min(dims, default=0) < 0 or not 0 <= offset <= self.num_bytes - num_bytes:
            raise InputError("shape", f"{dims} of {kind} at {offset} do not fit in {self.num_bytes} bytes")
        if offset % kind.alignment:
            raise InputError("offset", f"must be a multiple of {kind.alignment} for {kind}, is {offset}")
        return self.bytes[offset : offset + num_bytes].view(kind).reshape(dims)

    def offset_of(self, view: "NDArray[np.generic] | _Tensor") -> int:
        """Where a numpy array or torch tensor over this memory begins. Raises InputError when it lies elsewhere, or is
        not in one piece."""
        if isinstance(view, np.ndarray):
            address, num_bytes, is_whole = view.ctypes.data, view.nbytes, view.flags.c_contiguous
        else:
            address, num_bytes = view.data_ptr(), view.numel() * view.element_size()
            is_whole = view.is_contiguous()
        if not is_whole:
            raise InputError("view", "must be contiguous")
        offset = address - self.bytes.ctypes.data
        if not 0 <= offset <= self.num_bytes - num_bytes:
            raise InputError("view", "must lie in this memory: copy it in")
        return offset

    def __repr__(self) -> str:
        return f"SharedMemory({self.num_bytes} bytes, fd={self.fd})"
