"""A model without a model: the KV bytes of a position are a pure function of the tokens up to it, the layer and head.

Whoever reads a page can therefore say what must stand in it, and a byte of another prompt, position, layer or head is
seen. Poison marks memory that nobody owns.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kvcache.layout import KVLayout, PoolLayout
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
    heads of the whole model's, in every layer, those of a draft model too."""

    def __init__(self, layout: PoolLayout, sharding: Sharding | None = None, group: int = 0) -> None:
        self.layout = layout
        self._sharding = sharding or Sharding(kv=layout.kv)
        self._ranks = [self._sharding.rank(group, place) for place in range(self._sharding.tp)]
        self._of_layer = [group for group in self._sharding.groups for _ in range(group.kv.num_layers)]
        rng = np.random.default_rng(7)
        self._factors = [
            rng.integers(1, 2**63, size=self._shape(of.kv), dtype=np.uint64) | np.uint64(1) for of in self._of_layer
        ]

    @staticmethod
    def _shape(kv: KVLayout) -> tuple[int, int, int]:
        """Of a position in one layer: heads, K and V (of a latent: one), bytes."""
        return (kv.num_kv_heads, 1 if kv.kind == "mla" else 2, kv.head_dim * kv.itemsize)

    def pages(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """`[num_layers, num_pages, num_kv_heads, 2, page_size, row_bytes] uint8`, a view: of an instance that is one
        rank, without a draft model."""
        return self._view(memory, 0, 0, self.layout.kv.num_layers)

    def _view(self, memory: NDArray[np.uint8], rank: int, layer: int, num_layers: int) -> NDArray[np.uint8]:
        kv, num_pages = self._of_layer[layer].local, self.layout.num_pages
        num_heads, num_parts, row_bytes = self._shape(kv)
        begin, length = self.layout.page_offset(layer, 0, rank), num_layers * num_pages * kv.page_bytes
        shape = (num_layers, num_pages, num_heads, num_parts, kv.page_size, row_bytes)
        return memory[begin : begin + length].reshape(shape)

    def by_heads(self, memory: NDArray[np.uint8], layer: int) -> list[tuple[slice, NDArray[np.uint8]]]:
        """Of each rank its heads, and the layer's pages, `[num_pages, num_heads, 2, page_size, row_bytes]`, a view."""
        held = [self._of_layer[layer].heads_of(place) for place in range(len(self._ranks))]
        return [
            (slice(own.start, own.stop), self._view(memory, rank, layer, 1)[0])
            for own, rank in zip(held, self._ranks, strict=True)
        ]

    def views(self, memory: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The pages of every layer and rank."""
        return [view for layer in range(self.layout.num_layers) for _, view in self.by_heads(memory, layer)]

    def full_copies(self, memory: NDArray[np.uint8], layer: int, pages: Sequence[int]) -> list[NDArray[np.uint8]]:
        """A layer's part of these pages with all heads of the model, `[n, num_kv_heads, 2, page_size, row_bytes]`, as
        each replica set holds them."""
        held = [view[list(pages)] for _, view in self.by_heads(memory, layer)]
        num_sets = self._of_layer[layer].num_replicas
        return [np.concatenate(held[start::num_sets], axis=1) for start in range(num_sets)]

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
        for heads, pages in self.by_heads(memory, layer):
            for i, position in enumerate(range(begin, begin + len(keys))):
                pages[page_table[position // size], :, :, position % size] = rows[i, heads]

    def differences(
        self, memory: NDArray[np.uint8], keys: NDArray[np.uint64], page_table: Sequence[int], begin: int
    ) -> list[str]:
        """Where the KV of positions [begin, begin + len(keys)) is not what it must be."""
        size, found = self.layout.kv.page_size, []
        for layer in range(self.layout.num_layers):
            rows = self.rows(layer, keys)
            for place, (heads, pages) in enumerate(self.by_heads(memory, layer)):
                for i, position in enumerate(range(begin, begin + len(keys))):
                    page = page_table[position // size]
                    if not np.array_equal(pages[page, :, :, position % size], rows[i, heads]):
                        found.append(f"layer {layer} position {position} page {page} place {place}")
        return found

    def poison(self, memory: NDArray[np.uint8], pages: Sequence[int]) -> None:
        for view in self.views(memory):
            view[list(pages)] = POISON

    def touched(self, memory: NDArray[np.uint8], pages: Sequence[int]) -> list[int]:
        """Which of these poisoned pages somebody wrote into."""
        looked_at = np.array(pages, dtype=np.int64)
        wrong = [(view[looked_at] != POISON).any(axis=(1, 2, 3, 4)) for view in self.views(memory)]
        return [int(page) for page in looked_at[np.logical_or.reduce(wrong)]]
