"""The Gemma 3 architecture in GGUF, text only: its fields and tensors, and what its files leave to their readers.

Norms there have one added, which Hugging Face's have not. Which layers see a window, the base of their angles and the
scale of attention are not in the file but in llama.cpp; the larger models, which scale their angles, say so in fields
that are not known here, and are refused by name.
"""

from headrace.errors import InputError
from headrace.model.gguf.family import Config, Fields, GgufFamily, Rows, read_numbers, require_values
from headrace.model.gguf.sentencepiece import write_tokenizer

EXPECTED_FIELDS = {
    "tokenizer.ggml.model": "llama",  # SentencePiece, as the first Llama had it
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
}
COUNT_FIELDS = {
    "gemma3.block_count": "num_hidden_layers",
    "gemma3.context_length": "max_position_embeddings",
    "gemma3.embedding_length": "hidden_size",
    "gemma3.feed_forward_length": "intermediate_size",
    "gemma3.attention.head_count": "num_attention_heads",
    "gemma3.attention.head_count_kv": "num_key_value_heads",
    "gemma3.attention.key_length": "head_dim",
    "gemma3.attention.value_length": "head_dim",
    "gemma3.attention.sliding_window": "sliding_window",
}
FLOAT_FIELDS = {
    "gemma3.rope.freq_base": "rope_theta",
    "gemma3.attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}

LOCAL_ROPE_THETA = 10_000.0
GLOBAL_EVERY = 6
"""Source: the loading of `gemma3` in llama.cpp; so does the configuration that the model was published with."""


def hf_config(fields: Fields, tied: bool) -> Config:
    require_values(fields, EXPECTED_FIELDS)
    numbers = read_numbers(fields, "gemma3", counts=COUNT_FIELDS, floats=FLOAT_FIELDS)
    key, value = "gemma3.attention.key_length", "gemma3.attention.value_length"
    if fields[key] != fields[value]:
        raise InputError(value, f"must be the {key}, {fields[key]}, is {fields[value]}")
    kinds = ["sliding_attention", "full_attention"]
    num_layers, theta = numbers["num_hidden_layers"], numbers["rope_theta"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "query_pre_attn_scalar": numbers["head_dim"],
        "layer_types": [kinds[number % GLOBAL_EVERY == 0] for number in range(1, num_layers + 1)],
        # Twice, as for Llama: in the form of older readers and of newer ones.
        "rope_local_base_freq": LOCAL_ROPE_THETA,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base}
            for kind, base in zip(kinds, (LOCAL_ROPE_THETA, theta), strict=True)
        },
        **numbers,
    }


def less(name: str) -> float:
    return 1.0 if name.endswith("norm.weight") else 0.0


def as_they_are(name: str, rows: Rows, config: Config) -> Rows:
    return rows


GEMMA3 = GgufFamily(
    architecture="gemma3",
    config=hf_config,
    layer_tensors=LAYER_TENSORS,
    less=less,
    ordered=as_they_are,
    write_tokenizer=write_tokenizer,
)
