"""A model without a model: the KV bytes of a position are a pure function of the tokens up to it, the layer and head.

Whoever reads a page can therefore say what must stand in it, and a byte of another prompt, position, layer or head is
seen. Poison marks memory that nobody owns.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.layout import PoolLayout

POISON = 0xEE
_MASK = 2**64 - 1


def prefix_keys(token_ids: Sequence[int]) -> NDArray[np.uint64]:
    """`[n] uint64`: one number for each position, of all tokens up to it."""
    keys, key = [], 0x9E3779B97F4A7C15
    for token in token_ids:
        key = ((key ^ (token + 1)) * 0xBF58476D1CE4E5B9 + 1) & _MASK
        key ^= key >> 29
        keys.append(key)
    return np.array(keys, dtype=np.uint64)


class PatternModel:
    """Reads and writes the KV of positions in a pool's memory."""

    def __init__(self, layout: PoolLayout) -> None:
        kv = layout.kv
        self.layout = layout
        self._row_bytes = kv.head_dim * kv.itemsize
        shape = (kv.num_layers, kv.num_kv_heads, 2, self._row_bytes)
        self._factors = np.random.default_rng(7).integers(1, 2**63, size=shape, dtype=np.uint64) | np.uint64(1)

    def pages(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`[num_layers, num_pages, num_kv_heads, 2, page_size, row_bytes] uint8`, a view."""
        kv, layout = self.layout.kv, self.layout
        shape = (kv.num_layers, layout.num_pages, kv.num_kv_heads, 2, kv.page_size, self._row_bytes)
        return memory[: layout.pages_bytes].reshape(shape)

    def rows(self, layer: int, keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """`[n, num_kv_heads, 2, row_bytes] uint8`."""
        with np.errstate(over="ignore"):
            product = keys[:, None, None, None] * self._factors[layer][None]
        return (product >> np.uint64(56)).astype(np.uint8)

    def compute_layer(
        self, memory: NDArray[np.uint8], layer: int, keys: NDArray[np.uint64], page_table: Sequence[int], begin: int
    ) -> None:
        """The layer of a step: KV of positions [begin, begin + len(keys)) into their slots."""
        pages = self.pages(memory)[layer]
        rows = self.rows(layer, keys)
        size = self.layout.kv.page_size
        for i in range(len(keys)):
            position = begin + i
            pages[page_table[position // size], :, :, position % size] = rows[i]

    def differences(
        self, memory: NDArray[np.uint8], keys: NDArray[np.uint64], page_table: Sequence[int], begin: int
    ) -> list[str]:
        """Where the KV of positions [begin, begin + len(keys)) is not what it must be."""
        pages, size, found = self.pages(memory), self.layout.kv.page_size, []
        for layer in range(self.layout.kv.num_layers):
            rows = self.rows(layer, keys)
            for i in range(len(keys)):
                position = begin + i
                page = page_table[position // size]
                if not np.array_equal(pages[layer, page, :, :, position % size], rows[i]):
                    found.append(f"layer {layer} position {position} page {page}")
        return found

    def poison(self, memory: NDArray[np.uint8], pages: Sequence[int]) -> None:
        self.pages(memory)[:, list(pages)] = POISON

    def touched(self, memory: NDArray[np.uint8], pages: Sequence[int]) -> list[int]:
        """Which of these poisoned pages somebody wrote into."""
        view = self.pages(memory)
        return [page for page in pages if (view[:, page] != POISON).any()]
