"""Qwen3-MoE: a dense Qwen3 but for the MLP of most layers, which is experts. Owns what that means by name: which layers
have them, and how a token chooses. Everything else is `llama`'s and `expert_mlp`'s. Runs on the model thread.
"""

from headrace.model import llama
from headrace.model.expert_fields import Experts
from headrace.model.expert_mlp import ExpertMlp, SoftmaxRouter, experts_of, packed_experts, with_experts
from headrace.model.llama import Addition, Llama, gated_mlp
from headrace.model.ops import Ops
from headrace.model.shape import ModelShape
from headrace.model.tensors import Tensors


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a published checkpoint, by their Hugging Face names."""
    return with_experts(shape, llama.tensor_shapes(shape))


def qwen3_moe(shape: ModelShape, tensor: Tensors, ops: Ops) -> Llama:
    experts = experts_of(shape)

    def layer_mlp(number: int, weight: Tensors, ops: Ops) -> Addition:
        return _expert_mlp(weight, experts, ops) if number in experts.layers else gated_mlp(weight, ops)

    return Llama(shape, tensor, ops, layer_mlp)


def _expert_mlp(weight: Tensors, experts: Experts, ops: Ops) -> ExpertMlp:
    router = SoftmaxRouter(
        weight=ops.linear(weight("mlp.gate")), num_chosen=experts.num_chosen, renormalised=experts.renormalised
    )
    return ExpertMlp(router=router, experts=packed_experts(weight, experts, ops))
