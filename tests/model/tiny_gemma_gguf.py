"""A seeded tiny Gemma 3 as a GGUF file, written as llama.cpp's conversion writes one.

From transformers' own model, with one added to every norm, and a list of SentencePiece pieces."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

LAYERS, HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE, WINDOW = 7, 64, 4, 32, 96, 5

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
WORDS = ("▁t", "he", "in", "er", "▁the", "▁in", "the", "▁w", "12", "er▁", "aa", "aaa", "é", "日本", "b>")
LETTERS = ("▁", *"etaoinshrdlucmwxb12<>.,é日本")
PIECES: tuple[tuple[str, int, float], ...] = (
    *((name, CONTROL, -1000.0) for name in ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>")),
    *((piece, USER_DEFINED, -1000.0) for piece in ("\n", "\n\n", "\n\n\n", "  ", "   ", "    ", "<b>", "</b>")),
    *((f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)),
    *((word, NORMAL, -float(place)) for place, word in enumerate(WORDS)),
    *((letter, NORMAL, -1000.0 - place) for place, letter in enumerate(LETTERS) if letter not in WORDS),
)

TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_proj": "attn_k",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def hf_gemma3(seed: int = 0) -> Gemma3ForCausalLM:
    """All weights exact in bf16."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=len(PIECES),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=WINDOW,
        max_position_embeddings=512,
        attn_implementation="eager",
    )
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_((torch.randn(weight.shape) * (0.3 if "norm" in name else 0.15)).bfloat16())
    return model


def gemma3_tensors(model: Gemma3ForCausalLM) -> dict[str, np.ndarray]:
    named = {}
    for name, values in model.state_dict().items():
        array = values.numpy() + (1 if "norm" in name else 0)
        if name == "model.norm.weight":
            named["output_norm.weight"] = array
        elif name == "model.embed_tokens.weight":
            named["token_embd.weight"] = array
        elif name != "lm_head.weight":
            _, _, layer, inner = name.split(".", 3)
            named[f"blk.{layer}.{TENSORS[inner.removesuffix('.weight')]}.weight"] = array
    return named


def write_gemma3(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    quantised: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, int | bool] | None = None,
    template: str | None = None,
) -> None:
    """`quantised` for all matrices; vectors stay in fp32."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length((extra or {}).pop("value_length", HEAD_DIM))
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(WINDOW)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    pieces, types, scores = zip(*PIECES, strict=True)
    writer.add_token_list(list(pieces))
    writer.add_token_scores(list(scores))
    writer.add_token_types(list(types))
    for name, token_id in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token((extra or {}).pop("add_bos_token", True))
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    for name, value in (extra or {}).items():
        writer.add_uint32(name, value)
    if template is not None:
        writer.add_chat_template(template)
    for name, values in tensors.items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
