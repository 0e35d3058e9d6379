"""Timed operations: what they compute is what the ones within compute, and each call's time is of its kind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.model import timed_ops
from headrace.model.batch import Batch, Row
from headrace.model.llama import Llama, tensor_shapes
from headrace.model.shape import ModelShape
from headrace.model.timed_ops import OpTimes, TimedOps
from headrace.model.torch_ops import TorchOps

NUM_LAYERS, PAGE_SIZE = 2, 4
SHAPE = ModelShape.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
)
STEP_NS = {"linear": 1_000_000, "gated_linear": 20_000, "norm": 300, "append": 4000, "attend": 7, "attention": 50}


class SlowOps:
    """Each call takes its time, on a clock that is moved, and computes nothing."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.now_ns = 5

    def taking(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.now_ns += STEP_NS[name]

        return call

    def linear(self, *weights: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return SimpleNamespace(apply=self.taking("linear"), add_to=self.taking("linear"))

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> Any:
        return SimpleNamespace(apply=self.taking("gated_linear"))

    def rms_norm(self, *arguments: Any) -> Any:
        return self.taking("norm")()

    def add_rms_norm(self, *arguments: Any) -> Any:
        return self.taking("norm")()

    def attention(self, *arguments: Any, **named: Any) -> Any:
        self.taking("attention")()
        return SimpleNamespace(append=self.taking("append"), attend=self.taking("attend"))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowOps:
    ops = SlowOps()
    monkeypatch.setattr(timed_ops, "time", SimpleNamespace(monotonic_ns=lambda: ops.now_ns))
    return ops


def test_each_kind_has_the_time_of_its_calls_and_taking_them_begins_anew(slow: SlowOps) -> None:
    times = OpTimes()
    ops: Any = TimedOps(slow, times, vocab_size=101)
    some, head = torch.zeros(8, 4), torch.zeros(101, 4)
    layer, gated, logits = ops.linear(some, some), ops.gated_linear(some, some), ops.linear(head)
    attention = ops.attention(None, 16, some, some, window=3)
    for _ in range(3):
        layer.apply(some)
        layer.add_to(some, some)
        gated.apply(some)
        ops.rms_norm(some, some, 1e-5)
        ops.add_rms_norm(some, some, some, 1e-5)
        attention.append(some, some)
        attention.attend(some, some)
    logits.apply(some)
    sums = times.take()
    assert sums.ns == {
        "linear": 3 * (2 * STEP_NS["linear"] + STEP_NS["gated_linear"]),
        "norms": 3 * (2 * STEP_NS["norm"] + STEP_NS["append"]),
        "attention": STEP_NS["attention"] + 3 * STEP_NS["attend"],
        "logits": STEP_NS["linear"],
    }
    assert sums.num_calls == 3 * 7 + 2
    assert times.take().num_calls == 0 and sums.num_calls == 23


def test_the_weights_that_a_step_reads_are_those_that_were_packed(slow: SlowOps) -> None:
    ops: Any = TimedOps(slow, OpTimes(), vocab_size=101)
    ops.linear(torch.zeros(8, 4, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.bfloat16))
    ops.gated_linear(torch.zeros(6, 4), torch.zeros(6, 4))
    assert ops.weight_bytes == 11 * 4 * 2 + 2 * 6 * 4 * 4


def test_a_model_computes_the_same_bits_with_its_operations_timed() -> None:
    times = OpTimes()
    plain, plain_views = computed(TorchOps(SHAPE, "fp32"))
    timed, timed_views = computed(TimedOps(TorchOps(SHAPE, "fp32"), times, vocab_size=SHAPE.vocab_size))
    assert torch.equal(plain, timed)
    assert all(torch.equal(a, b) for a, b in zip(plain_views, timed_views, strict=True))
    sums = times.take()
    assert set(sums.ns) == {"linear", "attention", "norms", "logits"} and min(sums.ns.values()) > 0
    assert sums.num_calls == 8 * NUM_LAYERS + 3  # attention's preparation, the last norm, the head


def computed(ops: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    draw, shapes = torch.Generator().manual_seed(0), tensor_shapes(SHAPE)
    model = Llama(SHAPE, lambda name: torch.randn(shapes[name], generator=draw) / 2, ops)
    views = [torch.zeros(8, SHAPE.num_kv_heads, 2, PAGE_SIZE, SHAPE.head_dim) for _ in range(NUM_LAYERS)]
    rows = [
        Row(token_ids=[3, 5, 7, 9, 11], begin=0, page_table=[4, 1], wants_logits=True),
        Row(token_ids=[2], begin=0, page_table=[0], wants_logits=True),
    ]
    batch = Batch.of(rows, page_size=PAGE_SIZE, num_pages=8, vocab_size=SHAPE.vocab_size)
    return model.forward(batch, views), views
