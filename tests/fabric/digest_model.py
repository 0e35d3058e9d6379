"""The slow reference of the digests: one page, one layer, one message at a time."""

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.fabric.interface import PageReads, message_seed


def slow_digests(memory: NDArray[np.uint8], reads: list[PageReads], num_pages: int) -> list[int]:
    digests = [0] * num_pages
    for read in reads:
        for layer in range(read.layer_begin, read.layer_end):
            for page, position in zip(read.pages.indices, read.positions, strict=True):
                at = read.pages.offset + layer * read.pages.layer_stride + int(page) * read.pages.page_stride
                message = memory[at : at + read.length].tobytes()
                seed = message_seed(int(position), layer, read.route)
                digests[position] = (digests[position] + xxhash.xxh3_64_intdigest(message, seed)) % 2**64
    return digests
