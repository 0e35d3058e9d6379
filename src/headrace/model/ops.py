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

from typing import Protocol

import torch

from headrace.model.batch import Batch


class Linear(Protocol):
    """One packed weight, `[N, K]` as it came."""

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[n, K] dtype` -> `[n, N] fp32`, each row times the transposed weight."""
        ...

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the same to `x`, `[n, N] fp32`, in place."""
        ...


class GatedLinear(Protocol):
    """Two packed weights of equal shape, `[N, K]` each."""

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[n, K] dtype` -> silu(gate) x up, `[n, N] dtype`."""
        ...


class Attention(Protocol):
    """Attention of all rows of one step, whatever mix of chunks and decodes they are, for any layer's view.

    `view` is `[P, G, 2, S, D] dtype`, contiguous. Bytes of a page behind its row's last token may be anything, NaN
    too: they are never let into a result.
    """

    def append(self, qkv: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """`[T, (H + 2G) * D] fp32`, q before k before v -> q turned to its positions, `[T, H, D] dtype`; turned k, and
        v, are in the slots of `view` then."""
        ...

    def attend(self, q: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """`[T, H, D] dtype` -> `[T, H * D] dtype`: each token sees its row's keys up to its own position."""
        ...


class Ops(Protocol):
    """The operations for one model's heads in one dtype."""

    @property
    def dtype(self) -> torch.dtype: ...

    def linear(self, *weights: torch.Tensor) -> Linear:
        """Pack `[N_i, K] dtype` weights, one below the other, as one."""
        ...

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor) -> GatedLinear: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`[n, C] fp32`, scaled to a mean square of one and times `weight` `[C] fp32` -> `[n, C] dtype`."""
        ...

    def attention(self, batch: Batch, page_size: int, cos: torch.Tensor, sin: torch.Tensor) -> Attention:
        """`cos` and `sin` of each token's angles, `[T, D / 2] fp32`: dimension i turns with dimension i + D / 2."""
        ...
