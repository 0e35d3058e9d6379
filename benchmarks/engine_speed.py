"""One instance's engine, the real model in bf16: decode at 1 and 8 streams, and prefill, beside what bounds them.

In one process, without gateway and messages: a Runner over a KV pool with pages in random order, greedy, by each of
`--kernels` in turns, and with transformers (bf16, SDPA, its own cache), the plainest peer. The bound of a decode step
is measured in the same run: the rate at which one thread reads as many bytes as the weights have, in order. Medians,
lowest and highest of `--runs`.

    taskset -c 0 python benchmarks/engine_speed.py [--runs 7] [--threads 1] [--kernels native torch] [--no-transformers]
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import torch
from _client import random_prompt
from _endpoint import positive

from headrace.cli.machine import describe_machine
from headrace.engine.requests import SamplingParams
from headrace.engine.runner import Runner
from headrace.engine.step import Draw, StepRow
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pool import layer_views
from headrace.model import _cpu
from headrace.model.batch import Row
from headrace.model.builtin import ensure_builtin
from headrace.model.checkpoint import fingerprint
from headrace.model.interface import Model
from headrace.model.kernels import open_model
from headrace.model.options import ComputeOptions, KernelChoice
from headrace.model.progress import no_progress

PAGE, NUM_PAGES, KV_LEN, CHUNK = 16, 1456, 300, 512
GREEDY = SamplingParams()


Cells = dict[tuple[str, str], list[float]]
"""By what is measured, and of whom."""


class Bench:
    def __init__(self, model: Model) -> None:
        layout = PoolLayout(
            kv=model.shape.kv_layout(PAGE, "bf16"), num_pages=NUM_PAGES, num_aux_slots=1, aux_slot_bytes=64
        )
        self._memory = PoolMemory(layout.total_bytes)
        views = layer_views(self._memory, layout)
        for view in views:
            view.normal_()
        self._runner = Runner(model, views, page_size=PAGE, num_pages=NUM_PAGES)
        self._pages = list(range(NUM_PAGES))
        random.Random(3).shuffle(self._pages)

    def decode(self, num_streams: int) -> float:
        """One step, seconds."""
        per = -(-KV_LEN // PAGE)
        rows = [
            StepRow(
                row=Row(
                    token_ids=[1000 + stream],
                    begin=KV_LEN - 1,
                    page_table=self._pages[stream * per : (stream + 1) * per],
                    wants_logits=True,
                ),
                draw=Draw(sampling=GREEDY, position=KV_LEN),
            )
            for stream in range(num_streams)
        ]
        return timed(lambda: self._runner.run(rows))

    def prefill(self, num_tokens: int) -> float:
        """A whole prompt in chunks, seconds."""
        ids = random_prompt(num_tokens, 4)

        def chunks() -> None:
            for begin in range(0, num_tokens, CHUNK):
                end = min(begin + CHUNK, num_tokens)
                row = Row(token_ids=ids[begin:end], begin=begin, page_table=self._pages, wants_logits=end == num_tokens)
                draw = Draw(sampling=GREEDY, position=end) if end == num_tokens else None
                self._runner.run([StepRow(row=row, draw=draw)])

        return timed(chunks)


class Transformers:
    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM  # as slow to load as the model itself

        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)

    @torch.inference_mode()
    def decode(self, num_streams: int) -> float:
        ids = torch.tensor([random_prompt(KV_LEN, seed) for seed in range(num_streams)])
        cache = self._model(ids[:, :-1], use_cache=True).cache
        return timed(lambda: self._model(ids[:, -1:], cache=cache).logits[:, -1].argmax(-1))

    @torch.inference_mode()
    def prefill(self, num_tokens: int) -> float:
        ids = torch.tensor([random_prompt(num_tokens, 4)])
        return timed(lambda: self._model(ids, logits_to_keep=1).logits.argmax(-1))


def timed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def spread(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f}) {unit}"


class Reading:
    """What bounds a decode step: all bytes of the weights are read once."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory = PoolMemory(-(-num_bytes // (2 << 20)) * (2 << 20))

    def rate(self) -> float:
        """Steps a second."""
        return _cpu.read(self._memory.bytes[: self._num_bytes], 3) / self._num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=7)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--kernels", nargs="+", choices=get_args(KernelChoice), default=["native", "torch"])
    arguments = parser.parse_args()
    directory = ensure_builtin(no_progress)
    print(describe_machine(), f", torch {torch.__version__}, {arguments.threads} threads")
    with ExitStack() as stack:
        engines: dict[str, Any] = {}
        for kernels in arguments.kernels:
            options = ComputeOptions(kernels=kernels, threads=arguments.threads)
            key = fingerprint(directory, dtype="bf16")
            model = stack.enter_context(open_model(directory, fingerprint=key, dtype="bf16", options=options))
            engines[kernels] = Bench(model)
        if not arguments.no_transformers:
            engines["transformers"] = Transformers(directory)
        show(measured(engines, (directory / "model.safetensors").stat().st_size, arguments.runs, arguments.threads))


def measured(
    engines: dict[str, Any], num_weight_bytes: int, runs: int, threads: int
) -> dict[tuple[str, str], list[float]]:
    """Tokens/s of each cell and engine; the first of the runs is a warm-up."""
    reading = Reading(num_weight_bytes)
    cells: Cells = {}
    for number in range(runs + 1):
        if number == 1:
            cells.clear()
        cells.setdefault(("decode, 1 stream, tok/s", "bound by reading"), []).append(reading.rate())
        for name, engine in engines.items():
            torch.set_num_threads(1 if name == "native" else threads)
            for streams in (1, 8):
                cell = f"decode, {streams} stream{'s' if streams > 1 else ''}, tok/s"
                cells.setdefault((cell, name), []).append(streams / engine.decode(streams))
            for length in (128, 512, 2000):
                cells.setdefault((f"prefill of {length}, tok/s", name), []).append(length / engine.prefill(length))
    return cells


def show(cells: Cells) -> None:
    for (what, name), values in sorted(cells.items()):
        print(f"{what:26} {name:18} {spread(values, '')}")


if __name__ == "__main__":
    main()
