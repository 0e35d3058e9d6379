"""A checkpoint's tensors by their Hugging Face names, as far as families share them. Owns nothing, opens no file."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from headrace.model.shape import ModelShape

Tensors = Callable[[str], torch.Tensor]
"""A checkpoint's tensors, by name."""


def decoder_tensor_shapes(shape: ModelShape, norms: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Of a decoder with a gated MLP; `norms` are each layer's of the residual stream."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    of_layer: dict[str, tuple[int, ...]] = {
        **{f"{name}.weight": (hidden,) for name in norms},
        "self_attn.q_proj.weight": (q_width, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, q_width),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if shape.has_qkv_bias:
        widths = (("q", q_width), ("k", kv_width), ("v", kv_width))
        of_layer |= {f"self_attn.{part}_proj.bias": (width,) for part, width in widths}
    if shape.has_head_norms:
        of_layer |= {f"self_attn.{part}_norm.weight": (shape.head_dim,) for part in "qk"}
    shapes = {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not shape.tie_word_embeddings:
        shapes["lm_head.weight"] = (shape.head_size, hidden)
    for number in range(shape.num_layers):
        shapes |= {f"model.layers.{number}.{name}": size for name, size in of_layer.items()}
    return shapes


def layer_tensors(tensor: Tensors, number: int, kind: Literal["weight", "bias"] = "weight") -> Tensors:
    """The layer's weights, or its biases, by their names inside it."""
    return lambda name: tensor(f"model.layers.{number}.{name}.{kind}")
