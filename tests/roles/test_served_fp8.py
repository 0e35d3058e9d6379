"""A checkpoint in blocks of FP8, prefilled here and decoded there: the text is that of the blocks' values."""

from pathlib import Path

from fp8_blocks import quantise
from role_world import split_text_is
from tiny_checkpoint import Reference, write_checkpoint


def test_split_text_is_that_of_the_values_of_the_blocks(tmp_path: Path) -> None:
    checkpoint, twin, sockets = (tmp_path / name for name in ("fp8", "twin", "sockets"))
    for directory in (checkpoint, sockets):
        directory.mkdir()
    quantise(write_checkpoint(checkpoint), twin, (40, 24))
    split_text_is(Reference(twin), checkpoint, sockets, num_tokens=6)
