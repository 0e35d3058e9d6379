"""Runs a step's rows through the model and draws its tokens: the one place of this room that touches a model.

Owns nothing but knows where the KV is; requests, pages as a resource and schedules are the engine's. Called on the
model thread, one step at a time.
"""

from collections.abc import Sequence

import torch

from headrace.engine.sampling import sample
from headrace.engine.step import StepRow
from headrace.errors import InputError
from headrace.model.batch import Batch
from headrace.model.interface import AfterLayer, Model, nothing_after


class Runner:
    """`views` are the pool's layers as tensors (`kvcache.pool.layer_views`)."""

    def __init__(self, model: Model, views: Sequence[torch.Tensor], *, page_size: int, num_pages: int) -> None:
        if len(views) != model.shape.num_layers:
            raise InputError("views", f"must be one for each of {model.shape.num_layers} layers, are {len(views)}")
        self._model = model
        self._views = views
        self._page_size = page_size
        self._num_pages = num_pages

    def run(self, rows: Sequence[StepRow], after_layer: AfterLayer = nothing_after) -> list[int]:
        """Append the KV of all rows -> one token for each that draws one, in order of rows. Raises InputError for rows
        that lie outside of pool or model, before anything is computed, and for logits that are no numbers."""
        batch = Batch.of(
            [row.row for row in rows],
            page_size=self._page_size,
            num_pages=self._num_pages,
            vocab_size=self._model.shape.vocab_size,
        )
        logits = self._model.forward(batch, self._views, after_layer).numpy(force=True)
        draws = [row.draw for row in rows if row.draw is not None]
        return [
            sample(row_logits, draw.sampling, draw.position) for row_logits, draw in zip(logits, draws, strict=True)
        ]

    def __repr__(self) -> str:
        return f"Runner({type(self._model).__name__}, {self._num_pages} pages of {self._page_size})"
