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
from headrace.protocol.control import Limits
from headrace.protocol.operator import InstanceFacts

BLOCK_BYTES, PROBES = 4096, 4
LANDED_PAGES = 6
"""What lands is many pages of a prompt, each as a whole. What decodes beside it changes a slot of a page in each step:
few pages are all changed by that in the second or two in which one looks."""

LANDS_WITHIN_S = 5.0
LOOK_EVERY_S = 0.01
STAYS_S = 0.02
FLIP = 0x10
"""Any bit: a digest must tell."""


class Landings:
    """Of instances, from the first time on that each is asked about."""

    def __init__(self) -> None:
        self._exits = ExitStack()
        self._watched: dict[int, _Watched] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def has_landed(self, instance: InstanceFacts) -> bool:
        """Where its process has just ended: no."""
        if instance.pid not in self._watched:
            with suppress(OSError):
                pool = self._exits.enter_context(pool_of(instance.pid))
                self._watched[instance.pid] = _Watched(pool, instance.limits)
            return False
        return self._watched[instance.pid].first_landed() is not None


class _Watched:
    """A pool, and what some words of each of its blocks were."""

    def __init__(self, pool: mmap.mmap, limits: Limits) -> None:
        self._pool = pool
        self._before = _probes(pool)
        num_pages = limits.pool_tokens // limits.page_size
        self._fewest = max(1, LANDED_PAGES * len(self._before) // num_pages)

    def first_landed(self) -> int | None:
        """The place of the first block that has changed all over, in bytes, once enough of them have."""
        changed = np.flatnonzero((_probes(self._pool) != self._before).all(axis=1))
        return None if changed.size < self._fewest else BLOCK_BYTES * int(changed[0])

    def begin_again(self) -> None:
        self._before = _probes(self._pool)


def _probes(pool: mmap.mmap) -> NDArray[np.uint64]:
    """`[num_blocks, PROBES]`, a copy."""
    blocks = np.frombuffer(pool, dtype=np.uint64).reshape(-1, BLOCK_BYTES // 8)
    return blocks[:, :: BLOCK_BYTES // 8 // PROBES].copy()


def flip_a_landed_byte(instance: InstanceFacts) -> bool:
    """False: nothing landed in time. Blocks for as long."""
    with pool_of(instance.pid) as pool:
        return _flip(pool, _Watched(pool, instance.limits))


def _flip(pool: mmap.mmap, watched: _Watched) -> bool:
    until = time.monotonic() + LANDS_WITHIN_S
    while time.monotonic() < until:
        place = watched.first_landed()
        if place is not None:
            flipped = pool[place] ^ FLIP
            pool[place] = flipped
            time.sleep(STAYS_S)
            if pool[place] == flipped:
                return True
            watched.begin_again()
        time.sleep(LOOK_EVERY_S)
    return False
