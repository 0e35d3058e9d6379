"""What the engine asks of a model, whatever its family. Owns nothing.

Legend of shape suffixes in this room: T tokens of the step, L rows whose logits are asked for, H query heads, G KV
heads, D head_dim, C hidden size, V vocabulary, P pages of the pool, S page size.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from headrace.model.batch import Batch
from headrace.model.shape import ModelShape

AfterLayer = Callable[[int], None]
"""Called on the model thread, with the layer's number, when the layer's KV is in its pages and its attention output
projection is done: its pages may leave."""


def nothing_after(layer: int) -> None:
    """For steps that nobody else waits for."""


class Model(Protocol):
    """Weights and the forward pass of one family. Called by one thread at a time."""

    @property
    def shape(self) -> ModelShape: ...

    def forward(
        self, batch: Batch, views: Sequence[torch.Tensor], after_layer: AfterLayer = nothing_after
    ) -> torch.Tensor:
        """Append the KV of all of the batch's tokens to `views` (per layer `[P, G, 2, S, D]`, of latents `[P, S, D]`,
        in the pool's dtype) -> logits of its logit rows, `[L, V] fp32`. Rows do not see each other."""
        ...
