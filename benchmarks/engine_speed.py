"""One core, the real model in bf16: decode at 1 and 8 streams, prefill, where a step's time goes, and what bounds it.

In one process, without gateway and messages: a Runner over a KV pool with pages in random order, greedy. Beside it, in
turns, transformers (bf16, SDPA, its own cache), the plainest peer. Bounds of the core are measured in the same run:
the rate at which the weights can be read, and that of a large bf16 product. Medians, lowest and highest of `--runs`.

    taskset -c 0 python benchmarks/engine_speed.py [--runs 7] [--no-transformers]
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _client import random_prompt
from _deployment import describe_machine
from _endpoint import positive

from headrace.engine.requests import SamplingParams
from headrace.engine.runner import Runner
from headrace.engine.step import Draw, StepRow
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pool import layer_views
from headrace.model.batch import Row
from headrace.model.builtin import ensure_builtin
from headrace.model.progress import no_progress
from headrace.model.weights import load_model

PAGE, NUM_PAGES, KV_LEN, CHUNK = 16, 1456, 300, 512
GREEDY = SamplingParams()


class Bench:
    def __init__(self, directory: Path) -> None:
        model = load_model(directory, dtype="bf16")
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


def bounds(num_weight_bytes: int) -> None:
    weights = np.ones(num_weight_bytes // 8, dtype=np.int64)
    read = min(timed(lambda: weights.sum()) for _ in range(5))
    a, b = torch.ones(512, 4096, dtype=torch.bfloat16), torch.ones(4096, 4096, dtype=torch.bfloat16)
    torch.mm(a, b)
    product = min(timed(lambda: torch.mm(a, b)) for _ in range(5))
    flops = 2 * 512 * 4096 * 4096
    print(
        f"bounds of this core: {num_weight_bytes / 1e6:.0f} MB of weights are read in {1e3 * read:.1f} ms "
        f"({num_weight_bytes / read / 1e9:.1f} GB/s); bf16 product {flops / product / 1e9:.0f} GFLOP/s, so at most "
        f"{flops / product / num_weight_bytes:.0f} prompt tokens/s without attention"
    )


def where(bench: Bench, act: Callable[[Bench], float]) -> str:
    """Shares of a step's time, by kind of operation."""
    kinds = {"linear": ("mm", "linear", "matmul"), "attention": ("scaled_dot", "flash"), "gather": ("index",)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        wall_us = 1e6 * act(bench)
    shares = dict.fromkeys(kinds, 0.0)
    torch_us = 0.0
    for event in profile.key_averages():
        torch_us += event.self_cpu_time_total
        kind = next((kind for kind, words in kinds.items() if any(word in event.key for word in words)), None)
        if kind is not None:
            shares[kind] += event.self_cpu_time_total
    other = torch_us - sum(shares.values())
    told = [f"{kind} {100 * us / wall_us:.0f} %" for kind, us in shares.items()]
    return ", ".join(
        [*told, f"other torch {100 * other / wall_us:.0f} %", f"Python {100 * (1 - torch_us / wall_us):.0f} %"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=7)
    parser.add_argument("--no-transformers", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    directory = ensure_builtin(no_progress)
    print(describe_machine(), f", torch {torch.__version__}")
    bounds((directory / "model.safetensors").stat().st_size)
    engines: dict[str, Any] = {"headrace": Bench(directory)}
    if not arguments.no_transformers:
        engines["transformers"] = Transformers(directory)
    cells: dict[tuple[str, str], list[float]] = {}
    for number in range(arguments.runs + 1):
        for name, engine in engines.items():
            for streams in (1, 8):
                step_s = engine.decode(streams)
                cells.setdefault((name, f"decode, {streams} streams, ms a step"), []).append(1e3 * step_s)
            for length in (128, 512, 2000):
                rate = length / engine.prefill(length)
                cells.setdefault((name, f"prefill of {length}, tokens/s"), []).append(rate)
        if number == 0:
            cells.clear()  # warm-up
    for (name, what), values in cells.items():
        print(f"{name:13} {what:28} {spread(values, '')}")
    bench = engines["headrace"]
    print("decode at 1 stream:", where(bench, lambda b: b.decode(1)))
    print("decode at 8 streams:", where(bench, lambda b: b.decode(8)))
    print("prefill of 512:", where(bench, lambda b: b.prefill(512)))


if __name__ == "__main__":
    main()
