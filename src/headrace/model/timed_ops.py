"""Operations that tell how long they took: an `Ops` around another one, for the profile of a step.

Owns the sums, by kind of operation, and how many bytes of weights were packed; computes nothing itself. Runs on the
model thread; the sums of a step are taken by whoever ran it, between two steps.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from headrace.model.batch import Batch
from headrace.model.ops import Activation, Attention, GatedLinear, HeadNorms, Linear, Ops

OpKind = Literal["linear", "attention", "norms", "logits"]
"""linear: the layers' products. attention: softmax over the keys. norms: what is left of a layer, rms-norms, and turned
heads and their way into the pages. logits: the product with the head, told by its vocabulary of outputs. Each with
what its call takes in Python and for the memory of its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSums:
    ns: Mapping[OpKind, int]
    num_calls: int


class OpTimes:
    """Sums since they were last taken."""

    def __init__(self) -> None:
        self._ns: Counter[OpKind] = Counter()
        self._num_calls = 0

    def add(self, kind: OpKind, began_ns: int) -> None:
        """What began then has ended."""
        self._ns[kind] += time.monotonic_ns() - began_ns
        self._num_calls += 1

    def take(self) -> OpSums:
        taken = OpSums(ns=self._ns, num_calls=self._num_calls)
        self._ns, self._num_calls = Counter(), 0
        return taken

    def __repr__(self) -> str:
        return f"OpTimes({self._num_calls} calls, {sum(self._ns.values()) / 1e6:.1f} ms)"


class TimedOps:
    """`ops`, with the time of every call added to `times`. `vocab_size` tells the head from other products."""

    def __init__(self, ops: Ops, times: OpTimes, *, vocab_size: int) -> None:
        self.weight_bytes = 0  # all that was packed: what a step reads, but for experts that no token chose
        self._ops = ops
        self._times = times
        self._vocab_size = vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self._ops.dtype

    def linear(self, *weights: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        self._count(*weights)
        kind: OpKind = "logits" if sum(len(weight) for weight in weights) == self._vocab_size else "linear"
        return TimedLinear(self._ops.linear(*weights, bias=bias), self._times, kind)

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> GatedLinear:
        self._count(gate, up)
        return TimedGatedLinear(self._ops.gated_linear(gate, up, activation), self._times)

    def _count(self, *weights: torch.Tensor) -> None:
        self.weight_bytes += sum(weight.numel() * weight.element_size() for weight in weights)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        began_ns = time.monotonic_ns()
        out = self._ops.rms_norm(x, weight, eps)
        self._times.add("norms", began_ns)
        return out

    def add_rms_norm(self, x: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        began_ns = time.monotonic_ns()
        self._ops.add_rms_norm(x, values, weight, eps)
        self._times.add("norms", began_ns)

    def attention(
        self, batch: Batch, page_size: int, cos: torch.Tensor, sin: torch.Tensor, *, window: int | None = None
    ) -> Attention:
        began_ns = time.monotonic_ns()
        attention = self._ops.attention(batch, page_size, cos, sin, window=window)
        self._times.add("attention", began_ns)
        return TimedAttention(attention, self._times)


class TimedLinear:
    def __init__(self, linear: Linear, times: OpTimes, kind: OpKind) -> None:
        self._linear = linear
        self._times = times
        self._kind: OpKind = kind

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        began_ns = time.monotonic_ns()
        out = self._linear.apply(inputs)
        self._times.add(self._kind, began_ns)
        return out

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        began_ns = time.monotonic_ns()
        self._linear.add_to(x, inputs)
        self._times.add(self._kind, began_ns)


class TimedGatedLinear:
    def __init__(self, linear: GatedLinear, times: OpTimes) -> None:
        self._linear = linear
        self._times = times

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        began_ns = time.monotonic_ns()
        out = self._linear.apply(inputs)
        self._times.add("linear", began_ns)
        return out


class TimedAttention:
    def __init__(self, attention: Attention, times: OpTimes) -> None:
        self._attention = attention
        self._times = times

    def append(self, qkv: torch.Tensor, view: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        began_ns = time.monotonic_ns()
        q = self._attention.append(qkv, view, norms)
        self._times.add("norms", began_ns)
        return q

    def attend(self, q: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        began_ns = time.monotonic_ns()
        out = self._attention.attend(q, view)
        self._times.add("attention", began_ns)
        return out
