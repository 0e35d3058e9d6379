"""Digests of messages in the memory of a loopback endpoint, and the checks of what is to be hashed.

Pure: nothing is kept. A page's digest is the sum of its messages' hashes, so that their order does not matter.
"""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.fabric.interface import Digests, PageReads, PageWrites, message_seed
from headrace.testing.outbox import MAX_LAYERS, checked_positions, checked_shape, extent, offsets


def message_digest(memory: NDArray[np.uint8], begin: int, length: int, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(memory[begin : begin + length].data, seed)


def sum_digests(memory: NDArray[np.uint8], reads: Sequence[PageReads], num_pages: int) -> Digests:
    """`[num_pages] uint64`, by position."""
    sums = [0] * num_pages
    for read in reads:
        positions: list[int] = read.positions.tolist()
        for layer in range(read.layer_begin, read.layer_end):
            for position, begin in zip(positions, offsets(read.pages, layer), strict=True):
                seed = message_seed(position, layer, read.route)
                sums[position] += message_digest(memory, begin, read.length, seed)
    return np.array([total % 2**64 for total in sums], dtype=np.uint64)


def checked_reads(reads: Sequence[PageReads], num_pages: int, memory_length: int) -> tuple[PageReads, ...]:
    """Raises InputError unless every message lies in the memory and every position has a digest."""
    if num_pages < 0:
        raise InputError("num_pages", f"must be at least 0, is {num_pages}")
    for read in reads:
        as_writes = PageWrites(
            src=read.pages,
            dst=read.pages,
            positions=read.positions,
            layer_begin=read.layer_begin,
            layer_end=read.layer_end,
            length=read.length,
        )
        checked_shape(as_writes, MAX_LAYERS)
        checked_positions(as_writes, num_pages)
        begin, end = extent(read.pages, read.layer_begin, read.layer_end, read.length)
        if begin < 0 or end > memory_length:
            raise InputError("pages", f"[{begin}, {end}) is not within our memory of {memory_length} bytes")
    return tuple(reads)
