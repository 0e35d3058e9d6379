"""Rotary angles against transformers': their frequencies bit by bit, and what a model computes by them far out."""

from typing import Any

import pytest
import torch
from llama_oracle import Oracle, PagedLlama, random_tokens
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.model.batch import Batch, Row
from headrace.model.rotary import rotary, rotation
from headrace.model.shape import ModelShape

ORIGINAL_LEN = 32
VARIANT = "group of 4"

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn, every part": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 3.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.3,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn over fewer tokens than a turn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 5,
    },
}


OF_DEEPSEEK = {**ROPES["yarn, every part"], "mscale": 1.0, "mscale_all_dim": 0.707}
del OF_DEEPSEEK["attention_factor"]


def config_with(rope: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=dict(rope),
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_and_angles_are_those_of_transformers_to_the_bit(rope: str, head_dim: int) -> None:
    config = config_with(ROPES[rope], head_dim)
    shape, theirs = ModelShape.from_config(config.to_dict()), LlamaRotaryEmbedding(config)
    ours = rotary(shape.rope_theta, shape.head_dim, shape.rope_scaling)
    assert torch.equal(ours.frequencies, theirs.inv_freq) and ours.scale == theirs.attention_scaling
    row = Row(token_ids=[0] * 16, begin=100_000, page_table=range(100_016), wants_logits=False)
    batch = Batch.of([row], page_size=1, num_pages=100_016, vocab_size=1)
    expected = theirs(torch.zeros(1), torch.from_numpy(batch.positions)[None])
    for found, both_halves in zip(rotation(batch, ours), expected, strict=True):
        assert torch.equal(found, both_halves[0, :, : head_dim // 2])


@pytest.mark.parametrize("rope", [ROPES["default"], ROPES["yarn"], OF_DEEPSEEK], ids=["default", "yarn", "mscales"])
def test_of_deepseek_only_the_part_that_turns_has_angles(rope: dict[str, Any]) -> None:
    config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], rope_parameters=dict(rope))
    shape, theirs = ModelShape.from_config(config.to_dict()), DeepseekV3RotaryEmbedding(config)
    ours = rotary(shape.rope_theta, shape.rotary_dim, shape.rope_scaling)
    assert len(ours.frequencies) == 32  # half of qk_rope_head_dim
    assert torch.equal(ours.frequencies, theirs.inv_freq) and ours.scale == theirs.attention_scaling


def short(rope: dict[str, Any]) -> dict[str, Any]:
    """The same for a model of few tokens: trained with ORIGINAL_LEN, and every dimension turns within them."""
    original = "original_max_position_embeddings"
    return {**rope, "rope_theta": 100.0, **({original: ORIGINAL_LEN} if original in rope else {})}


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn", "yarn, every part"])
def test_far_beyond_the_original_context_logits_are_the_oracles_in_one_chunk_and_in_many(rope: str) -> None:
    tokens, plain = random_tokens(8 * ORIGINAL_LEN + 5), Oracle(VARIANT, rope_parameters=short(ROPES["default"]))
    oracle = Oracle(VARIANT, rope_parameters=short(ROPES[rope]))
    expected, unscaled = oracle.logits(tokens), plain.logits(tokens)[-1]
    largest = float(expected.abs().max())
    assert float((expected[-1] - unscaled).abs().max()) > 0.01 * largest, "scaling does not show"
    for sizes in ((len(tokens),), (20, 30, 1, 150, 1, 59)):
        paged = PagedLlama(oracle.ours())
        sequence = paged.sequence(tokens)
        for size in sizes:
            logits = paged.step((sequence, size))[0]
            assert float((logits - expected[sequence.num_computed - 1]).abs().max()) < 1e-4 * largest
        assert sequence.num_computed == len(tokens)
