"""Runs a step's rows through the model and draws its tokens: the one place of this room that touches a model.

Owns nothing but knows where the KV is; requests, pages as a resource and schedules are the engine's. Called on the
model thread, one step at a time.
"""

from collections.abc import Sequence

import torch

from headrace.engine.sampling import sample
from headrace.engine.step import Draw, StepRow, draws_of
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
        return self.compute(self.batch(rows), draws_of(rows), after_layer)

    def batch(self, rows: Sequence[StepRow]) -> Batch:
        """What `compute` takes, here or on another rank. Raises InputError as `run` does."""
        return Batch.of(
            [row.row for row in rows],
            page_size=self._page_size,
            num_pages=self._num_pages,
            vocab_size=self._model.shape.vocab_size,
        )

    def compute(self, batch: Batch, draws: Sequence[Draw], after_layer: AfterLayer = nothing_after) -> list[int]:
        """`draws` are those of the batch's logit rows; none where another rank draws them."""
        logits = self._model.forward(batch, self._views, after_layer)
        if not draws:
            return []
        drawn = zip(logits.numpy(force=True), draws, strict=True)
        return [sample(row_logits, draw.sampling, draw.position) for row_logits, draw in drawn]

    def __repr__(self) -> str:
        return f"Runner({type(self._model).__name__}, {self._num_pages} pages of {self._page_size})"
