"""The Llama family: grouped-query attention with rotary positions, rms-norm, a silu-gated MLP.

Owns one model's weights and the order of its operations, which `ops` computes. Knows no files: `weights` hands it its
tensors. Runs on the model thread; while it calls torch or a kernel, the GIL is free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.kvcache.layout import num_pages_for
from headrace.model.batch import Batch
from headrace.model.interface import AfterLayer, nothing_after
from headrace.model.ops import GatedLinear, Linear, Ops
from headrace.model.shape import ModelShape

Tensors = Callable[[str], torch.Tensor]
"""A checkpoint's tensors, by name."""


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, by their Hugging Face names."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, q_width),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not shape.tie_word_embeddings:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    for number in range(shape.num_layers):
        shapes |= {f"model.layers.{number}.{name}.weight": size for name, size in of_layer.items()}
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: torch.Tensor  # [C] fp32
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor  # [C] fp32
    gate_up: GatedLinear
    down: Linear


class Llama:
    """A `Model`. `tensor` yields those of `tensor_shapes` in the dtype of `ops`, each when it is packed: weights that
    were read and weights that are packed are never all in memory at once."""

    def __init__(self, shape: ModelShape, tensor: Tensors, ops: Ops) -> None:
        self.shape = shape
        self._ops = ops
        self._embedding = tensor("model.embed_tokens.weight")  # [V, C]
        self._layers = [_layer(number, tensor, ops) for number in range(shape.num_layers)]
        self._norm = tensor("model.norm.weight").float()
        self._head = ops.linear(self._embedding if shape.tie_word_embeddings else tensor("lm_head.weight"))
        # In fp32 and by this formula, as in training: the angles of far positions carry its rounding.
        self._frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, views: Sequence[torch.Tensor], after_layer: AfterLayer = nothing_after
    ) -> torch.Tensor:
        ops, eps = self._ops, self.shape.rms_norm_eps
        attention = ops.attention(batch, self._page_size(batch, views), *self._rotation(batch))
        x = self._embedding[torch.from_numpy(batch.token_ids)].float()  # [T, C]
        for number, (layer, view) in enumerate(zip(self._layers, views, strict=True)):
            qkv = layer.qkv.apply(ops.rms_norm(x, layer.attention_norm, eps))  # [T, (H + 2G) * D]
            q = attention.append(qkv, view)
            layer.out.add_to(x, attention.attend(q, view))
            after_layer(number)
            if number == self.shape.num_layers - 1:  # from here on, only rows with logits matter
                x = x[torch.from_numpy(batch.logit_rows)]  # [L, C]
            layer.down.add_to(x, layer.gate_up.apply(ops.rms_norm(x, layer.mlp_norm, eps)))
        return self._head.apply(ops.rms_norm(x, self._norm, eps))  # [L, V]

    def _rotation(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.from_numpy(batch.positions).float()[:, None] * self._frequencies  # [T, D / 2]
        return angles.cos(), angles.sin()

    def _page_size(self, batch: Batch, views: Sequence[torch.Tensor]) -> int:
        """Of the views, which must be this model's and hold the batch's pages: kernels check no bounds."""
        num_pages, num_kv_heads, _, page_size, head_dim = views[0].shape
        assert (num_kv_heads, head_dim) == (self.shape.num_kv_heads, self.shape.head_dim), f"{views[0].shape}"
        assert all(view.shape == views[0].shape and view.is_contiguous() for view in views), "views differ"
        assert all(view.dtype == self._ops.dtype for view in views), "views are not of the model's dtype"
        assert int(batch.page_indices.max()) < num_pages, "the batch was made for a larger pool"
        pages_of_rows = [num_pages_for(kv_len, page_size) for kv_len in batch.kv_lens.tolist()]
        assert np.diff(batch.page_indptr).tolist() == pages_of_rows, "the batch was made for another page size"
        return page_size


def _layer(number: int, tensor: Tensors, ops: Ops) -> _Layer:
    def weight(name: str) -> torch.Tensor:
        return tensor(f"model.layers.{number}.{name}.weight")

    return _Layer(
        attention_norm=weight("input_layernorm").float(),
        qkv=ops.linear(*(weight(f"self_attn.{part}_proj") for part in "qkv")),
        out=ops.linear(weight("self_attn.o_proj")),
        mlp_norm=weight("post_attention_layernorm").float(),
        gate_up=ops.gated_linear(weight("mlp.gate_proj"), weight("mlp.up_proj")),
        down=ops.linear(weight("mlp.down_proj")),
    )
