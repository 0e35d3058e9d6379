"""Profiles that others published: rows of measured times, by what was run on what. Reads their files.

Splitwise: a CSV of whole prompts and generations in batches, of two models on A100 and H100, several times each.
DistServe: JSON, coefficients of a line by model and degree of tensor parallelism.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from headrace.engine.cost import StepCost, StepSize
from headrace.errors import InputError
from headrace.planner.costs.work import OPERATIONS, Work

Phase = Literal["prefill", "decode"]
COLUMNS = (
    *("model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size"),
    *("prompt_time", "token_time"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    model: str
    hardware: str
    tp: int

    def __str__(self) -> str:
        return f"{self.model}, {self.hardware}, TP{self.tp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting: the median of its repeats."""

    group: Group
    phase: Phase
    size: StepSize
    batch: int
    seconds: float


def dense_work(
    *, num_layers: int, hidden_size: int, num_weights: float, vocab_size: int, kv_hidden: int, kv_heads: int
) -> Work:
    """Of a model that is not ours: bf16, attention as wide as its hidden state, `kv_hidden` numbers of each key."""
    head_weights = vocab_size * hidden_size
    pairs = num_layers * OPERATIONS * 2 * hidden_size
    return Work(
        num_layers=num_layers,
        hidden_size=hidden_size,
        token_weights=int(num_weights) - head_weights,
        head_weights=head_weights,
        expert_weights=0,
        num_experts=0,
        num_chosen=0,
        num_expert_layers=0,
        weight_bytes_each=2.0,
        key_bytes=num_layers * 2 * kv_hidden * 2,
        num_key_parts=kv_heads,
        pair_operations=pairs,
        row_pair_operations=pairs,
    )


WORKS: Mapping[str, Work] = {
    "llama2-70b": dense_work(
        num_layers=80, hidden_size=8192, num_weights=69e9, vocab_size=32_000, kv_hidden=1024, kv_heads=8
    ),
    "bloom-176b": dense_work(
        num_layers=70, hidden_size=14_336, num_weights=176.2e9, vocab_size=250_880, kv_hidden=14_336, kv_heads=112
    ),
    "facebook/opt-13b": dense_work(
        num_layers=40, hidden_size=5120, num_weights=12.9e9, vocab_size=50_272, kv_hidden=5120, kv_heads=40
    ),
    "facebook/opt-66b": dense_work(
        num_layers=64, hidden_size=9216, num_weights=65.7e9, vocab_size=50_272, kv_hidden=9216, kv_heads=72
    ),
    "facebook/opt-175b": dense_work(
        num_layers=96, hidden_size=12_288, num_weights=174.6e9, vocab_size=50_272, kv_hidden=12_288, kv_heads=96
    ),
}


# ---- Splitwise -------------------------------------------------------------------------------------------------


def read_splitwise(file: Path) -> list[Measured]:
    """Two for each setting: its prefill and a decode step half-way. Raises InputError, naming file, line and column."""
    repeats: dict[tuple[Group, int, int, int], list[tuple[float, float]]] = defaultdict(list)
    with file.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines)
        if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
            raise InputError(f"{file}:1", f"must have the columns of Splitwise's profile, has no {missing[0]}")
        for row in rows:
            try:
                group = Group(model=row["model"], hardware=row["hardware"], tp=int(row["tensor_parallel"]))
                setting = group, int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
                repeats[setting].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
            except ValueError as error:
                raise InputError(f"{file}:{rows.line_num}", f"must be numbers: {error}") from error
    return [one for setting, times in repeats.items() for one in _measured(setting, times)]


def _measured(setting: tuple[Group, int, int, int], times: Sequence[tuple[float, float]]) -> Iterator[Measured]:
    group, prompt, batch, tokens = setting
    chunks = StepSize()
    for _ in range(batch):
        chunks = chunks.with_chunk(0, prompt)
    rows = StepSize(rows=batch, keys=batch * (prompt + tokens // 2))
    for phase, size, place in (("prefill", chunks, 0), ("decode", rows, 1)):
        yield Measured(
            group=group,
            phase="prefill" if phase == "prefill" else "decode",
            size=size,
            batch=batch,
            seconds=median(each[place] for each in times),
        )


# ---- DistServe -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeLine:
    """Its simulator's form, in ms: prefill a + b tokens + c sum of squares; decode a + b tokens held + c rows, one line
    below `threshold` rows and one from there on."""

    model: str
    tp: int
    prefill: tuple[float, float, float]
    few: tuple[float, float, float]
    many: tuple[float, float, float]
    threshold: int

    @property
    def cost(self) -> StepCost:
        """The same line as an engine's step cost: exact for a step of one kind, but for the constant, which is the
        larger of the two. A square of n tokens is two of its n (n + 1) / 2 pairs, less n."""
        base, token, square = (each / 1e3 for each in self.prefill)
        few, key, row = (each / 1e3 for each in self.few)
        return StepCost(
            step_s=max(base, few), row_s=row, token_s=max(0.0, token - square), key_s=key, pair_s=2 * square
        )

    def prefill_s(self, tokens: int) -> float:
        base, token, square = self.prefill
        return (base + token * tokens + square * tokens**2) / 1e3

    def decode_s(self, rows: int, keys: int) -> float:
        base, key, row = self.few if rows < self.threshold else self.many
        return (base + key * keys + row * rows) / 1e3


def read_distserve(file: Path) -> list[DistServeLine]:
    """Raises InputError."""
    try:
        models = json.loads(file.read_text())
        return [
            DistServeLine(
                model=model,
                tp=int(tp),
                prefill=tuple(line["prefill"]),
                few=tuple(line["decoding_smallbs"]),
                many=tuple(line["decoding_largebs"]),
                threshold=line["decoding_large_small_bs_threshold"],
            )
            for model, by_tp in models.items()
            for tp, line in by_tp.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(str(file), f"must be DistServe's profile: {error!r}") from error
