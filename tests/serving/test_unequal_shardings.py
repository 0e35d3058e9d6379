"""Prefillers and decoders of other degrees than each other, as processes: the text is transformers', and KV travels.

A tiny Qwen3 of two KV heads, which over four ranks are on two each; a tiny DeepSeek, whose latents are on all. All
pairs, over every transport: `test_whole_matrix`.
"""

import pytest
from between_shardings import Degrees, TinyModel, random_prompts, show_same_text
from tiny_deepseek import write_deepseek
from tiny_qwen import write_qwen

pytestmark = [pytest.mark.serving, pytest.mark.timeout(120)]

TRANSPORT = "tcp"
LENGTHS = (2, 60, 100, 180)
NUM_TOKENS = 32
OF_QWEN = (
    Degrees(decoder_tp=2),
    Degrees(prefiller_tp=2),
    Degrees(prefiller_tp=4, decoder_tp=2),
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(write_qwen(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(write_deepseek(tmp_path_factory.mktemp("deepseek")))


@pytest.mark.parametrize("degrees", OF_QWEN, ids=str)
def test_text_is_transformers_whatever_the_degrees(degrees: Degrees, qwen: TinyModel, transport: str) -> None:
    shown = show_same_text(qwen, degrees, transport, random_prompts(LENGTHS), NUM_TOKENS)
    assert shown.num_clear >= 3, "too many prompts were left out"


def test_latents_and_experts_of_two_ranks_go_to_two_groups(deepseek: TinyModel, transport: str) -> None:
    degrees = Degrees(prefiller_tp=2, decoder_dp=2)
    shown = show_same_text(deepseek, degrees, transport, random_prompts(LENGTHS), NUM_TOKENS)
    assert shown.num_clear >= 3, "too many prompts were left out"
