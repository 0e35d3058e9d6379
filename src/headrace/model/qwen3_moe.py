"""Qwen3-MoE: a dense Qwen3 but for the MLP of most layers, which is experts. Owns what that means by name: which layers
have them, and how a token chooses. Everything else is `llama`'s and `expert_mlp`'s. Runs on the model thread.
"""

from headrace.model import llama
from headrace.model.expert_fields import Experts
from headrace.model.expert_mlp import SoftmaxRouter, experts_of, packed_experts, with_experts
from headrace.model.expert_ranks import expert_mlp
from headrace.model.llama import Addition, Llama, gated_mlp
from headrace.model.ops import Ops
from headrace.model.parallel import ALONE, Parallel
from headrace.model.ranks import Ranks
from headrace.model.shape import ModelShape
from headrace.model.tensors import Tensors


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a published checkpoint, by their Hugging Face names."""
    return with_experts(shape, llama.tensor_shapes(shape))


def qwen3_moe(shape: ModelShape, tensor: Tensors, ops: Ops, parallel: Parallel = ALONE) -> Llama:
    experts = experts_of(shape)

    def layer_mlp(number: int, weight: Tensors, ops: Ops, ranks: Ranks) -> Addition:
        if number not in experts.layers:
            return gated_mlp(weight, ops, ranks=ranks)
        return expert_mlp(_router(weight, experts, ops), packed_experts(weight, experts, ops), experts, parallel)

    return Llama(shape, tensor, ops, parallel, layer_mlp=layer_mlp)


def _router(weight: Tensors, experts: Experts, ops: Ops) -> SoftmaxRouter:
    return SoftmaxRouter(
        weight=ops.linear(weight("mlp.gate")), num_chosen=experts.num_chosen, renormalised=experts.renormalised
    )
