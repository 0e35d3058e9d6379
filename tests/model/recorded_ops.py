"""Ops that write down what is called on them and on what they make."""

from collections.abc import Callable
from typing import Any

import torch

from headrace.model.batch import Batch
from headrace.model.ops import Activation, Attention, GatedLinear, Linear, Ops


class RecordedOps:
    def __init__(self, ops: Ops, calls: list[str]) -> None:
        self.ops, self.calls = ops, calls
        self.dtype = ops.dtype

    def noted(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return act(*arguments)

        return call

    def linear(self, *weights: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return RecordedCalls(self, self.ops.linear(*weights, bias=bias), "apply", "add_to")

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> GatedLinear:
        return RecordedCalls(self, self.ops.gated_linear(gate, up, activation), "apply")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.noted("rms_norm", self.ops.rms_norm)(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self.noted("add_rms_norm", self.ops.add_rms_norm)(x, values, weight, eps)

    def attention(
        self, batch: Batch, page_size: int, cos: torch.Tensor, sin: torch.Tensor, *, window: int | None = None
    ) -> Attention:
        self.calls.append("attention" if window is None else f"attention {window}")
        return RecordedCalls(self, self.ops.attention(batch, page_size, cos, sin, window=window), "append", "attend")


class RecordedCalls:
    def __init__(self, recorded: RecordedOps, inner: Any, *names: str) -> None:
        for name in names:
            setattr(self, name, recorded.noted(name, getattr(inner, name)))

    apply: Callable[..., Any]
    add_to: Callable[..., Any]
    append: Callable[..., Any]
    attend: Callable[..., Any]
