"""The Gemma 3 family, text only: like Llama, with a norm after each half of a layer too, normed queries and keys, a
GELU-gated MLP, scaled embeddings, and layers that see a window beside layers that see everything.

Owns one model's weights and the order of its operations, which `ops` computes. The KV of a layer with a window is kept
whole all the same: pages are alike in every layer, and the window is only what is looked at. Knows no files: `weights`
hands it its tensors. Runs on the model thread; while it calls torch or a kernel, the GIL is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.model.batch import Batch
from headrace.model.interface import AfterLayer, nothing_after
from headrace.model.ops import Attention, GatedLinear, HeadNorms, Linear, Ops
from headrace.model.parallel import ALONE, Parallel, packed_head, summed
from headrace.model.ranks import Ranks
from headrace.model.rotary import Rotary, rotary, rotation
from headrace.model.shape import ModelShape
from headrace.model.tensors import Tensors, decoder_tensor_shapes, layer_tensors
from headrace.model.views import checked_page_size


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, by their Hugging Face names."""
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return decoder_tensor_shapes(shape, [f"{name}_layernorm" for name in norms])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Norms are `[C] fp32`, before and after each half; one is in them already."""

    before_attention: torch.Tensor
    qkv: Linear
    heads: HeadNorms
    out: Linear
    after_attention: torch.Tensor
    before_mlp: torch.Tensor
    gate_up: GatedLinear
    down: Linear
    after_mlp: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """How far layers of one kind see, and how they turn."""

    rotary: Rotary
    window: int | None


class Gemma3:
    """A `Model`. `tensor` yields those of `tensor_shapes` in the dtype of `ops`, each when it is packed: weights that
    were read and weights that are packed are never all in memory at once. Of a rank, `shape` and tensors are its part.
    """

    def __init__(self, shape: ModelShape, tensor: Tensors, ops: Ops, parallel: Parallel = ALONE) -> None:
        self.shape = shape
        self._ops = ops
        self._embedding = tensor("model.embed_tokens.weight")  # [V, C]
        # Rounded to the dtype of the embeddings, as in training: in bf16 it is 25.25 for 640, not 25.298.
        self._embedding_scale = torch.tensor(shape.hidden_size**0.5).to(self._embedding.dtype).float()
        self._layers = [
            _layer(layer_tensors(tensor, number), ops, shape.rms_norm_eps, parallel.group)
            for number in range(shape.num_layers)
        ]
        self._norm = _one_more(tensor("model.norm.weight"))
        self._head = packed_head(shape, self._embedding, tensor, ops, parallel)
        self._sights = _sights(shape)
        local = () if shape.local_attention is None else shape.local_attention.layers
        self._is_local = [number in local for number in range(shape.num_layers)]

    @torch.inference_mode()
    def forward(
        self, batch: Batch, views: Sequence[torch.Tensor], after_layer: AfterLayer = nothing_after
    ) -> torch.Tensor:
        ops, eps = self._ops, self.shape.rms_norm_eps
        attentions = self._attentions(batch, checked_page_size(views, batch, self.shape, ops.dtype))
        x = self._embedding[torch.from_numpy(batch.token_ids)].float() * self._embedding_scale  # [T, C]
        for number, (layer, attention, view) in enumerate(zip(self._layers, attentions, views, strict=True)):
            qkv = layer.qkv.apply(ops.rms_norm(x, layer.before_attention, eps))  # [T, (H + 2G) * D]
            q = attention.append(qkv, view, layer.heads)
            attended = layer.out.apply(attention.attend(q, view))  # [T, C]
            after_layer(number)
            ops.add_rms_norm(x, attended, layer.after_attention, eps)
            if number == self.shape.num_layers - 1:  # from here on, only rows with logits matter
                x = x[torch.from_numpy(batch.logit_rows)]  # [L, C]
            raised = layer.gate_up.apply(ops.rms_norm(x, layer.before_mlp, eps))
            ops.add_rms_norm(x, layer.down.apply(raised), layer.after_mlp, eps)
        return self._head.apply(ops.rms_norm(x, self._norm, eps))  # [L, V]

    def _attentions(self, batch: Batch, page_size: int) -> list[Attention]:
        """Of each layer; layers of one kind share one."""
        made = {
            is_local: self._ops.attention(batch, page_size, *rotation(batch, sight.rotary), window=sight.window)
            for is_local, sight in self._sights.items()
        }
        return [made[is_local] for is_local in self._is_local]


def _sights(shape: ModelShape) -> dict[bool, _Sight]:
    """By whether a layer is local."""
    local, everywhere = shape.local_attention, rotary(shape.rope_theta, shape.head_dim)
    sights = {False: _Sight(rotary=everywhere, window=None)}
    if local is not None:
        sights[True] = _Sight(rotary=rotary(local.rope_theta, shape.head_dim), window=local.window)
    return sights


def _layer(weight: Tensors, ops: Ops, eps: float, ranks: Ranks) -> _Layer:
    return _Layer(
        before_attention=_one_more(weight("input_layernorm")),
        qkv=ops.linear(*(weight(f"self_attn.{part}_proj") for part in "qkv")),
        heads=HeadNorms(q=_one_more(weight("self_attn.q_norm")), k=_one_more(weight("self_attn.k_norm")), eps=eps),
        out=summed(ops.linear(weight("self_attn.o_proj")), ranks),
        after_attention=_one_more(weight("post_attention_layernorm")),
        before_mlp=_one_more(weight("pre_feedforward_layernorm")),
        gate_up=ops.gated_linear(weight("mlp.gate_proj"), weight("mlp.up_proj"), "gelu_tanh"),
        down=summed(ops.linear(weight("mlp.down_proj")), ranks),
        after_mlp=_one_more(weight("post_feedforward_layernorm")),
    )


def _one_more(norm: torch.Tensor) -> torch.Tensor:
    """The family's norms multiply by one more than their weight; in fp32, where small weights do not vanish in it."""
    return 1 + norm.float()
