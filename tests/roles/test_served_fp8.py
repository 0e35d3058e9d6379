"""A checkpoint in blocks of FP8, prefilled here and decoded there: the text is that of the blocks' values."""

from pathlib import Path

from fp8_blocks import quantise
from role_world import World, in_world
from tiny_checkpoint import Reference, prompt, write_checkpoint

NUM_TOKENS = 6


def test_split_text_is_that_of_the_values_of_the_blocks(tmp_path: Path) -> None:
    checkpoint, twin, sockets = (tmp_path / name for name in ("fp8", "twin", "sockets"))
    for directory in (checkpoint, sockets):
        directory.mkdir()
    quantise(write_checkpoint(checkpoint), twin, (40, 24))

    @in_world
    async def play(world: World) -> None:
        prefiller = await world.prefiller()
        decoder = await world.decoder(prefiller)
        for length in (5, 40):
            token_ids = prompt(length)
            asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, token_ids, NUM_TOKENS)
            assert await asked.text() == world.reference.text(token_ids, NUM_TOKENS), f"{length} tokens"
        assert decoder.counter("prefill_tokens_total") == 0

    play(checkpoint, sockets, Reference(twin))
