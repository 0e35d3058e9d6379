"""A checkpoint's tensors by their Hugging Face names, as far as families share them. Owns nothing, opens no file."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from headrace.model.shape import ModelShape

Tensors = Callable[[str], torch.Tensor]
"""A checkpoint's tensors, by name: vectors in fp32, as nothing multiplies matrices with them, all others in the dtype
that the model computes in."""


def as_computed(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `Tensors` yields it for a model that computes in `dtype`."""
    return stored.to(torch.float32 if stored.ndim == 1 else dtype)


TensorShapes = Mapping[str, tuple[int, ...]]


def decoder_tensor_shapes(
    shape: ModelShape, norms: Sequence[str], attention: TensorShapes | None = None
) -> dict[str, tuple[int, ...]]:
    """Of a decoder with a gated MLP; `norms` are each layer's of the residual stream, `attention` what is below a
    layer's self_attn, where that is not by groups of heads."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    in_attention = _grouped_heads(shape) if attention is None else attention
    of_layer: dict[str, tuple[int, ...]] = {
        **{f"{name}.weight": (hidden,) for name in norms},
        **{f"self_attn.{name}": size for name, size in in_attention.items()},
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not shape.tie_word_embeddings:
        shapes["lm_head.weight"] = (shape.head_size, hidden)
    for number in range(shape.num_layers):
        shapes |= {f"model.layers.{number}.{name}": size for name, size in of_layer.items()}
    return shapes


def _grouped_heads(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, q_width, kv_width = shape.hidden_size, *(n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
    widths = (("q", q_width), ("k", kv_width), ("v", kv_width))
    shapes: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (width, hidden) for part, width in widths}
    shapes["o_proj.weight"] = (hidden, q_width)
    if shape.has_qkv_bias:
        shapes |= {f"{part}_proj.bias": (width,) for part, width in widths}
    if shape.has_head_norms:
        shapes |= {f"{part}_norm.weight": (shape.head_dim,) for part in "qk"}
    return shapes


def layer_tensors(
    tensor: Tensors, number: int, kind: Literal["weight", "bias", "e_score_correction_bias"] = "weight"
) -> Tensors:
    """The layer's weights, or others of one kind, by their names inside it."""
    return lambda name: tensor(f"model.layers.{number}.{name}.{kind}")
