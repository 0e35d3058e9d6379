"""How many bytes of weights a checkpoint has, and a rank holds. Pure: from the shapes of tensors, by their names.

A checkpoint in blocks of FP8 stores the weights of layers so, a byte each and an fp32 scale a block; embedding, head,
norms and routers stay as they were trained. Source: the published checkpoints of DeepSeek-V3 and Qwen3-Coder.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.deploy.file import DeviceKind, Pool
from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.model.shape import ModelShape

Shapes = Mapping[str, tuple[int, ...]]
"""Of a model's tensors, by their Hugging Face names."""

_QUANTISED = re.compile(r"model\.layers\..*_proj.*\.weight")
_SCALE_BYTES = 4

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_KV_ROWS = re.compile(r"\.(k|v)_proj\.(weight|bias)$")
_ROWS = re.compile(r"(^lm_head|\.(q|k|v|q_b|kv_b|gate|up)_proj)\.(weight|bias)$")
_COLUMNS = re.compile(r"\.(o|down)_proj\.weight$")
_AXES = ("rows", "columns")
_ITEMSIZE: Mapping[KVDtype, int] = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """In which form weights are kept: `itemsize` bytes each, or blocks of FP8 where they can be."""

    itemsize: int
    block_size: tuple[int, int] | None = None

    @classmethod
    def on_disk(cls, shape: ModelShape) -> "Held":
        """Published checkpoints are bf16, whole or but for their blocks."""
        return cls(itemsize=2, block_size=shape.weight_block_size)

    @classmethod
    def on_device(cls, shape: ModelShape, kind: DeviceKind, dtype: KVDtype) -> "Held":
        """A CPU computes what it dequantised when it loaded; for a CUDA device there are kernels that take blocks."""
        blocks = shape.weight_block_size if kind == "cuda" and dtype == "bf16" else None
        return cls(itemsize=_ITEMSIZE[dtype], block_size=blocks)

    def num_bytes(self, shapes: Shapes) -> int:
        return sum(self._tensor_bytes(name, size) for name, size in shapes.items())

    def _tensor_bytes(self, name: str, size: tuple[int, ...]) -> int:
        if self.block_size is None or not _QUANTISED.fullmatch(name):
            return math.prod(size) * self.itemsize
        num_blocks = math.prod(-(-length // block) for length, block in zip(size, self.block_size, strict=True))
        return math.prod(size) + num_blocks * _SCALE_BYTES


def rank_shapes(shapes: Shapes, shape: ModelShape, pool: Pool, *, name: str) -> Shapes:
    """What one rank of the pool has of each tensor. Raises InputError where its ranks cannot share one evenly."""
    num_experts = shape.experts.num_experts if shape.experts else 0
    if pool.ep > 1 and (num_experts == 0 or num_experts % pool.ep):
        raise InputError(f"{name}.ep", f"must be 1 or divide the model's {num_experts} experts, is {pool.ep}")
    held: dict[str, tuple[int, ...]] = {}
    for tensor, size in shapes.items():
        expert = _EXPERT.search(tensor)
        if expert and pool.ep > 1:
            if int(expert[1]) < num_experts // pool.ep:
                held[tensor] = size
        else:
            held[tensor] = _cut(tensor, size, shape, pool, name)
    return held


def _cut(tensor: str, size: tuple[int, ...], shape: ModelShape, pool: Pool, name: str) -> tuple[int, ...]:
    ways = pool.tp
    if _KV_ROWS.search(tensor):
        ways = min(pool.tp, shape.num_kv_heads)
    axis = 0 if _ROWS.search(tensor) else 1 if _COLUMNS.search(tensor) else None
    if axis is None or ways == 1:
        return size
    if size[axis] % ways:
        raise InputError(f"{name}.tp", f"must divide the {size[axis]:,} {_AXES[axis]} of {tensor}, is {ways}")
    return tuple(length // ways if number == axis else length for number, length in enumerate(size))
