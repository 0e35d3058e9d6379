"""The few operations that a model is made of, so that who computes them can change and the model does not.

Owns no memory and knows no family. One granularity for plain torch and for native kernels: a linear layer carries its
packed weights and its epilogue (add to the residual, silu x up), a step's attention its indices and rotations, made
once and used by every layer. So a layer is eight calls, and whatever a kernel wants to fuse lies inside one of them.

    x       the residual stream, fp32                       [n, C]    n: any number of tokens, none too
    inputs  of linear layers and of attention, dtype        [n, K]
    outputs of linear layers, fp32                          [n, N]
    softmax fp32 in either dtype

Legend of the other shapes: `interface`. Runs on the model thread.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from headrace.model.batch import Batch

Activation = Literal["silu", "gelu_tanh"]
"""Of a gated MLP; gelu_tanh is GELU by its tanh formula."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Rms-norms of each head's q and k before they are turned; `[D] fp32` weights."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class Linear(Protocol):
    """One packed weight, `[N, K]` as it came, and its bias where it has one."""

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[n, K] dtype` -> `[n, N] fp32`, each row times the transposed weight, plus the bias."""
        ...

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the same to `x`, `[n, N] fp32`, in place."""
        ...


class GatedLinear(Protocol):
    """Two packed weights of equal shape, `[N, K]` each."""

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[n, K] dtype` -> activation(gate) x up, `[n, N] dtype`."""
        ...


class Attention(Protocol):
    """Attention of all rows of one step, whatever mix of chunks and decodes they are, for any layer's view.

    `view` is `[P, G, 2, S, D] dtype`, contiguous. For a shape with latents it is `[P, S, D]`, G is 1, and what lies
    there is key and value at once: `append` takes q before latents, both D wide, of which the last dimensions are
    turned, and `attend` yields of each head only the first, R, `[T, H * R]`. Bytes of a page behind its row's last
    token may be anything, NaN too: they are never let into a result.
    """

    def append(self, qkv: torch.Tensor, view: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        """`[T, (H + 2G) * D] fp32`, q before k before v -> q turned to its positions, `[T, H, D] dtype`; turned k, and
        v, are in the slots of `view` then. With `norms`, q and k are normed before they are turned."""
        ...

    def attend(self, q: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """`[T, H, D] dtype` -> `[T, H * D] dtype`: each token sees its row's keys up to its own position, with a
        window only the last so many of them, its own included."""
        ...


class Ops(Protocol):
    """The operations for one model's heads in one dtype."""

    @property
    def dtype(self) -> torch.dtype: ...

    def linear(self, *weights: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Pack `[N_i, K] dtype` weights, one below the other, as one; `bias` is `[sum of N_i] fp32`."""
        ...

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> GatedLinear: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`[n, C] fp32`, scaled to a mean square of one and times `weight` `[C] fp32` -> `[n, C] dtype`."""
        ...

    def add_rms_norm(self, x: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Add the norm of `values`, `[n, C] fp32`, to `x`, `[n, C] fp32`, in place, and round nothing."""
        ...

    def attention(
        self, batch: Batch, page_size: int, cos: torch.Tensor, sin: torch.Tensor, *, window: int | None = None
    ) -> Attention:
        """`cos` and `sin` of each token's angles, `[T, D / 2] fp32`: dimension i turns with dimension i + D / 2."""
        ...
