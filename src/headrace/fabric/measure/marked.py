"""A side's memory: filled with bytes that follow from a seed, or with poison, so that wrong ones are seen."""

import hashlib
import mmap

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.fabric.limits.placement import Offsets

POISON = 0xA5
_PIECE_BYTES = 4 << 20


class MarkedMemory:
    """The first `length` bytes of a file, mapped. The descriptor stays the caller's."""

    def __init__(self, fd: int, length: int) -> None:
        self.fd = fd
        self.length = length
        self._bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, length), dtype=np.uint8)

    def fill(self, seed: int) -> None:
        words = self._bytes[: self.length // 8 * 8].view(np.uint64)
        rng = np.random.default_rng(seed)
        for begin in range(0, len(words), _PIECE_BYTES):
            piece = words[begin : begin + _PIECE_BYTES]
            piece[:] = rng.integers(2**64, size=len(piece), dtype=np.uint64)

    def poison(self) -> None:
        self._bytes[:] = POISON

    def digest(self, offsets: Offsets, page_bytes: int) -> bytes:
        self._check(offsets, page_bytes)
        digest = hashlib.blake2b(digest_size=16)
        for offset in offsets:
            digest.update(self._bytes[offset : offset + page_bytes].data)
        return digest.digest()

    def num_changed_beside(self, offsets: Offsets, page_bytes: int) -> int:
        """Bytes that are no poison, in the gaps between these pages."""
        self._check(offsets, page_bytes)
        begin, changed = 0, 0
        for offset in (*np.sort(offsets), self.length):
            for at in range(begin, offset, _PIECE_BYTES):
                changed += int(np.count_nonzero(self._bytes[at : min(at + _PIECE_BYTES, offset)] != POISON))
            begin = max(begin, offset + page_bytes)
        return changed

    def _check(self, offsets: Offsets, page_bytes: int) -> None:
        if len(offsets) and not 0 <= offsets.min() <= offsets.max() <= self.length - page_bytes:
            raise InputError("offsets", f"must lie in {self.length} bytes with {page_bytes} after each")
