"""The KV memory of another process of this host, from outside: whether bytes land there, and a bit flipped in them.

Owns mappings of it until they are closed. Which pages are whose nobody outside knows; but where nothing decodes, bytes
that change are bytes that land. A flipped bit stands for a link that corrupts: it is looked at once more, lest the rest
of its own write repaired it.
"""

import mmap
import time
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace.cli.chaos.evidence import pool_of

SAMPLE_BYTES = 4096
LANDED_SAMPLES = 16
"""More than what decodes beside it changes: that is a slot of a page at a time, a chunk of a prompt is many pages."""

LANDS_WITHIN_S = 5.0
LOOK_EVERY_S = 0.01
STAYS_S = 0.02
FLIP = 0x10
"""A high bit of a bf16's exponent, or of what else the byte belongs to: any change must be found."""


class Landings:
    """Of processes, from the first time on that each is asked about."""

    def __init__(self) -> None:
        self._exits = ExitStack()
        self._pools: dict[int, tuple[mmap.mmap, NDArray[np.uint64]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def has_landed(self, pid: int) -> bool:
        """Where the process has just ended: no."""
        if pid not in self._pools:
            with suppress(OSError):
                pool = self._exits.enter_context(pool_of(pid))
                self._pools[pid] = (pool, _sampled(pool))
            return False
        pool, before = self._pools[pid]
        return int(np.count_nonzero(_sampled(pool) != before)) >= LANDED_SAMPLES


def _sampled(pool: mmap.mmap) -> NDArray[np.uint64]:
    return np.frombuffer(pool, dtype=np.uint64)[:: SAMPLE_BYTES // 8].copy()


def flip_a_landed_byte(pid: int) -> bool:
    """False: nothing landed in time. Blocks for as long."""
    with pool_of(pid) as pool:
        return _flip(pool)


def _flip(pool: mmap.mmap) -> bool:
    until = time.monotonic() + LANDS_WITHIN_S
    before = _words(pool).copy()
    while time.monotonic() < until:
        changed = np.flatnonzero(_words(pool) != before)
        if changed.size:
            place = 8 * int(changed[0])
            flipped = pool[place] ^ FLIP
            pool[place] = flipped
            time.sleep(STAYS_S)
            if pool[place] == flipped:
                return True
            before = _words(pool).copy()
        time.sleep(LOOK_EVERY_S)
    return False


def _words(pool: mmap.mmap) -> NDArray[np.uint64]:
    """A view of it, which must not outlive it."""
    return np.frombuffer(pool, dtype=np.uint64)
