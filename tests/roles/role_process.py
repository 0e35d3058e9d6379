"""Runs one role as a process of its own: `role_process.py ROLE ENDPOINT MODEL_DIR TRANSPORT LAYER_S LOADING_S`."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from role_world import CHUNK, NUM_PAGES, PAGE
from tiny_checkpoint import kv_layout

from headrace.model.batch import Batch
from headrace.model.interface import AfterLayer, Model, nothing_after
from headrace.model.kernels import open_model
from headrace.roles.decoder import run_decoder
from headrace.roles.options import InstanceOptions
from headrace.roles.prefiller import run_prefiller
from headrace.roles.ranks import model as rank_model


class SlowModel:
    """Takes its time after every layer, so that a prompt is on its way for a while."""

    def __init__(self, model: Model, layer_s: float) -> None:
        self._model = model
        self._layer_s = layer_s

    @property
    def shape(self) -> Any:
        return self._model.shape

    def forward(
        self, batch: Batch, views: Sequence[torch.Tensor], after_layer: AfterLayer = nothing_after
    ) -> torch.Tensor:
        def after(layer: int) -> None:
            after_layer(layer)
            time.sleep(self._layer_s)

        return self._model.forward(batch, views, after)


def main(role: Any, endpoint: str, directory: str, transport: Any, *seconds: str) -> None:
    layer_s, loading_s = map(float, seconds)

    @contextmanager
    def open_slow(path: Path, **how: Any) -> Iterator[Model]:
        print("loading", flush=True)
        time.sleep(loading_s)
        with open_model(path, **how) as model:
            yield SlowModel(model, layer_s)

    rank_model.open_model = open_slow
    kv = kv_layout(Path(directory), page_size=PAGE, dtype="fp32")
    options = InstanceOptions(
        role=role,
        name=role,
        gateways=(endpoint,),
        model_dir=Path(directory),
        model="tiny",
        dtype="fp32",
        page_size=PAGE,
        chunk_tokens=CHUNK,
        kv_memory_bytes=NUM_PAGES * kv.num_layers * kv.page_bytes,
        transports=(transport,),
    )
    (run_prefiller if role == "prefiller" else run_decoder)(options)


if __name__ == "__main__":
    main(*sys.argv[1:])
