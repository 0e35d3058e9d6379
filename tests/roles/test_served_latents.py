"""A DeepSeek, whose pages hold latents, prefilled here and decoded there: the text is that of one pass."""

from pathlib import Path

from role_world import split_text_is
from seeded_checkpoint import TINY_DEEPSEEK, write_seeded
from tiny_checkpoint import Reference


def test_split_text_is_that_of_a_model_alone(tmp_path: Path) -> None:
    checkpoint, sockets = tmp_path / "deepseek", tmp_path / "sockets"
    for directory in (checkpoint, sockets):
        directory.mkdir()
    write_seeded(checkpoint, TINY_DEEPSEEK)
    split_text_is(Reference(checkpoint), checkpoint, sockets, num_tokens=6)
