"""What is read from the config.json of a DeepSeek: latents, grouped experts, its yarn; and what is refused of them."""

import math
from dataclasses import replace
from typing import Any

import pytest
from transformers import DeepseekV3Config

from headrace.errors import InputError
from headrace.model.expert_fields import ExpertGroups, Experts
from headrace.model.latent_fields import LatentAttention
from headrace.model.rope import YarnScaling
from headrace.model.shape import ModelShape

OF_DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
LONG_ROPE = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
DEEPSEEK_V3: dict[str, Any] = {
    **OF_DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {**LONG_ROPE, **MSCALES},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
"""As it was published, and R1."""

DEEPSEEK_V2_LITE: dict[str, Any] = {
    **OF_DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**LONG_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


def deepseek_of(config: dict[str, Any] = DEEPSEEK_V3, **changes: Any) -> ModelShape:
    """`...` takes a field out."""
    return ModelShape.from_config({field: value for field, value in {**config, **changes}.items() if value is not ...})


def test_every_number_of_deepseek_v3_is_the_configurations() -> None:
    stretch = 0.1 * math.log(40) + 1
    scaling = YarnScaling(
        factor=40.0,
        slow_turns=1.0,
        fast_turns=32.0,
        original_len=4096,
        truncated=True,
        attention_factor=1.0,
        scores_factor=stretch**2,
    )
    shape = deepseek_of()
    assert shape == ModelShape(
        architecture="DeepseekV3ForCausalLM",
        num_layers=61,
        hidden_size=7168,
        intermediate_size=18432,
        num_heads=128,
        num_kv_heads=1,
        head_dim=192,
        vocab_size=129280,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        attention_scale=192**-0.5 * stretch**2,
        rope_scaling=scaling,
        weight_block_size=(128, 128),
        experts=Experts(
            layers=tuple(range(3, 61)),
            num_experts=256,
            num_chosen=8,
            intermediate_size=2048,
            renormalised=True,
            scores="sigmoid",
            groups=ExpertGroups(num_groups=8, num_chosen=4),
            scale=2.5,
            shared_size=2048,
        ),
        latent=LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, interleaved=True),
        num_mtp_layers=1,
        max_model_len=163840,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_ids=(1,),
    )
    assert shape.kv_layout(64, "bf16").token_bytes == 70_272
    assert shape.kv_layout(64, "bf16").page_shape == (64, 576)


def test_deepseek_v2s_experts_are_chosen_among_all_or_in_groups() -> None:
    lite = deepseek_of(DEEPSEEK_V2_LITE)
    assert lite.latent is not None and lite.latent.q_rank is None and lite.num_mtp_layers == 0
    in_groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    all_of_them = Experts(
        layers=tuple(range(1, 27)),
        num_experts=64,
        num_chosen=6,
        intermediate_size=1408,
        renormalised=False,
        shared_size=2 * 1408,
    )
    assert lite.experts == all_of_them
    groups = ExpertGroups(num_groups=8, num_chosen=3)
    assert deepseek_of(DEEPSEEK_V2_LITE, **in_groups).experts == replace(all_of_them, groups=groups, scale=16.0)
    assert deepseek_of(DEEPSEEK_V2_LITE, **{**in_groups, "topk_group": 8}).experts == replace(all_of_them, scale=16.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"first_k_dense_replace": 0}, tuple(range(61)), id="none dense"),
        pytest.param({"first_k_dense_replace": 61}, (), id="all dense"),
        pytest.param({"first_k_dense_replace": 55, "moe_layer_freq": 2}, (56, 58, 60), id="every second"),
    ],
)
def test_the_first_layers_are_dense(changes: dict[str, int], expected: tuple[int, ...]) -> None:
    experts = deepseek_of(**changes).experts
    assert experts is not None and experts.layers == expected


@pytest.mark.parametrize(
    ("rope", "attention_factor", "scores_factor"),
    [
        pytest.param({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 0.0707, id="alike"),
        pytest.param({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1), 0.05,
                     id="apart"),
        pytest.param({}, 0.1 * math.log(40) + 1, 0.0, id="neither"),
    ],
)  # fmt: skip
def test_yarn_stretches_what_turns_and_all_products(
    rope: dict[str, float], attention_factor: float, scores_factor: float
) -> None:
    shape = deepseek_of(rope_scaling={**LONG_ROPE, **rope})
    assert isinstance(shape.rope_scaling, YarnScaling)
    assert shape.rope_scaling.attention_factor == pytest.approx(attention_factor)
    assert shape.attention_scale == pytest.approx(192**-0.5 * (scores_factor * math.log(40) + 1) ** 2)
    assert deepseek_of(rope_scaling=None).attention_scale == 192**-0.5


def test_a_deepseek_written_by_transformers_is_understood() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, **LONG_ROPE, **MSCALES}
    config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], max_position_embeddings=163840,
                              rope_parameters=rope)  # fmt: skip
    assert ModelShape.from_config(config.to_dict()) == deepseek_of(quantization_config=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": ...}, "kv_lora_rank: must be a whole number of at least 1 in config.json, is missing"),
        ({"q_lora_rank": 0}, "q_lora_rank: must be a whole number"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: must be even"),
        ({"head_dim": 128}, r"head_dim: must be absent or qk_rope_head_dim \(64\) .*, is 128"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads: must be absent or num_attention_heads \(128\)"),
        ({"attention_bias": True}, "attention_bias: must be absent or False"),
        ({"scoring_func": "softmax"}, "scoring_func: must be absent or 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method: must be absent or 'noaux_tc'"),
        ({"n_group": 7}, r"n_group: must cut n_routed_experts \(256\) into equal groups of at least 2 .*, is 7"),
        ({"n_group": 256}, "n_group: must cut n_routed_experts"),
        ({"topk_group": 9}, r"topk_group: must be at most n_group \(8\)"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: must be at most 128, the experts that a token may"),
        ({"n_shared_experts": None}, "n_shared_experts: must be a whole number of at least 1 .*, is missing"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: must be a whole number of at least 0"),
        ({"moe_layer_freq": 0}, "moe_layer_freq: must be a whole number of at least 1"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor: must be a number above 0"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers: must be a whole number of at least 0"),
        ({"rope_scaling": {**LONG_ROPE, "mscale": 1.0}}, "rope_scaling.mscale_all_dim: must be a number .* missing"),
        ({"rope_scaling": {**LONG_ROPE, "mscale_all_dim": 1.0}}, "rope_scaling.mscale: must be a number .* missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: must have rope_type 'default' or 'yarn'"),
    ],
)  # fmt: skip
def test_what_deepseek_v3_does_not_mean_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        deepseek_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func: must be absent or 'softmax'"),
        ({"topk_method": "noaux_tc"}, "topk_method: must be absent or 'greedy' or 'group_limited_greedy'"),
        ({"norm_topk_prob": True}, "norm_topk_prob: must be absent or False"),
        ({"rope_interleave": False}, "rope_interleave: must be absent or True"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: must be absent or 0"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok: must be at most 64"),
    ],
)
def test_what_deepseek_v2_does_not_mean_is_refused_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        deepseek_of(DEEPSEEK_V2_LITE, **changes)


def test_factors_of_deepseeks_yarn_are_no_other_familys() -> None:
    with pytest.raises(InputError, match="with rope_type 'yarn', has mscale, mscale_all_dim"):
        ModelShape.from_config({**DEEPSEEK_V3, "architectures": ["LlamaForCausalLM"]})
