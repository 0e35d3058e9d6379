"""From a GGUF file of the Llama architecture to a Hugging Face directory: configuration, bf16 weights, tokenizer.

Owns the names of tensors and fields on both sides, and what lies between them: quantised blocks become bf16, and the
rows of the query and key projections, which GGUF stores for rotation of neighbouring pairs, get back to the order of
two halves. Runs in the command-line process, hence without torch. Knows neither where the file came from nor whether
the directory is whole: the caller moves it to its place when this returns. What is not known here is refused by name,
never left out: a model converted without one of its fields would speak, and speak wrongly.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from headrace.errors import InputError
from headrace.model.gguf_tokenizer import write_tokenizer
from headrace.model.progress import Progress

EXPECTED_FIELDS = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
}
"""Fields with the one value that the conversion is right for."""

SHAPE_FIELDS = {
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
ID_FIELDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}

MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
UNTIED_TENSOR = {"output.weight": "lm_head.weight"}
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


def convert(source: Path, directory: Path, stage: str, progress: Progress) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files into `directory`.

    Raises InputError, naming field or tensor, for a file that this conversion is not made for."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config(fields, tied="output.weight" not in tensors)
    write_tokenizer(fields, directory)
    write_json(directory / "config.json", config)
    write_json(
        directory / "generation_config.json",
        {name: config[name] for name in ID_FIELDS.values()},
    )
    write_weights(tensors, config, directory / "model.safetensors", stage, progress)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ---- configuration ---------------------------------------------------------------------------------------------


def hf_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """What config.json says."""
    for name, expected in EXPECTED_FIELDS.items():
        if fields.get(name) != expected:
            raise InputError(name, f"must be {expected!r}, is {fields.get(name)!r}")
    known = {*SHAPE_FIELDS, *FLOAT_FIELDS}
    if unknown := sorted(name for name in fields if name.startswith("llama.") and name not in known):
        raise InputError(unknown[0], f"is not understood; what is: {', '.join(sorted(known))}")
    if missing := sorted({*known, *ID_FIELDS} - set(fields)):
        raise InputError(missing[0], "must be in the file, is not")
    numbers: dict[str, Any] = {ours: int(fields[theirs]) for theirs, ours in {**SHAPE_FIELDS, **ID_FIELDS}.items()}
    numbers |= {ours: shortest(fields[theirs]) for theirs, ours in FLOAT_FIELDS.items()}
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


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


# ---- weights ---------------------------------------------------------------------------------------------------


def write_weights(
    tensors: Mapping[str, gguf.ReaderTensor], config: Mapping[str, Any], path: Path, stage: str, progress: Progress
) -> None:
    """All tensors under their Hugging Face names, in bf16; `progress` counts the bytes of the result."""
    names = tensor_names(config)
    if missing := sorted(set(names) - set(tensors)):
        raise InputError(missing[0], "must be in the file, is not")
    if unknown := sorted(set(tensors) - set(names)):
        raise InputError(unknown[0], "is a tensor that is not understood")
    total_bytes = 2 * sum(int(tensor.n_elements) for tensor in tensors.values())
    weights: dict[str, NDArray[np.uint16]] = {}
    done_bytes = 0
    progress(stage, done_bytes, total_bytes)
    for theirs, ours in names.items():
        weights[ours] = to_bf16(dequantized(tensors[theirs], config))
        done_bytes += weights[ours].nbytes
        progress(stage, done_bytes, total_bytes)
    serialize_file(
        {
            name: TensorSpec(dtype="bfloat16", shape=weight.shape, data_ptr=weight.ctypes.data, data_len=weight.nbytes)
            for name, weight in weights.items()
        },
        path,
        metadata={"format": "pt"},  # transformers asks for it
    )


def tensor_names(config: Mapping[str, Any]) -> dict[str, str]:
    """GGUF names and Hugging Face names of all tensors that such a model has."""
    layers = {
        f"blk.{layer}.{theirs}.weight": f"model.layers.{layer}.{ours}.weight"
        for layer in range(config["num_hidden_layers"])
        for theirs, ours in LAYER_TENSORS.items()
    }
    return {**MODEL_TENSORS, **layers, **({} if config["tie_word_embeddings"] else UNTIED_TENSOR)}


def dequantized(tensor: gguf.ReaderTensor, config: Mapping[str, Any]) -> NDArray[np.float32]:
    """The tensor's values, row by row as Hugging Face orders them."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if tensor.name.endswith(".attn_q.weight"):
        return halves_from_pairs(values, config["num_attention_heads"])
    if tensor.name.endswith(".attn_k.weight"):
        return halves_from_pairs(values, config["num_key_value_heads"])
    return values


def halves_from_pairs(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """`[num_heads * head_dim, hidden]`, in each head rows (0, d/2, 1, d/2 + 1, ...) -> rows (0, 1, 2, ...).

    llama.cpp rotates neighbours (2i, 2i + 1) and stores rows for that; Hugging Face rotates (i, i + d/2).
    Source: `permute` of the Llama conversion in llama.cpp, undone."""
    num_rows, hidden = rows.shape
    return rows.reshape(num_heads, num_rows // num_heads // 2, 2, hidden).swapaxes(1, 2).reshape(num_rows, hidden)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of finite floats, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
