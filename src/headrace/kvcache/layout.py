"""Where every byte of a KV pool lies: pages of all layers first, aux slots behind them. Pure arithmetic.

Owns the shape of the KV memory and nothing in it; gateway and planner use it as the engine does. An instance's ranks
share one memory. In a rank's part layers are outermost, so that one layer is one contiguous view, and K and V of one
head are adjacent, so that any range of heads of a page is one contiguous write:

    [rank 0                                 | rank 1 | .. | aux slot 0 | aux slot 1 | .. ]   total_bytes, whole 2 MiB
     layer 0 | layer 1 | .. | layer L-1                     64-byte aligned, stride aux_stride
     page 0, page 1, ..                       whole 2 MiB
     page_shape each

Behind a model's layers may lie those of its draft model or its MTP layers, other groups of layers with pages of their
own shape: a page id means the same positions in all of them, and layers are numbered on.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from headrace.errors import InputError

KVDtype = Literal["bf16", "fp32"]

KVKind = Literal["gqa", "mla"]
"""What a page holds of each token: a key and a value for every KV head, or one latent that all heads share."""

POOL_ALIGNMENT = 2 << 20
"""Pools are whole huge pages: only those can be collapsed, and an alias of the pool ends where a mapping can end."""

AUX_ALIGNMENT = 64
"""One cache line: two aux slots, written by two peers, never share one."""

_ITEMSIZE: dict[KVDtype, int] = {"bf16": 2, "fp32": 4}


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens; none for none."""
    if num_tokens < 0:
        raise InputError("num_tokens", f"must be at least 0, is {num_tokens}")
    _require_positive("page_size", page_size)
    return -(-num_tokens // page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The KV of one rank, or of the whole model where `sharding` says so: what does not depend on pool sizes.

    Of kind "mla" there is one head, whose head_dim is the latent's width: rank of the compression and rotary part.
    page_size is any number from 1 on: nothing here shifts or masks, and an odd one in a test finds what a power of
    two hides. What a model's attention kernel takes is the model's business.
    """

    num_layers: int
    num_kv_heads: int
    page_size: int  # tokens
    head_dim: int
    dtype: KVDtype
    kind: KVKind = "gqa"

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "page_size", "head_dim"):
            _require_positive(field, getattr(self, field))
        if self.kind not in get_args(KVKind):
            raise InputError("kind", f"must be one of {', '.join(get_args(KVKind))}, is {self.kind!r}")
        if self.kind == "mla" and self.num_kv_heads != 1:
            raise InputError("num_kv_heads", f"must be 1 of kind mla, is {self.num_kv_heads}")
        if self.dtype not in _ITEMSIZE:
            raise InputError("dtype", f"must be one of {', '.join(get_args(KVDtype))}, is {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self.dtype]

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of one page of one layer, in elements."""
        if self.kind == "mla":
            return (self.page_size, self.head_dim)
        return (self.num_kv_heads, 2, self.page_size, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """K and V of one head of one page; of kind mla, the page."""
        return math.prod(self.page_shape) // self.num_kv_heads * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        return self.num_layers * self.page_bytes // self.page_size

    @property
    def page_bytes(self) -> int:
        """One page of one layer."""
        return self.num_kv_heads * self.head_bytes


def require_one_page_size(kv: KVLayout, further: tuple[KVLayout, ...]) -> None:
    """Of groups of layers that share a page list. Raises InputError."""
    for other in further:
        if other.page_size != kv.page_size:
            raise InputError("page_size", f"must be {kv.page_size} in all groups of layers, is {other.page_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose pages are alike, as they lie in a rank's part of the memory."""

    kv: KVLayout
    layers: range
    offset: int
    layer_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """An instance's KV memory: every byte offset that anybody reads or writes comes from here. `kv`, `further` (layers
    behind those of `kv`) and `num_pages` are each rank's."""

    kv: KVLayout
    num_pages: int
    num_aux_slots: int
    aux_slot_bytes: int
    num_ranks: int = 1
    further: tuple[KVLayout, ...] = ()

    def __post_init__(self) -> None:
        for field in ("num_pages", "num_aux_slots", "aux_slot_bytes", "num_ranks"):
            _require_positive(field, getattr(self, field))
        require_one_page_size(self.kv, self.further)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        made, layer, offset = [], 0, 0
        for kv in (self.kv, *self.further):
            layers, stride = range(layer, layer + kv.num_layers), self.num_pages * kv.page_bytes
            made.append(LayerGroup(kv=kv, layers=layers, offset=offset, layer_stride=stride))
            layer, offset = layers.stop, offset + len(layers) * stride
        return tuple(made)

    @property
    def num_layers(self) -> int:
        return self.kv.num_layers + sum(kv.num_layers for kv in self.further)

    @property
    def pages_bytes(self) -> int:
        """All pages of all layers of one rank."""
        return sum(len(group.layers) * group.layer_stride for group in self.groups)

    @property
    def rank_stride(self) -> int:
        return _round_up(self.pages_bytes, POOL_ALIGNMENT)

    @property
    def aux_stride(self) -> int:
        return _round_up(self.aux_slot_bytes, AUX_ALIGNMENT)

    @property
    def total_bytes(self) -> int:
        return _round_up(self.aux_offset(0) + self.num_aux_slots * self.aux_stride, POOL_ALIGNMENT)

    def page_offset(self, layer: int, page: int, rank: int = 0) -> int:
        _require_index("layer", layer, self.num_layers)
        _require_index("page", page, self.num_pages)
        _require_index("rank", rank, self.num_ranks)
        group = next(each for each in self.groups if layer in each.layers)
        in_group = (layer - group.layers.start) * group.layer_stride + page * group.kv.page_bytes
        return rank * self.rank_stride + group.offset + in_group

    def aux_offset(self, slot: int) -> int:
        _require_index("slot", slot, self.num_aux_slots)
        end_of_pages = (self.num_ranks - 1) * self.rank_stride + self.pages_bytes
        return _round_up(end_of_pages, AUX_ALIGNMENT) + slot * self.aux_stride

    def aux_slice(self, slot: int) -> slice:
        """The slot's bytes in the memory as an array of bytes."""
        begin = self.aux_offset(slot)
        return slice(begin, begin + self.aux_slot_bytes)


def _round_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _require_positive(field: str, value: int) -> None:
    if value < 1:
        raise InputError(field, f"must be at least 1, is {value}")


def _require_index(field: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise InputError(field, f"must be in 0..{count - 1}, is {value}")
