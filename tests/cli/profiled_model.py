"""A whole model of two layers on disk, random, with a tokenizer of bytes: what a profile of a few seconds runs on."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.model.llama import tensor_shapes
from headrace.model.shape import ModelShape

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the least that native kernels take
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def write_model(directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(ModelShape.from_config(CONFIG))
    tensors = {name: torch.randn(size, generator=generator).bfloat16() for name, size in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": alphabet[1]}))
    return directory


def weight_bytes() -> int:
    """Of what a step reads: everything but norms and embeddings, in bf16."""
    shapes = tensor_shapes(ModelShape.from_config(CONFIG))
    return sum(2 * size[0] * size[1] for name, size in shapes.items() if len(size) == 2 and "embed_tokens" not in name)
