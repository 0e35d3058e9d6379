"""A model without a model: the KV bytes of a position are a pure function of the tokens up to it, the layer and head.

Whoever reads a page can therefore say what must stand in it, and a byte of another prompt, position, layer or head is
seen. Poison marks memory that nobody owns.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.sharding import Sharding

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
    """Reads and writes the KV of positions in a pool's memory, on all ranks of one data-parallel group: each has its
    heads of the whole model's."""

    def __init__(self, layout: PoolLayout, sharding: Sharding | None = None, group: int = 0) -> None:
        self.layout = layout
        self._sharding = sharding or Sharding(kv=layout.kv)
        self._group = group
        self._row_bytes = layout.kv.head_dim * layout.kv.itemsize
        self._num_parts = 1 if layout.kv.kind == "mla" else 2
        shape = (layout.kv.num_layers, self._sharding.kv.num_kv_heads, self._num_parts, self._row_bytes)
        self._factors = np.random.default_rng(7).integers(1, 2**63, size=shape, dtype=np.uint64) | np.uint64(1)

    def pages(self, memory: NDArray[np.uint8], place: int = 0) -> NDArray[np.uint8]:
        """`[num_layers, num_pages, num_heads, 2, page_size, row_bytes] uint8`, a view of the rank at this place; with a
        latent for keys and values, 1 stands for 2."""
        kv, layout = self.layout.kv, self.layout
        shape = (kv.num_layers, layout.num_pages, kv.num_kv_heads, self._num_parts, kv.page_size, self._row_bytes)
        begin = layout.page_offset(0, 0, self._sharding.rank(self._group, place))
        return memory[begin : begin + layout.pages_bytes].reshape(shape)

    def by_heads(self, memory: NDArray[np.uint8]) -> list[tuple[slice, NDArray[np.uint8]]]:
        """Each rank's heads, and its `pages`."""
        held = [self._sharding.heads_of(place) for place in range(self._sharding.tp)]
        return [(slice(own.start, own.stop), self.pages(memory, place)) for place, own in enumerate(held)]

    def full_copies(self, memory: NDArray[np.uint8], pages: Sequence[int]) -> list[NDArray[np.uint8]]:
        """These pages with all heads of the model, `[num_layers, n, num_kv_heads, 2, page_size, row_bytes]`, as each
        replica set holds them."""
        num_sets = self._sharding.num_replicas
        held = [self.pages(memory, place)[:, list(pages)] for place in range(self._sharding.tp)]
        return [np.concatenate(held[start::num_sets], axis=2) for start in range(num_sets)]

    def rows(self, layer: int, keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """`[n, num_kv_heads, 2, row_bytes] uint8`, of the whole model."""
        with np.errstate(over="ignore"):
            product = keys[:, None, None, None] * self._factors[layer][None]
        return (product >> np.uint64(56)).astype(np.uint8)

    def compute_layer(
        self, memory: NDArray[np.uint8], layer: int, keys: NDArray[np.uint64], page_table: Sequence[int], begin: int
    ) -> None:
        """The layer of a step: KV of positions [begin, begin + len(keys)) into their slots."""
        rows, size = self.rows(layer, keys), self.layout.kv.page_size
        for heads, pages in self.by_heads(memory):
            for i, position in enumerate(range(begin, begin + len(keys))):
                pages[layer, page_table[position // size], :, :, position % size] = rows[i, heads]

    def differences(
        self, memory: NDArray[np.uint8], keys: NDArray[np.uint64], page_table: Sequence[int], begin: int
    ) -> list[str]:
        """Where the KV of positions [begin, begin + len(keys)) is not what it must be."""
        size, found = self.layout.kv.page_size, []
        for layer in range(self.layout.kv.num_layers):
            rows = self.rows(layer, keys)
            for place, (heads, pages) in enumerate(self.by_heads(memory)):
                for i, position in enumerate(range(begin, begin + len(keys))):
                    page = page_table[position // size]
                    if not np.array_equal(pages[layer, page, :, :, position % size], rows[i, heads]):
                        found.append(f"layer {layer} position {position} page {page} place {place}")
        return found

    def poison(self, memory: NDArray[np.uint8], pages: Sequence[int]) -> None:
        for _, view in self.by_heads(memory):
            view[:, list(pages)] = POISON

    def touched(self, memory: NDArray[np.uint8], pages: Sequence[int]) -> list[int]:
        """Which of these poisoned pages somebody wrote into."""
        views = [view for _, view in self.by_heads(memory)]
        return [page for page in pages if any((view[:, page] != POISON).any() for view in views)]
