"""Qwen3-MoE: a dense Qwen3 but for the MLP of most layers, where each token goes through a few of many small ones.

Owns the experts' weights, the choice among them, and the order in which a token's results are added up. Everything else
is `llama`'s. Runs on the model thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headrace.model import llama
from headrace.model.expert_fields import Experts
from headrace.model.llama import GatedMlp, Llama, Mlp, gated_mlp
from headrace.model.ops import Linear, Ops
from headrace.model.shape import ModelShape
from headrace.model.tensors import Tensors


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a published checkpoint, by their Hugging Face names: each expert's are its own."""
    experts, hidden = _experts(shape), shape.hidden_size
    inner = experts.intermediate_size
    of_expert = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes = llama.tensor_shapes(shape)
    for mlp in (f"model.layers.{number}.mlp" for number in experts.layers):
        shapes[f"{mlp}.gate.weight"] = (experts.num_experts, hidden)
        for part, size in of_expert.items():
            del shapes[f"{mlp}.{part}.weight"]
            shapes |= {f"{mlp}.experts.{expert}.{part}.weight": size for expert in range(experts.num_experts)}
    return shapes


def qwen3_moe(shape: ModelShape, tensor: Tensors, ops: Ops) -> Llama:
    experts = _experts(shape)

    def layer_mlp(number: int, weight: Tensors, ops: Ops) -> Mlp:
        return _expert_mlp(weight, experts, ops) if number in experts.layers else gated_mlp(weight, ops)

    return Llama(shape, tensor, ops, layer_mlp)


def _experts(shape: ModelShape) -> Experts:
    assert shape.experts is not None, f"{shape.architecture} without experts"
    return shape.experts


def _expert_mlp(weight: Tensors, experts: Experts, ops: Ops) -> "ExpertMlp":
    return ExpertMlp(
        router=ops.linear(weight("mlp.gate")),
        experts=[gated_mlp(weight, ops, f"mlp.experts.{expert}") for expert in range(experts.num_experts)],
        num_chosen=experts.num_chosen,
        renormalised=experts.renormalised,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMlp:
    """E experts, of which each token goes through the K with the largest shares. An expert computes all tokens that
    chose it at once, and a token's results are added in order of expert: so they depend on that token alone."""

    router: Linear
    experts: list[GatedMlp]
    num_chosen: int
    renormalised: bool

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        for expert, tokens, shares in self._chosen(inputs):
            x.index_add_(0, tokens, self.experts[expert].apply(inputs[tokens]).mul_(shares[:, None]))

    def _chosen(self, inputs: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each expert that some chose, ascending, who did, ascending, and the shares that they gave it, `[n] fp32`."""
        shares, chosen = self.router.apply(inputs).softmax(-1).topk(self.num_chosen)  # [T, K]
        if self.renormalised:
            shares /= shares.sum(-1, keepdim=True)
        by_expert = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        tokens = (by_expert // self.num_chosen).split_with_sizes(counts)
        given = shares.flatten()[by_expert].split_with_sizes(counts)
        for expert, own in enumerate(zip(tokens, given, strict=True)):
            if counts[expert]:
                yield expert, *own
