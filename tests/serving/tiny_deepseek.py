"""A DeepSeek V3 as its published directories are, only tiny: seeded weights, a tokenizer of bytes."""

from pathlib import Path

from seeded_checkpoint import TINY_DEEPSEEK, write_seeded
from tiny_qwen import byte_level_tokenizer


def write_deepseek(made: Path) -> Path:
    byte_level_tokenizer().save(str(made / "tokenizer.json"))
    return write_seeded(made, {**TINY_DEEPSEEK, "vocab_size": 320})  # more than the tokenizer has
