"""A checkpoint's tensors by their Hugging Face names, as far as families share them. Owns nothing, opens no file."""

from collections.abc import Callable, Mapping

import torch

from headrace.model.shape import ModelShape

Tensors = Callable[[str], torch.Tensor]
"""A checkpoint's tensors, by name."""


def decoder_tensor_shapes(shape: ModelShape, norms: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Of a decoder with a gated MLP and no biases; `norms` are each layer's, and their sizes."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    of_layer: dict[str, tuple[int, ...]] = {
        **{name: (size,) for name, size in norms.items()},
        "self_attn.q_proj": (q_width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, q_width),
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


def layer_tensors(tensor: Tensors, number: int) -> Tensors:
    """The layer's weights by their names inside it."""
    return lambda name: tensor(f"model.layers.{number}.{name}.weight")
