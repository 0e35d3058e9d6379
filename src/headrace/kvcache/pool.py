"""The KV memory as tensors: one view per layer, one array per aux slot, nothing copied.

Owns nothing: the bytes are `PoolMemory`'s, their places `PoolLayout`'s. The only module of this room that loads torch,
so nothing else here imports it.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype, PoolLayout
from headrace.kvcache.memory import PoolMemory

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def layer_views(memory: PoolMemory, layout: PoolLayout, rank: int = 0) -> list[torch.Tensor]:
    """Per layer of `rank` `[num_pages, *page_shape]` in its group's dtype; of kind gqa that is `[num_pages,
    num_kv_heads, 2, page_size, head_dim]`: K is [:, :, 0], V [:, :, 1].

    The views share the memory with everybody who mapped it and keep it mapped. Raises InputError, Closed.
    """
    _require_room(memory, layout)
    return [
        torch.frombuffer(
            memory.bytes,
            dtype=TORCH_DTYPES[group.kv.dtype],
            offset=layout.page_offset(layer, 0, rank),
            count=group.layer_stride // group.kv.itemsize,
        ).view(layout.num_pages, *group.kv.page_shape)
        for group in layout.groups
        for layer in group.layers
    ]


def aux_view(memory: PoolMemory, layout: PoolLayout, slot: int) -> NDArray[np.uint8]:
    """The bytes of one aux slot, writable, `[aux_slot_bytes] uint8`. Raises InputError, Closed."""
    _require_room(memory, layout)
    return memory.bytes[layout.aux_slice(slot)]


def _require_room(memory: PoolMemory, layout: PoolLayout) -> None:
    if memory.length < layout.total_bytes:
        raise InputError("memory", f"must have at least {layout.total_bytes} bytes, has {memory.length}")
