"""The Llama architecture in GGUF: its fields and tensors, and the order of rows that its files have.

GGUF stores the rows of the query and key projections for rotation of neighbouring pairs; here they get back to the
order of two halves. What is not known is refused by name, never left out: a model converted without one of its fields
would speak, and speak wrongly.
"""

from headrace.errors import InputError
from headrace.model.gguf.family import Config, Fields, GgufFamily, Rows, read_numbers, require_values
from headrace.model.gguf.tokenizer import write_tokenizer

EXPECTED_FIELDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
}
COUNT_FIELDS = {
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.rope.dimension_count": "head_dim",
    "llama.vocab_size": "vocab_size",
}
FLOAT_FIELDS = {
    "llama.rope.freq_base": "rope_theta",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_config(fields: Fields, tied: bool) -> Config:
    require_values(fields, EXPECTED_FIELDS)
    numbers = read_numbers(fields, "llama", counts=COUNT_FIELDS, floats=FLOAT_FIELDS)
    if numbers["vocab_size"] != len(fields["tokenizer.ggml.tokens"]):
        raise InputError("llama.vocab_size", f"must be the number of tokens, is {numbers['vocab_size']}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        # Twice: older readers look for rope_theta, newer ones for rope_parameters; one that finds neither silently
        # takes 10,000.
        "rope_parameters": {"rope_type": "default", "rope_theta": numbers["rope_theta"]},
        **numbers,
    }


def ordered(name: str, rows: Rows, config: Config) -> Rows:
    if name.endswith(".attn_q.weight"):
        return halves_from_pairs(rows, config["num_attention_heads"])
    if name.endswith(".attn_k.weight"):
        return halves_from_pairs(rows, config["num_key_value_heads"])
    return rows


def halves_from_pairs(rows: Rows, num_heads: int) -> Rows:
    """`[num_heads * head_dim, hidden]`, in each head rows (0, d/2, 1, d/2 + 1, ...) -> rows (0, 1, 2, ...).

    llama.cpp rotates neighbours (2i, 2i + 1) and stores rows for that; Hugging Face rotates (i, i + d/2).
    Source: `permute` of the Llama conversion in llama.cpp, undone."""
    num_rows, hidden = rows.shape
    return rows.reshape(num_heads, num_rows // num_heads // 2, 2, hidden).swapaxes(1, 2).reshape(num_rows, hidden)


LLAMA = GgufFamily(
    architecture="llama",
    config=hf_config,
    layer_tensors=LAYER_TENSORS,
    less=lambda name: 0.0,
    ordered=ordered,
    write_tokenizer=write_tokenizer,
)
