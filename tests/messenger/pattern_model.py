"""A model without a model: the KV bytes of a position are a pure function of the tokens up to it, the layer and head.

Whoever reads a page can therefore say what must stand in it, and a byte of another prompt, position, layer or head is
seen. Poison marks memory that nobody owns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What a rank has of a layer: which heads, and where its pages are,
    `[num_pages, num_heads, 2, page_size, row_bytes]`."""

    heads: slice
    place: slice
    shape: tuple[int, ...]

    def view(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return memory[self.place].reshape(self.shape)


class PatternModel:
    """Reads and writes the KV of positions in a pool's memory, on all ranks of one data-parallel group: each has its
    heads of the whole model's, in every layer, those of a draft model too."""

    def __init__(self, layout: PoolLayout, sharding: Sharding | None = None, group: int = 0) -> None:
        self.layout = layout
        self._sharding = sharding or Sharding(kv=layout.kv)
        self._ranks = [self._sharding.rank(group, place) for place in range(self._sharding.tp)]
        self._of_layer = [group for group in self._sharding.groups for _ in range(group.kv.num_layers)]
        # By layer, then rank; once, because every turn of a test looks into every layer.
        self._held = [
            [self._held_by(rank, place, layer) for place, rank in enumerate(self._ranks)]
            for layer in range(layout.num_layers)
        ]
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
        first, last = self._held[0][0], self._held[-1][0]
        return memory[first.place.start : last.place.stop].reshape(len(self._held), *first.shape)

    def _held_by(self, rank: int, place: int, layer: int) -> _Held:
        sharding, num_pages = self._of_layer[layer], self.layout.num_pages
        num_heads, num_parts, row_bytes = self._shape(sharding.local)
        heads, begin = sharding.heads_of(place), self.layout.page_offset(layer, 0, rank)
        return _Held(
            heads=slice(heads.start, heads.stop),
            place=slice(begin, begin + num_pages * sharding.local.page_bytes),
            shape=(num_pages, num_heads, num_parts, self.layout.kv.page_size, row_bytes),
        )

    def by_heads(self, memory: NDArray[np.uint8], layer: int) -> list[tuple[slice, NDArray[np.uint8]]]:
        """Of each rank its heads, and the layer's pages, a view."""
        return [(held.heads, held.view(memory)) for held in self._held[layer]]

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
        rows, (held, slots) = self.rows(layer, keys), self._slots(len(keys), page_table, begin)
        for heads, pages in self.by_heads(memory, layer):
            pages[held, :, :, slots] = rows[:, heads]

    def differences(
        self, memory: NDArray[np.uint8], keys: NDArray[np.uint64], page_table: Sequence[int], begin: int
    ) -> list[str]:
        """Where the KV of positions [begin, begin + len(keys)) is not what it must be."""
        found, (held, slots) = [], self._slots(len(keys), page_table, begin)
        for layer in range(self.layout.num_layers):
            rows = self.rows(layer, keys)
            for place, (heads, pages) in enumerate(self.by_heads(memory, layer)):
                wrong = (pages[held, :, :, slots] != rows[:, heads]).any(axis=(1, 2, 3))
                found += [
                    f"layer {layer} position {begin + i} page {held[i]} place {place}" for i in np.flatnonzero(wrong)
                ]
        return found

    def _slots(self, num: int, page_table: Sequence[int], begin: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page and slot in it of each position in [begin, begin + num)."""
        pages, slots = np.divmod(np.arange(begin, begin + num), self.layout.kv.page_size)
        return np.array(page_table, dtype=np.int64)[pages], slots

    def poison(self, memory: NDArray[np.uint8], pages: Sequence[int]) -> None:
        for view in self.views(memory):
            view[list(pages)] = POISON

    def touched(self, memory: NDArray[np.uint8], pages: Sequence[int]) -> list[int]:
        """Which of these poisoned pages somebody wrote into."""
        looked_at = np.array(pages, dtype=np.int64)
        wrong = [(view[looked_at] != POISON).any(axis=(1, 2, 3, 4)) for view in self.views(memory)]
        return [int(page) for page in looked_at[np.logical_or.reduce(wrong)]]
