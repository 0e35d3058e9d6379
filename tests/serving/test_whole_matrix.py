"""Prefillers and decoders of all pairs of degrees, as processes: `make test-matrix`, over every transport.

Two KV heads over four ranks are on two each; four of them are one on each. A DeepSeek's latents are on all ranks, its
experts spread over all, its decoder's groups hold requests of their own. A table of all is printed at the end.
"""

import itertools

import pytest
from between_shardings import Degrees, TinyModel, random_prompts, show_same_text
from matrix_table import Shows
from tiny_deepseek import write_deepseek
from tiny_qwen import write_qwen

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]

LENGTHS = (2, 8, 9, 10, 17, 33, 40, 50, 64, 65, 66, 90, 100, 129, 150, 180)
NUM_TOKENS = 24
TPS = (1, 2, 4)

MODELS = {
    "2 KV heads": write_qwen,
    "4 KV heads": lambda made: write_qwen(made, num_kv_heads=4),
    "latents": write_deepseek,
}
ALL_TPS = [Degrees(prefiller_tp=src, decoder_tp=dst) for src, dst in itertools.product(TPS, TPS)]
TO_GROUPS = [Degrees(prefiller_tp=src, decoder_dp=dp) for src, dp in itertools.product(TPS, (1, 2))]
PAIRS = [
    *(("2 KV heads", degrees) for degrees in ALL_TPS),
    ("2 KV heads", Degrees(prefiller_tp=2, decoder_dp=2)),
    *(("4 KV heads", degrees) for degrees in ALL_TPS if 4 in (degrees.prefiller_tp, degrees.decoder_tp)),
    *(("latents", degrees) for degrees in TO_GROUPS),
    ("latents", Degrees(prefiller_tp=4, decoder_tp=2, decoder_dp=2)),
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    return {name: TinyModel(write(tmp_path_factory.mktemp("tiny"))) for name, write in MODELS.items()}


@pytest.mark.parametrize(("model", "degrees"), PAIRS, ids=[f"{model}, {degrees}" for model, degrees in PAIRS])
def test_text_is_transformers_and_its_kv_came_from_every_replica(
    model: str,
    degrees: Degrees,
    transport: str,
    models: dict[str, TinyModel],
    shows: Shows,
) -> None:
    key = (model, str(degrees), transport)
    shows[key] = None
    shown = show_same_text(models[model], degrees, transport, random_prompts(LENGTHS), NUM_TOKENS)
    assert shown.num_clear >= len(LENGTHS) * 3 // 4, "too many prompts were left out"
    num_sets = models[model].replicas(degrees.prefiller_tp)
    sent = [sum(shown.bytes_by_rank[replica::num_sets]) for replica in range(num_sets)]
    assert num_sets == 1 or sum(num_bytes > 0 for num_bytes in sent) > 1, f"replica sets sent {sent}"
    shows[key] = shown
