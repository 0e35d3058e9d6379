"""The operations in plain torch: the reference that every kernel is measured against, and the way on any CPU.

Owns packed weights; `torch_attention` has the rest. Runs on the model thread, within its inference mode.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from headrace.kvcache.layout import KVDtype
from headrace.kvcache.pool import TORCH_DTYPES
from headrace.model.batch import Batch
from headrace.model.ops import Activation, Attention
from headrace.model.shape import ModelShape
from headrace.model.torch_attention import TorchAttention, TorchLatentAttention, planned

ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """One weight as it is. torch has no bf16 product with an fp32 result on CPUs: in bf16, results carry one rounding
    more than a kernel's, logits too. The bias is added to what was rounded."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        out = functional.linear(inputs, self.weight).float()
        return out if self.bias is None else out + self.bias

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        x += functional.linear(inputs, self.weight)
        if self.bias is not None:
            x += self.bias


@dataclass(frozen=True, slots=True)
class TorchGatedLinear:
    """Gate and up, one below the other: one product for both."""

    gate_up: torch.Tensor
    activation: Activation = "silu"

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(inputs, self.gate_up).chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](gate).mul_(up)


class TorchOps:
    """For the heads of `shape`, in `dtype`."""

    def __init__(self, shape: ModelShape, dtype: KVDtype) -> None:
        self.dtype = TORCH_DTYPES[dtype]
        self._shape = shape

    def linear(self, *weights: torch.Tensor, bias: torch.Tensor | None = None) -> TorchLinear:
        # A single weight is taken as it is: the embedding of a model with tied ones stays mapped from its file.
        return TorchLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> TorchGatedLinear:
        return TorchGatedLinear(torch.cat((gate, up)), activation)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps).to(self.dtype)

    def add_rms_norm(self, x: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        x += functional.rms_norm(values, weight.shape, weight, eps)

    def attention(
        self, batch: Batch, page_size: int, cos: torch.Tensor, sin: torch.Tensor, *, window: int | None = None
    ) -> Attention:
        shape = self._shape
        num_runs = 1 if shape.latent else 2 * shape.num_kv_heads
        step = planned(batch, page_size, num_runs, self.dtype, window)
        if shape.latent:
            return TorchLatentAttention(shape.num_heads, shape.latent, shape.attention_scale, step, (cos, sin))
        return TorchAttention(shape, step, (cos, sin))
