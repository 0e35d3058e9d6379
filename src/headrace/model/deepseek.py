"""DeepSeek V2 and V3 (R1 is V3): a Llama but for its attention, by latents, and for the MLP of most layers, which is
experts, some of them shared by all tokens.

Owns both, and the names of their tensors. Attention is computed in latent space, in prefill and decode alike: a head's
query is multiplied with the matrix that would make keys of latents, and what it attends to with the one that makes
values. For long chunks that is three to four times the products of attention by heads; but no latent of an earlier
chunk is ever expanded, and a row's result does not depend on where chunks end. Runs on the model thread.

Legend beside `interface`'s: R rank of the latent, E experts.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from headrace.model.expert_fields import Experts
from headrace.model.expert_mlp import Choice, experts_of, packed_experts, with_experts
from headrace.model.expert_ranks import expert_mlp
from headrace.model.latent_fields import LatentAttention
from headrace.model.llama import Addition, GatedMlp, LayerAttention, Llama, Projection, gated_mlp
from headrace.model.ops import Linear, Ops
from headrace.model.parallel import ALONE, Parallel, summed
from headrace.model.ranks import Ranks
from headrace.model.shape import ModelShape
from headrace.model.tensors import Tensors, decoder_tensor_shapes, layer_tensors

_EPS = 1e-6
"""Of the norms of short vectors, whatever rms_norm_eps is (Source: DeepSeek-V3's modeling_deepseek.py)."""


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a published checkpoint, by their Hugging Face names, without those of its MTP layers."""
    latent, hidden = _latent_of(shape), shape.hidden_size
    attention: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent.width, hidden),
        "kv_a_layernorm.weight": (latent.kv_rank,),
        "kv_b_proj.weight": (shape.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank),
        "o_proj.weight": (hidden, shape.num_heads * latent.value_dim),
    }
    q_width = shape.num_heads * latent.head_dim
    if latent.q_rank is None:
        attention["q_proj.weight"] = (q_width, hidden)
    else:
        attention |= {
            "q_a_proj.weight": (latent.q_rank, hidden),
            "q_a_layernorm.weight": (latent.q_rank,),
            "q_b_proj.weight": (q_width, latent.q_rank),
        }
    return with_experts(shape, decoder_tensor_shapes(shape, ["input_layernorm", "post_attention_layernorm"], attention))


def mtp_tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Of the layers behind the last, which draft tokens: as the other sparse ones, and an embedding, a head and a
    projection of their own. Nothing reads them yet."""
    experts, hidden = experts_of(shape), shape.hidden_size
    layers = range(shape.num_layers, shape.num_layers + shape.num_mtp_layers)
    longer = replace(shape, num_layers=layers.stop, experts=replace(experts, layers=(*experts.layers, *layers)))
    shapes = dict(tensor_shapes(longer).items() - tensor_shapes(shape).items())
    for layer in (f"model.layers.{number}" for number in layers):
        shapes |= {f"{layer}.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{layer}.eh_proj.weight"] = (hidden, 2 * hidden)
        shapes |= {
            f"{layer}.{name}.weight": (shape.vocab_size, hidden) for name in ("embed_tokens", "shared_head.head")
        }
    return shapes


def deepseek(shape: ModelShape, tensor: Tensors, ops: Ops, parallel: Parallel = ALONE) -> Llama:
    experts = experts_of(shape)

    def layer_mlp(number: int, weight: Tensors, ops: Ops, ranks: Ranks) -> Addition:
        if number not in experts.layers:
            return gated_mlp(weight, ops, ranks=ranks)
        bias = layer_tensors(tensor, number, "e_score_correction_bias") if experts.scores == "sigmoid" else None
        router = GroupedRouter(
            weight=weight("mlp.gate").float(), bias=None if bias is None else bias("mlp.gate"), experts=experts
        )
        shared = gated_mlp(weight, ops, "mlp.shared_experts", ranks)
        return _WithShared(
            shared=shared, routed=expert_mlp(router, packed_experts(weight, experts, ops), experts, parallel)
        )

    return Llama(shape, tensor, ops, parallel, layer_mlp=layer_mlp, pack_attention=_pack_attention)


def _latent_of(shape: ModelShape) -> LatentAttention:
    assert shape.latent is not None, f"{shape.architecture} without latents"
    return shape.latent


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShortQueries:
    """Of all heads, from a short vector that is normed: `[n, C] dtype` -> `[n, H * (nope + rope)] fp32`."""

    ops: Ops
    down: Linear
    norm: torch.Tensor  # [q_rank] fp32
    up: Linear

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.up.apply(self.ops.rms_norm(self.down.apply(inputs), self.norm, _EPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LatentQkv:
    """Each head's query of a latent, and the token's own latent, both with the parts that will be turned."""

    ops: Ops
    queries: Projection  # to [n, H * (nope + rope)]
    keys: torch.Tensor  # [H, nope, R] dtype: what makes keys of latents
    latent: Linear
    norm: torch.Tensor  # [R] fp32

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        num_heads, nope_dim, kv_rank = self.keys.shape
        queries = self.queries.apply(inputs)
        queries = queries.view(len(inputs), num_heads, queries.shape[1] // num_heads)  # of no tokens too
        in_latents = torch.bmm(queries[..., :nope_dim].to(self.ops.dtype).transpose(0, 1), self.keys)  # [H, n, R]
        q = torch.cat((in_latents.transpose(0, 1).float(), queries[..., nope_dim:]), dim=-1)
        latent, turned = self.latent.apply(inputs).tensor_split([kv_rank], dim=-1)
        normed = self.ops.rms_norm(latent.contiguous(), self.norm, _EPS).float()
        return torch.cat((q.flatten(1), normed, turned), dim=-1)  # [n, (H + 1) * (R + rope)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LatentOut:
    values: torch.Tensor  # [H, R, value_dim] dtype: what makes values of latents
    out: Linear

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        """Of what each head has seen of latents, `[n, H * R] dtype`."""
        num_heads, kv_rank, _ = self.values.shape
        seen = inputs.view(-1, num_heads, kv_rank).transpose(0, 1)
        self.out.add_to(x, torch.bmm(seen, self.values).transpose(0, 1).flatten(1))


def _pack_attention(shape: ModelShape, weight: Tensors, bias: Tensors, ops: Ops, ranks: Ranks) -> LayerAttention:
    latent = _latent_of(shape)
    of_latents = weight("self_attn.kv_b_proj").view(shape.num_heads, -1, latent.kv_rank)
    keys, values = of_latents.tensor_split([latent.nope_dim], dim=1)
    qkv = _LatentQkv(
        ops=ops,
        queries=_queries(latent, weight, ops),
        keys=keys,
        latent=ops.linear(_in_halves(weight("self_attn.kv_a_proj_with_mqa"), latent.kv_rank, latent)),
        norm=weight("self_attn.kv_a_layernorm"),
    )
    out = summed(ops.linear(weight("self_attn.o_proj")), ranks)
    return LayerAttention(qkv=qkv, out=_LatentOut(values=values.mT, out=out))


def _queries(latent: LatentAttention, weight: Tensors, ops: Ops) -> Projection:
    if latent.q_rank is None:
        return ops.linear(_in_halves(weight("self_attn.q_proj"), latent.nope_dim, latent))
    return _ShortQueries(
        ops=ops,
        down=ops.linear(weight("self_attn.q_a_proj")),
        norm=weight("self_attn.q_a_layernorm"),
        up=ops.linear(_in_halves(weight("self_attn.q_b_proj"), latent.nope_dim, latent)),
    )


def _in_halves(weight: torch.Tensor, before: int, latent: LatentAttention) -> torch.Tensor:
    """The rows of what turns, behind `before` others of each head, in the order in which everything here turns:
    dimension i with i + rope_dim / 2. Queries and keys alike, so their products are the same."""
    if not latent.interleaved:
        return weight
    heads = weight.view(-1, before + latent.rope_dim, weight.shape[1])
    stays, turns = heads[:, :before], heads[:, before:]
    return torch.cat((stays, turns[:, 0::2], turns[:, 1::2]), dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRouter:
    """In fp32, whatever the model computes in. V2: shares of a softmax, and a group is as good as its best expert. V3:
    a sigmoid each, to which a bias is added for the choice alone, and a group is as good as its two best."""

    weight: torch.Tensor  # [E, C] fp32
    bias: torch.Tensor | None  # [E] fp32
    experts: Experts

    def choose(self, inputs: torch.Tensor) -> Choice:
        logits = functional.linear(inputs.float(), self.weight)
        if self.bias is None:
            scores = logits.softmax(-1)
            wanted = self._in_best_groups(scores, num_counted=1)
        else:
            scores = logits.sigmoid()
            wanted = self._in_best_groups(scores + self.bias, num_counted=2)
        chosen = wanted.topk(self.experts.num_chosen).indices
        shares = scores.gather(1, chosen)
        if self.experts.renormalised:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)  # as in training
        return Choice(experts=chosen, shares=shares * self.experts.scale)

    def _in_best_groups(self, wanted: torch.Tensor, num_counted: int) -> torch.Tensor:
        """-inf for experts of other groups."""
        groups = self.experts.groups
        if groups is None:
            return wanted
        of_group = self.experts.num_experts // groups.num_groups
        by_group = wanted.view(-1, groups.num_groups, of_group)  # [n, groups, E / groups]
        best = by_group.topk(num_counted).values.sum(-1).topk(groups.num_chosen).indices
        is_out = torch.ones(by_group.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        return by_group.masked_fill(is_out[..., None], -torch.inf).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithShared:
    shared: GatedMlp
    routed: Addition

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        self.shared.add_to(x, inputs)
        self.routed.add_to(x, inputs)
