"""How many bytes of weights a checkpoint has, and a rank holds. Pure: from the shapes of tensors, by their names.

A checkpoint in blocks of FP8 stores the weights of layers so, a byte each and an fp32 scale a block; embedding, head,
norms and routers stay as they were trained. Source: the published checkpoints of DeepSeek-V3 and Qwen3-Coder.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.deploy.file import DeviceKind, Pool, naming
from headrace.kvcache.layout import KVDtype
from headrace.model.shape import ModelShape
from headrace.model.shard import Shard

Shapes = Mapping[str, tuple[int, ...]]
"""Of a model's tensors, by their Hugging Face names."""

TensorShapes = Callable[[ModelShape], Shapes]
"""Of a family."""

_QUANTISED = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj\w*\.weight")
_SCALE_BYTES = 4
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


def rank_shapes(tensor_shapes: TensorShapes, shape: ModelShape, pool: Pool, *, name: str) -> Shapes:
    """What a rank of the pool has of each tensor: its part of the model is a smaller one. All have as much. Raises
    InputError, naming the key of the pool, where its ranks cannot share the model evenly."""
    with naming(f"{name}."):
        return tensor_shapes(Shard(tp=pool.tp, dp=pool.dp).of(shape))
