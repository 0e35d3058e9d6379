"""What is read from a config.json, in old style and new, and every field that is refused, by its name."""

import math
from dataclasses import replace
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from headrace.errors import InputError
from headrace.kvcache.layout import KVLayout
from headrace.model.expert_fields import Experts
from headrace.model.family_fields import LocalAttention
from headrace.model.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from headrace.model.shape import ModelShape

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "rope_theta": 100_000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


def shape_of(**changes: Any) -> ModelShape:
    """Of CONFIG with these fields changed; `...` takes a field out."""
    return ModelShape.from_config({field: value for field, value in {**CONFIG, **changes}.items() if value is not ...})


def test_every_number_is_the_configurations() -> None:
    assert shape_of() == ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        attention_scale=0.125,
        max_model_len=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_the_kv_layout_is_that_of_the_kv_heads() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, page_size=16, head_dim=64, dtype="bf16")
    assert shape_of().kv_layout(16, "bf16") == layout
    with pytest.raises(InputError, match="page_size"):
        shape_of().kv_layout(0, "bf16")


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        pytest.param({}, 1e5, id="at the top"),
        pytest.param({"rope_scaling": None}, 1e5, id="at the top, scaling null"),
        pytest.param({"rope_theta": ..., "rope_parameters": DEFAULT_ROPE}, 5e5, id="in rope_parameters"),
        pytest.param({"rope_theta": None, "rope_parameters": {"rope_theta": 7}}, 7.0, id="without a type"),
        pytest.param({"rope_theta": ..., "rope_scaling": DEFAULT_ROPE}, 5e5, id="in rope_scaling"),
        pytest.param({"rope_theta": 5e5, "rope_parameters": DEFAULT_ROPE}, 5e5, id="in both, equal"),
        pytest.param({"rope_parameters": {"rope_type": "default"}}, 1e5, id="at the top beside a type"),
        pytest.param({"rope_scaling": {"type": "default"}}, 1e5, id="at the top beside an old type"),
        pytest.param({"rope_theta": ...}, 1e4, id="nowhere, as in the first Llamas"),
    ],
)
def test_rope_theta_is_found_wherever_it_stands(fields: dict[str, Any], theta: float) -> None:
    assert shape_of(**fields).rope_theta == theta


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 0.5}}, "rope_parameters.rope_theta"),
    ],
)
def test_a_rope_theta_of_at_most_one_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match="must be above 1") as caught:
        shape_of(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"head_dim": ...}, {"head_dim": 64}, id="head_dim from the hidden size"),
        pytest.param({"head_dim": None}, {"head_dim": 64}, id="head_dim null"),
        pytest.param({"head_dim": 32}, {"head_dim": 32}, id="head_dim of its own"),
        pytest.param({"num_key_value_heads": ...}, {"num_kv_heads": 9}, id="every head has its own keys"),
        pytest.param({"tie_word_embeddings": ...}, {"tie_word_embeddings": False}, id="untied"),
        pytest.param({"eos_token_id": [5, 2, 9]}, {"eos_token_ids": (5, 2, 9)}, id="several ends"),
        pytest.param({"eos_token_id": None}, {"eos_token_ids": ()}, id="no end"),
        pytest.param({"bos_token_id": ...}, {"bos_token_id": None}, id="no beginning"),
        pytest.param({"sliding_window": None, "quantization_config": None}, {}, id="null is absent"),
        pytest.param({"hidden_act": ..., "attention_bias": False, "mlp_bias": False}, {}, id="known values"),
    ],
)
def test_what_may_be_absent_has_the_familys_default(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = shape_of(**fields)
    assert {field: getattr(shape, field) for field in expected} == expected


def test_a_configuration_written_by_transformers_is_understood() -> None:
    config = LlamaConfig(architectures=["LlamaForCausalLM"], rope_parameters=DEFAULT_ROPE, num_key_value_heads=4)
    shape = ModelShape.from_config(config.to_dict())
    assert (shape.rope_theta, shape.num_kv_heads, shape.head_dim, shape.rms_norm_eps) == (5e5, 4, 128, 1e-6)


COUNTS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "max_position_embeddings",
)


@pytest.mark.parametrize("field", [*COUNTS, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("wrong", [0, -3, 1.5, "64", True, [64]], ids=repr)
def test_a_count_that_is_none_is_refused(field: str, wrong: object) -> None:
    with pytest.raises(InputError, match="must be a whole number of at least 1 in config.json, is ") as caught:
        shape_of(**{field: wrong})
    assert caught.value.field == field
    assert str(caught.value).endswith(repr(wrong))


@pytest.mark.parametrize("field", [*COUNTS, "rms_norm_eps", "architectures"])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    for nothing in (..., None):
        with pytest.raises(InputError, match=f"^{field}: must be .*is missing"):
            shape_of(**{field: nothing})


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        pytest.param("rms_norm_eps", 0, "a number above 0", id="no epsilon"),
        pytest.param("rms_norm_eps", "1e-5", "a number above 0", id="an epsilon in quotes"),
        pytest.param("rms_norm_eps", float("nan"), "a number above 0", id="an epsilon that is none"),
        pytest.param("rope_theta", float("inf"), "a number above 0", id="an infinite theta"),
        pytest.param("rope_theta", False, "a number above 0", id="a false theta"),
        pytest.param("num_key_value_heads", 4, r"must divide num_attention_heads \(9\)", id="heads that do not group"),
        pytest.param("head_dim", 63, "must be even", id="an odd head_dim"),
        pytest.param("tie_word_embeddings", "yes", "true or false", id="a flag in words"),
        pytest.param("eos_token_id", 49152, r"in 0\.\.49151", id="an end outside of the vocabulary"),
        pytest.param("eos_token_id", [2, "3"], r"in 0\.\.49151", id="an end in quotes"),
        pytest.param("eos_token_id", True, r"in 0\.\.49151", id="a true end"),
        pytest.param("bos_token_id", -1, r"in 0\.\.49151", id="a negative beginning"),
        pytest.param("architectures", ["MixtralForCausalLM"], "known are LlamaForCausalLM.*Mixtral", id="a stranger"),
        pytest.param("architectures", "LlamaForCausalLM", "must be a list of one", id="no list"),
        pytest.param("architectures", [], "must be a list of one", id="no architecture"),
        pytest.param("architectures", [[]], "must be a list of one", id="a nested list"),
        pytest.param("hidden_act", "gelu", "'silu'.*the only that is known, is 'gelu'", id="activation"),
        pytest.param("attention_bias", True, "absent or False", id="attention bias"),
        pytest.param("mlp_bias", True, "absent or False", id="MLP bias"),
        pytest.param("partial_rotary_factor", 0.5, "absent or 1", id="partial rotary"),
        pytest.param("sliding_window", 4096, "must be absent", id="sliding window"),
        pytest.param("original_max_position_embeddings", 4096, "must be absent", id="a length outside of its rope"),
        pytest.param("rope_scaling", {"factor": 2.0}, "no factors", id="scaling without a type"),
        pytest.param(
            "rope_scaling",
            {"type": "ntk", "factor": 2.0},
            "'default' or 'linear' or 'llama3' or 'yarn', the only known, is .*ntk",
            id="a strange rope",
        ),
        pytest.param("rope_scaling", {"rope_type": ["yarn"]}, "the only known", id="a list of types"),
        pytest.param(
            "rope_scaling",
            {"type": "dynamic", "factor": 2.0},
            "default, linear, llama3, yarn, not 'dynamic': its angles change with the length",
            id="dynamic",
        ),
        pytest.param("rope_parameters", {"rope_type": "longrope", "factor": 2.0}, "not 'longrope'", id="longrope"),
        pytest.param(
            "rope_scaling",
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 32},
            "must have factor with rope_type 'linear', has beta_fast",
            id="a factor of another rope",
        ),
        pytest.param("rope_parameters", {"full_attention": DEFAULT_ROPE}, "no factors", id="one per kind of layer"),
        pytest.param("rope_parameters", [1], "must be an object", id="a list of parameters"),
    ],
)
def test_a_field_that_is_wrong_or_not_known_is_named(field: str, wrong: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        shape_of(**{field: wrong})
    assert caught.value.field == field


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
OF_YARN = YarnScaling(
    factor=4.0,
    slow_turns=1.0,
    fast_turns=32.0,
    original_len=4096,
    truncated=True,
    attention_factor=0.1 * math.log(4.0) + 1.0,
)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        pytest.param({"type": "linear", "factor": 2}, LinearScaling(factor=2.0), id="linear"),
        pytest.param(LLAMA3_ROPE, Llama3Scaling(factor=32.0, low_turns=1.0, high_turns=4.0, original_len=4096),
                     id="llama3"),
        pytest.param(YARN_ROPE, OF_YARN, id="yarn"),
        pytest.param({**YARN_ROPE, "original_max_position_embeddings": None}, replace(OF_YARN, original_len=8192),
                     id="yarn from max_position_embeddings on"),
        pytest.param({**YARN_ROPE, "attention_factor": 1.5}, replace(OF_YARN, attention_factor=1.5),
                     id="yarn with its attention factor"),
        pytest.param({**YARN_ROPE, "factor": 1}, replace(OF_YARN, factor=1.0, attention_factor=1.0), id="yarn of 1"),
        pytest.param({**YARN_ROPE, "beta_fast": 16, "beta_slow": 2.0, "truncate": False},
                     replace(OF_YARN, fast_turns=16.0, slow_turns=2.0, truncated=False), id="yarn with its bounds"),
    ],
)  # fmt: skip
def test_a_scaled_rope_is_read_in_old_style_and_new(field: str, rope: dict[str, Any], scaling: RopeScaling) -> None:
    assert shape_of(**{field: rope}).rope_scaling == scaling
    in_new = {"rope_theta": ..., "rope_parameters": {**rope, "rope_theta": 7.0}}
    assert (shape_of(**in_new).rope_theta, shape_of(**in_new).rope_scaling) == (7.0, scaling)


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, YARN_ROPE], ids=["llama3", "yarn"])
@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_a_number_of_a_scaled_rope_that_is_none_is_named_with_its_object(rope: dict[str, Any], name: str) -> None:
    if name in rope:
        with pytest.raises(InputError, match="must be a .*number .*is 0$") as caught:
            shape_of(rope_scaling={**rope, name: 0})
        assert caught.value.field == f"rope_scaling.{name}"


def test_a_llama3_rope_whose_bounds_are_crossed_is_refused() -> None:
    with pytest.raises(InputError, match=r"rope_scaling.high_freq_factor: must be above low_freq_factor \(1\), is 0.5"):
        shape_of(rope_scaling={**LLAMA3_ROPE, "high_freq_factor": 0.5})


def test_ropes_that_scale_differently_are_refused() -> None:
    with pytest.raises(InputError, match="rope_scaling: must be the same in rope_parameters and rope_scaling"):
        shape_of(rope_scaling=YARN_ROPE, rope_parameters={**YARN_ROPE, "factor": 2.0})
    assert shape_of(rope_scaling=YARN_ROPE, rope_parameters=YARN_ROPE).rope_scaling == OF_YARN


def test_yarn_reaches_beyond_max_position_embeddings_and_other_ropes_do_not() -> None:
    assert shape_of(rope_scaling=YARN_ROPE).max_model_len == 4 * 4096
    assert shape_of(rope_scaling={**YARN_ROPE, "factor": 1.5}).max_model_len == 8192
    assert shape_of(rope_scaling=LLAMA3_ROPE).max_model_len == 8192
    assert shape_of(rope_scaling={"type": "linear", "factor": 4.0}).max_model_len == 8192


def test_two_thetas_that_disagree_are_refused() -> None:
    with pytest.raises(
        InputError, match="rope_theta: must be one number .* rope_theta 100000, rope_parameters.rope_th"
    ):
        shape_of(rope_parameters=DEFAULT_ROPE)


def test_a_theta_in_rope_parameters_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="rope_theta: must be a number above 0"):
        shape_of(rope_theta=..., rope_parameters={"rope_theta": -1})


def test_heads_that_do_not_divide_the_hidden_size_need_a_head_dim() -> None:
    with pytest.raises(InputError, match="head_dim: must be in config.json: 9 heads do not divide 577"):
        shape_of(head_dim=..., hidden_size=577)


# ---- Qwen2, Qwen3 --------------------------------------------------------------------------------------------------

QWEN2 = {
    **CONFIG,
    "architectures": ["Qwen2ForCausalLM"],
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "use_sliding_window": False,
    "use_mrope": False,
}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "rope_scaling": None}


def test_qwen2_is_a_llama_with_biases_and_qwen3_one_with_normed_heads() -> None:
    llama = shape_of(rope_theta=1e6)
    assert ModelShape.from_config(QWEN2) == replace(llama, architecture="Qwen2ForCausalLM", has_qkv_bias=True)
    assert ModelShape.from_config(QWEN3) == replace(llama, architecture="Qwen3ForCausalLM", has_head_norms=True)


def test_without_a_head_dim_qwen3s_is_128() -> None:
    without = {field: value for field, value in QWEN3.items() if field != "head_dim"}
    assert ModelShape.from_config(without).head_dim == 128


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config, Qwen3MoeConfig])
def test_a_qwen_written_by_transformers_is_understood(
    config_class: type[Qwen2Config | Qwen3Config | Qwen3MoeConfig],
) -> None:
    architecture = config_class.__name__.replace("Config", "ForCausalLM")
    config = config_class(
        architectures=[architecture],
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=4,
        rope_parameters=dict(YARN_ROPE),
    )
    shape = ModelShape.from_config(config.to_dict())
    assert (shape.rope_theta, shape.head_dim, shape.num_kv_heads) == (1e4, 128, 4)
    assert shape.rope_scaling == OF_YARN


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("use_sliding_window", True),
        ("layer_types", ["full_attention"] * 29),
        ("layer_types", ["full_attention"] * 29 + ["sliding_attention"]),
        ("hidden_act", "gelu"),
        ("use_mrope", True),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
    ],
)
def test_a_field_of_qwen_that_makes_another_model_is_named(config: dict[str, Any], field: str, wrong: object) -> None:
    with pytest.raises(InputError, match="must be absent") as caught:
        ModelShape.from_config({**config, field: wrong})
    assert caught.value.field == field


def test_a_qwen3_with_biases_is_refused() -> None:
    with pytest.raises(InputError, match="attention_bias: must be absent or False"):
        ModelShape.from_config({**QWEN3, "attention_bias": True})


# ---- Qwen3-MoE -----------------------------------------------------------------------------------------------------

QWEN3_MOE: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}


def experts_of(**changes: Any) -> Experts | None:
    """`...` takes a field out."""
    config = {**QWEN3_MOE, **changes}
    return ModelShape.from_config({field: value for field, value in config.items() if value is not ...}).experts


def test_a_qwen3_moe_is_a_qwen3_with_experts() -> None:
    experts = Experts(layers=tuple(range(30)), num_experts=128, num_chosen=8, intermediate_size=768, renormalised=True)
    dense = ModelShape.from_config(QWEN3)
    assert dense.experts is None
    expected = replace(dense, architecture="Qwen3MoeForCausalLM", experts=experts)
    assert ModelShape.from_config(QWEN3_MOE) == expected
    assert experts_of(num_experts=..., num_local_experts=128) == experts


def test_what_a_qwen3_moe_does_not_say_is_as_transformers_has_it() -> None:
    silent = experts_of(decoder_sparse_step=..., mlp_only_layers=..., norm_topk_prob=...)
    assert silent is not None and silent.layers == tuple(range(30)) and not silent.renormalised


def test_every_so_many_layers_have_experts_without_those_that_are_named() -> None:
    experts = experts_of(decoder_sparse_step=4, mlp_only_layers=[7, 8])
    assert experts is not None and experts.layers == (3, 11, 15, 19, 23, 27)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok: must be at most num_experts \(128\) .*, is 129"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok: must be a whole number of at least 1"),
        ({"num_experts": ...}, "num_experts: must be a whole number of at least 1 in config.json, is missing"),
        ({"num_local_experts": 64}, "num_experts: must be one number .*, is num_experts 128, num_local_experts 64"),
        ({"moe_intermediate_size": ...}, "moe_intermediate_size: must be a whole number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: must be true or false"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: must be a whole number of at least 1"),
        ({"mlp_only_layers": [30]}, r"mlp_only_layers: must be a list of layers in 0..29 .*, is \[30\]"),
        ({"mlp_only_layers": 3}, "mlp_only_layers: must be a list of layers"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size: must be absent or 0"),
        ({"qkv_bias": True}, "qkv_bias: must be absent or False"),
        ({"use_qk_norm": False}, "use_qk_norm: must be absent or True"),
        ({"use_sliding_window": True}, "use_sliding_window: must be absent or False"),
    ],
)  # fmt: skip
def test_experts_that_are_not_computed_are_refused_by_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        experts_of(**changes)


# ---- Gemma 3 -------------------------------------------------------------------------------------------------------

KINDS = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "_sliding_window_pattern": 6,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": KINDS * 3,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}
"""As it was published."""

LOCAL = LocalAttention(layers=tuple(number for number in range(18) if number % 6 != 5), window=512, rope_theta=1e4)


def gemma3_of(**changes: Any) -> ModelShape:
    """Of GEMMA3 with these fields changed; `...` takes a field out."""
    return ModelShape.from_config({field: value for field, value in {**GEMMA3, **changes}.items() if value is not ...})


def ropes(local: float = 1e4, everywhere: float = 1e6) -> dict[str, Any]:
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
        "full_attention": {"rope_type": "default", "rope_theta": everywhere},
    }


def test_every_number_of_gemma3_is_the_configurations() -> None:
    assert gemma3_of() == ModelShape(
        architecture="Gemma3ForCausalLM",
        num_layers=18,
        hidden_size=640,
        intermediate_size=2048,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        vocab_size=262144,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        attention_scale=1 / 16,
        has_head_norms=True,
        local_attention=LOCAL,
        max_model_len=32768,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_ids=(1,),
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"layer_types": ...}, {"local_attention": LOCAL}, id="every sixth layer"),
        pytest.param({"layer_types": KINDS[3:] * 6}, {"local_attention": LocalAttention(
            layers=tuple(number for number in range(18) if number % 3 != 2), window=512, rope_theta=1e4)},
            id="layers in a list"),
        pytest.param({"layer_types": None, "sliding_window_pattern": 9}, {"local_attention": LocalAttention(
            layers=tuple(number for number in range(18) if number not in (8, 17)), window=512, rope_theta=1e4)},
            id="every ninth layer"),
        pytest.param({"layer_types": KINDS[5:] * 18, "sliding_window": None}, {"local_attention": None},
                     id="no layer with a window"),
        pytest.param({"query_pre_attn_scalar": 168}, {"attention_scale": 168**-0.5}, id="a scale of its own"),
        pytest.param({"query_pre_attn_scalar": ..., "head_dim": ...}, {"attention_scale": 1 / 16, "head_dim": 256},
                     id="the family's head_dim"),
        pytest.param({"tie_word_embeddings": False}, {"tie_word_embeddings": False}, id="untied"),
        pytest.param({"rope_theta": ..., "rope_local_base_freq": ...},
                     {"rope_theta": 1e6, "local_attention": LOCAL}, id="the family's bases"),
        pytest.param({"rope_theta": ..., "rope_local_base_freq": ..., "rope_parameters": ropes(7.0, 9.0)},
                     {"rope_theta": 9.0, "local_attention": LocalAttention(
                         layers=LOCAL.layers, window=512, rope_theta=7.0)}, id="bases in the new form"),
        pytest.param({"rope_parameters": ropes()}, {"rope_theta": 1e6, "local_attention": LOCAL}, id="in both, equal"),
    ],
)  # fmt: skip
def test_what_gemma3_leaves_out_is_the_familys(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = gemma3_of(**fields)
    assert {field: getattr(shape, field) for field in expected} == expected


def test_a_gemma3_configuration_written_by_transformers_is_understood() -> None:
    config = Gemma3TextConfig(architectures=["Gemma3ForCausalLM"], num_hidden_layers=7, sliding_window=33)
    shape = ModelShape.from_config(config.to_dict())
    assert shape.local_attention == LocalAttention(layers=(0, 1, 2, 3, 4, 6), window=33, rope_theta=1e4)
    assert (shape.rope_theta, shape.head_dim, shape.attention_scale) == (1e6, 256, 1 / 16)


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        pytest.param("final_logit_softcapping", 30.0, "must be absent", id="softcapping of logits"),
        pytest.param("attn_logit_softcapping", 50.0, "must be absent", id="softcapping of attention"),
        pytest.param("use_bidirectional_attention", True, "absent or False", id="an encoder"),
        pytest.param("attention_bias", True, "absent or False", id="attention bias"),
        pytest.param("hidden_activation", "silu", "'gelu_pytorch_tanh'", id="activation"),
        pytest.param("query_pre_attn_scalar", 0, "a number above 0", id="no scale"),
        pytest.param("sliding_window", None, "is missing", id="no window"),
        pytest.param("sliding_window", 0, "at least 1", id="an empty window"),
        pytest.param("layer_types", KINDS, r"a list of 18 \(num_hidden_layers\)", id="too few kinds"),
        pytest.param("layer_types", ["chunked_attention"] * 18, "of full_attention and sliding", id="another kind"),
        pytest.param("layer_types", [[]] * 18, "of full_attention and sliding", id="kinds that are none"),
        pytest.param("rope_scaling", {"rope_type": "linear", "factor": 8.0}, "'default', the only", id="old scaling"),
        pytest.param("rope_parameters", DEFAULT_ROPE, "object of full_attention and sliding", id="one for all layers"),
        pytest.param("rope_parameters", [1], "object of full_attention and sliding", id="a list of parameters"),
    ],
)
def test_a_field_of_gemma3_that_is_wrong_or_not_known_is_named(field: str, wrong: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        gemma3_of(**{field: wrong})
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_scaled_angles_of_one_kind_of_layers_are_refused(kind: str) -> None:
    scaled = {**ropes(), kind: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    with pytest.raises(InputError, match="'default', the only") as caught:
        gemma3_of(rope_parameters=scaled)
    assert caught.value.field == f"rope_parameters.{kind}"


def test_bases_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match="rope_local_base_freq: must be one number .* 10000, rope_parameters.slid"):
        gemma3_of(rope_parameters=ropes(local=7.0))
    with pytest.raises(InputError, match="rope_theta: must be one number"):
        gemma3_of(rope_parameters=ropes(everywhere=7.0))


# ---- weights in few bits -------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
OF_DEEPSEEK_V31 = {**FP8, "scale_fmt": "ue8m0"}
OF_QWEN = {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}
OF_TRANSFORMERS = {field: FP8[field] for field in ("quant_method", "weight_block_size")}


@pytest.mark.parametrize(
    "quantization", [FP8, OF_DEEPSEEK_V31, OF_QWEN, OF_TRANSFORMERS], ids=["", "V3.1", "Qwen", "short"]
)
@pytest.mark.parametrize("config", [CONFIG, QWEN2, QWEN3, GEMMA3], ids=["Llama", "Qwen2", "Qwen3", "Gemma 3"])
def test_blocks_of_fp8_are_known_in_every_family(config: dict[str, Any], quantization: dict[str, Any]) -> None:
    plain = ModelShape.from_config(config)
    assert plain.weight_block_size is None
    shape = ModelShape.from_config({**config, "quantization_config": quantization})
    assert shape == replace(plain, weight_block_size=(128, 128))


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        pytest.param({"quant_method": "awq"}, "quant_method", "must be 'fp8' .*the only .*is 'awq'", id="awq"),
        pytest.param({"quant_method": "gptq"}, "quant_method", "must be 'fp8' .*is 'gptq'", id="gptq"),
        pytest.param({"quant_method": "compressed-tensors"}, "quant_method", "'compressed-tensors'", id="compressed"),
        pytest.param({"quant_method": "fbgemm_fp8"}, "quant_method", "is 'fbgemm_fp8'", id="FP8 by rows"),
        pytest.param({"quant_method": None}, "quant_method", "must be 'fp8' .*is missing", id="no method"),
        pytest.param({"fmt": "e5m2"}, "fmt", "must be absent or 'e4m3' .*is 'e5m2'", id="another FP8"),
        pytest.param({"activation_scheme": "static"}, "activation_scheme", "or 'dynamic' .*is 'static'", id="static"),
        pytest.param(
            {"weight_block_size": None}, "weight_block_size", r"as \[128, 128\], .*is missing", id="no blocks"
        ),
        pytest.param({"weight_block_size": 128}, "weight_block_size", "must be a list .*is 128", id="a number"),
        pytest.param({"weight_block_size": [128]}, "weight_block_size", r"rows and columns .*is \[128\]", id="one"),
        pytest.param({"weight_block_size": [128, 0]}, "weight_block_size", r"is \[128, 0\]", id="empty blocks"),
        pytest.param({"weight_block_size": [128, True]}, "weight_block_size", r"is \[128, True\]", id="true blocks"),
    ],
)
def test_weights_in_another_form_are_refused_by_its_name(changes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        shape_of(quantization_config={**FP8, **changes})
    assert caught.value.field == f"quantization_config.{field}"


def test_a_quantization_that_is_no_object_is_refused() -> None:
    with pytest.raises(InputError, match="quantization_config: must be an object in config.json, is 'fp8'"):
        shape_of(quantization_config="fp8")
