"""Two memories for the tests of the bare loops: seeded bytes in one, poison in the other, and what must be there."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from headrace.fabric.limits.memories import Memories, fresh_memories
from headrace.fabric.limits.placement import Placement

LENGTH = 1 << 20
POISON = 0xA5


class Filled:
    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self._src = self._map(memories.src_fd)
        self._dst = self._map(memories.dst_fd)
        self._src[:] = np.random.default_rng(5).integers(0, 256, LENGTH, dtype=np.uint8)
        self._dst[:] = POISON

    @staticmethod
    def _map(fd: int) -> NDArray[np.uint8]:
        return np.frombuffer(mmap.mmap(fd, LENGTH), dtype=np.uint8)

    def unmap(self) -> None:
        self._src = self._dst = np.empty(0, dtype=np.uint8)  # each mapping holds a file open

    def poison(self) -> None:
        self._dst[:] = POISON

    def assert_carried(self, *placements: Placement) -> None:
        """Every page is there, and every other byte is poison; the source is what it was."""
        expected = np.full(LENGTH, POISON, dtype=np.uint8)
        for place in placements:
            for src, dst in zip(place.src_offsets, place.dst_offsets, strict=True):
                expected[dst : dst + place.page_bytes] = self._src[src : src + place.page_bytes]
        wrong = np.flatnonzero(self._dst != expected)
        assert len(wrong) == 0, f"{len(wrong)} wrong bytes, the first at {wrong[:4]}"
        assert (self._src == np.random.default_rng(5).integers(0, 256, LENGTH, dtype=np.uint8)).all()


@contextmanager
def filled_memories() -> Iterator[Filled]:
    with fresh_memories(LENGTH) as memories:
        filled = Filled(memories)
        yield filled
        filled.unmap()


def placed(src: list[int], dst: list[int], page_bytes: int) -> Placement:
    return Placement(
        src_offsets=np.array(src, dtype=np.int64), dst_offsets=np.array(dst, dtype=np.int64), page_bytes=page_bytes
    )


def half_of_all_pages(page_bytes: int) -> Placement:
    """In a random order; the other half of the places stays as it is."""
    pages = LENGTH // page_bytes
    rng = np.random.default_rng(page_bytes)
    src, dst = (rng.permutation(pages)[: pages // 2].astype(np.int64) * page_bytes for _ in range(2))
    return Placement(src_offsets=src, dst_offsets=dst, page_bytes=page_bytes)


def is_running(process_id: int) -> bool:
    """Not gone, and not merely unburied."""
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def endpoint_files() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("headrace-limits-")]
