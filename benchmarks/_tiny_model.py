"""A Qwen3 with seeded weights that is computed in a moment, for benchmarks of all that is not the model."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

END = "<end>"
NUM_BYTES = 256
VOCABULARY = (0, NUM_BYTES)  # its token ids, less the one that ends a text
MAX_LEN = 4096


def write_tiny_model(directory: Path) -> Path:
    """Rows are exact by native kernels in bf16 (decision 0009): whoever computes a prompt writes the same text."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=NUM_BYTES + 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        eos_token_id=NUM_BYTES,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape)
            weight.copy_(1 + drawn / 3 if "norm" in name else drawn * (1.5 / weight.shape[-1] ** 0.5))
    model.bfloat16().save_pretrained(directory)
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
