"""A DeepSeek, whose pages hold latents, prefilled here and decoded there: the text is that of one pass."""

from pathlib import Path

from role_world import World, in_world
from seeded_checkpoint import TINY_DEEPSEEK, write_seeded
from tiny_checkpoint import Reference, prompt

NUM_TOKENS = 6


def test_split_text_is_that_of_a_model_alone(tmp_path: Path) -> None:
    checkpoint, sockets = tmp_path / "deepseek", tmp_path / "sockets"
    for directory in (checkpoint, sockets):
        directory.mkdir()
    write_seeded(checkpoint, TINY_DEEPSEEK)

    @in_world
    async def play(world: World) -> None:
        prefiller = await world.prefiller()
        decoder = await world.decoder(prefiller)
        for length in (5, 40):
            token_ids = prompt(length)
            asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, token_ids, NUM_TOKENS)
            assert await asked.text() == world.reference.text(token_ids, NUM_TOKENS), f"{length} tokens"
        assert decoder.counter("prefill_tokens_total") == 0

    play(checkpoint, sockets, Reference(checkpoint))
