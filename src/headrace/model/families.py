"""Which model a checkpoint's architecture is: the tensors that it must have, and what computes with them.

Owns the table; `shape` knows the same architectures by their numbers, without torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.model import deepseek, gemma3, llama, qwen3_moe
from headrace.model.interface import Model
from headrace.model.ops import Ops
from headrace.model.parallel import ALONE, Parallel
from headrace.model.shape import ModelShape
from headrace.model.tensors import Tensors


class MakeModel(Protocol):
    """Of a rank, `shape` and the tensors are its part (`shard`)."""

    def __call__(self, shape: ModelShape, tensor: Tensors, ops: Ops, parallel: Parallel = ALONE) -> Model: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`unread`: what a checkpoint may have beside its tensors, all of it or nothing."""

    tensor_shapes: Callable[[ModelShape], dict[str, tuple[int, ...]]]
    model: MakeModel
    unread: Callable[[ModelShape], dict[str, tuple[int, ...]]] = lambda shape: {}


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(tensor_shapes=llama.tensor_shapes, model=llama.Llama),
    "Qwen2ForCausalLM": Family(tensor_shapes=llama.tensor_shapes, model=llama.Llama),
    "Qwen3ForCausalLM": Family(tensor_shapes=llama.tensor_shapes, model=llama.Llama),
    "Qwen3MoeForCausalLM": Family(tensor_shapes=qwen3_moe.tensor_shapes, model=qwen3_moe.qwen3_moe),
    "DeepseekV2ForCausalLM": Family(tensor_shapes=deepseek.tensor_shapes, model=deepseek.deepseek),
    "DeepseekV3ForCausalLM": Family(
        tensor_shapes=deepseek.tensor_shapes, model=deepseek.deepseek, unread=deepseek.mtp_tensor_shapes
    ),
    "Gemma3ForCausalLM": Family(tensor_shapes=gemma3.tensor_shapes, model=gemma3.Gemma3),
}
