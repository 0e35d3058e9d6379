"""A layer's MLP as many small ones, experts, of which each token goes through a few.

Owns the experts' weights and the order in which a token's results are added up. Which experts a token goes through, and
how much of each, a `Router` says, the family's own. Runs on the model thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.model.expert_fields import Experts
from headrace.model.llama import GatedMlp, gated_mlp
from headrace.model.ops import Linear, Ops
from headrace.model.shape import ModelShape
from headrace.model.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The K experts of each of n tokens, in any order, no expert twice."""

    experts: torch.Tensor  # [n, K] int64
    shares: torch.Tensor  # [n, K] fp32, that the experts' results are multiplied by


class Router(Protocol):
    def choose(self, inputs: torch.Tensor) -> Choice:
        """Of `[n, C] dtype`, n may be 0; a token's choice depends on that token alone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxRouter:
    """The `num_chosen` largest shares of a softmax over all experts; `renormalised`: made to sum to one."""

    weight: Linear
    num_chosen: int
    renormalised: bool

    def choose(self, inputs: torch.Tensor) -> Choice:
        shares, experts = self.weight.apply(inputs).softmax(-1).topk(self.num_chosen)
        if self.renormalised:
            shares /= shares.sum(-1, keepdim=True)
        return Choice(experts=experts, shares=shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMlp:
    """An expert computes all tokens that chose it at once, and a token's results are added in order of expert: so they
    depend on that token alone."""

    router: Router
    experts: Sequence[GatedMlp]

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        for expert, tokens, shares in by_expert(self.router.choose(inputs), len(self.experts)):
            x.index_add_(0, tokens, self.experts[expert].apply(inputs[tokens]).mul_(shares[:, None]))


def by_expert(choice: Choice, num_experts: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert that some token chose, ascending, with those tokens, ascending, and their shares, `[m] fp32`."""
    chosen = choice.experts.flatten()
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=num_experts).tolist()
    tokens = (order // choice.experts.shape[1]).split_with_sizes(counts)
    shares = choice.shares.flatten()[order].split_with_sizes(counts)
    for expert, own in enumerate(zip(tokens, shares, strict=True)):
        if counts[expert]:
            yield expert, *own


def packed_experts(weight: Tensors, experts: Experts, ops: Ops) -> list[GatedMlp]:
    """Of one layer's weights."""
    return [gated_mlp(weight, ops, f"mlp.experts.{expert}") for expert in experts.own]


def with_experts(shape: ModelShape, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """`shapes`, of tensors by their Hugging Face names, with a router and experts for the MLP of the layers that have
    them, as published: each expert's tensors are its own."""
    experts, hidden = experts_of(shape), shape.hidden_size
    inner = experts.intermediate_size
    mlps = {f"experts.{expert}": inner for expert in experts.own}
    if experts.shared_size:
        mlps["shared_experts"] = experts.shared_size
    of_layer: dict[str, tuple[int, ...]] = {"gate.weight": (experts.num_experts, hidden)}
    if experts.scores == "sigmoid":
        of_layer["gate.e_score_correction_bias"] = (experts.num_experts,)
    for mlp, width in mlps.items():
        of_layer |= {f"{mlp}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
        of_layer[f"{mlp}.down_proj.weight"] = (hidden, width)
    layers = [f"model.layers.{number}.mlp" for number in experts.layers]
    dense = {name: size for name, size in shapes.items() if name.rsplit(".", 2)[0] not in layers}
    return dense | {f"{layer}.{name}": size for layer in layers for name, size in of_layer.items()}


def experts_of(shape: ModelShape) -> Experts:
    assert shape.experts is not None, f"{shape.architecture} without experts"
    return shape.experts
