"""The Llama family: grouped-query attention with rotary positions, rms-norm, a silu-gated MLP. And the two that differ
from it by one line each: Qwen2, with a bias on queries, keys and values, and dense Qwen3, with normed queries and keys.
`qwen3_moe` has another MLP, `deepseek` another attention too.

Owns one model's weights and the order of its operations, which `ops` computes. Knows no files: `weights` hands it its
tensors. Runs on the model thread; while it calls torch or a kernel, the GIL is free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.model.batch import Batch
from headrace.model.interface import AfterLayer, nothing_after
from headrace.model.ops import GatedLinear, HeadNorms, Linear, Ops
from headrace.model.parallel import ALONE, Parallel, packed_head, summed
from headrace.model.ranks import Ranks
from headrace.model.rotary import rotary, rotation
from headrace.model.shape import ModelShape
from headrace.model.tensors import Tensors, decoder_tensor_shapes, layer_tensors
from headrace.model.views import checked_page_size


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, by their Hugging Face names."""
    return decoder_tensor_shapes(shape, ["input_layernorm", "post_attention_layernorm"])


class Projection(Protocol):
    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[n, C] dtype` -> what `Attention.append` takes, fp32."""
        ...


class Addition(Protocol):
    """The end of a layer's attention, or its MLP."""

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add its result for `inputs`, `[n, ..] dtype`, to `x`, `[n, C] fp32`, in place, token by token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What a layer has before and behind the attention over the pages."""

    qkv: Projection
    out: Addition
    heads: HeadNorms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    gate_up: GatedLinear
    down: Linear

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[n, C] dtype` -> `[n, C] fp32`."""
        return self.down.apply(self.gate_up.apply(inputs))

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        self.down.add_to(x, self.gate_up.apply(inputs))


def gated_mlp(weight: Tensors, ops: Ops, name: str = "mlp", ranks: Ranks = ALONE.group) -> GatedMlp:
    """Of the tensors below `name` in a layer, cut over `ranks`."""
    return GatedMlp(
        gate_up=ops.gated_linear(weight(f"{name}.gate_proj"), weight(f"{name}.up_proj")),
        down=summed(ops.linear(weight(f"{name}.down_proj")), ranks),
    )


LayerMlp = Callable[[int, Tensors, Ops, Ranks], Addition]
"""Packs the MLP of the layer of that number, whose weights these are, cut over the ranks."""

PackAttention = Callable[[ModelShape, Tensors, Tensors, Ops, Ranks], LayerAttention]
"""Packs a layer's, of these weights and biases, with its heads cut over the ranks."""


def _same_in_every_layer(number: int, weight: Tensors, ops: Ops, ranks: Ranks) -> Addition:
    return gated_mlp(weight, ops, ranks=ranks)


def _by_heads(shape: ModelShape, weight: Tensors, bias: Tensors, ops: Ops, ranks: Ranks) -> LayerAttention:
    biases = torch.cat([bias(f"self_attn.{part}_proj") for part in "qkv"]) if shape.has_qkv_bias else None
    return LayerAttention(
        qkv=ops.linear(*(weight(f"self_attn.{part}_proj") for part in "qkv"), bias=biases),
        out=summed(ops.linear(weight("self_attn.o_proj")), ranks),
        heads=_head_norms(weight, shape.rms_norm_eps) if shape.has_head_norms else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: torch.Tensor  # [C] fp32
    attention: LayerAttention
    mlp_norm: torch.Tensor  # [C] fp32
    mlp: Addition


class Llama:
    """A `Model`. `tensor` yields those of `tensor_shapes` in the dtype of `ops`, each when it is packed: weights that
    were read and weights that are packed are never all in memory at once. Of a rank, `shape` and tensors are its part.
    """

    def __init__(
        self,
        shape: ModelShape,
        tensor: Tensors,
        ops: Ops,
        parallel: Parallel = ALONE,
        *,
        layer_mlp: LayerMlp = _same_in_every_layer,
        pack_attention: PackAttention = _by_heads,
    ) -> None:
        self.shape = shape
        self._ops = ops
        self._embedding = tensor("model.embed_tokens.weight")  # [V, C]
        self._layers: list[_Layer] = []
        for number in range(shape.num_layers):
            weight, bias = layer_tensors(tensor, number), layer_tensors(tensor, number, "bias")
            self._layers.append(
                _Layer(
                    attention_norm=weight("input_layernorm"),
                    attention=pack_attention(shape, weight, bias, ops, parallel.group),
                    mlp_norm=weight("post_attention_layernorm"),
                    mlp=layer_mlp(number, weight, ops, parallel.group),
                )
            )
        self._norm = tensor("model.norm.weight")
        self._head = packed_head(shape, self._embedding, tensor, ops, parallel)
        self._rotary = rotary(shape.rope_theta, shape.rotary_dim, shape.rope_scaling)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, views: Sequence[torch.Tensor], after_layer: AfterLayer = nothing_after
    ) -> torch.Tensor:
        ops, eps = self._ops, self.shape.rms_norm_eps
        page_size = checked_page_size(views, batch, self.shape, ops.dtype)
        attention = ops.attention(batch, page_size, *rotation(batch, self._rotary))
        x = self._embedding[torch.from_numpy(batch.token_ids)].float()  # [T, C]
        for number, (layer, view) in enumerate(zip(self._layers, views, strict=True)):
            before, behind = layer.attention.qkv, layer.attention.out
            qkv = before.apply(ops.rms_norm(x, layer.attention_norm, eps))  # [T, (H + 2G) * D]
            q = attention.append(qkv, view, layer.attention.heads)
            behind.add_to(x, attention.attend(q, view))
            after_layer(number)
            if number == self.shape.num_layers - 1:  # from here on, only rows with logits matter
                x = x[torch.from_numpy(batch.logit_rows)]  # [L, C]
            layer.mlp.add_to(x, ops.rms_norm(x, layer.mlp_norm, eps))
        return self._head.apply(ops.rms_norm(x, self._norm, eps))  # [L, V]


def _head_norms(weight: Tensors, eps: float) -> HeadNorms:
    return HeadNorms(q=weight("self_attn.q_norm"), k=weight("self_attn.k_norm"), eps=eps)
