"""What a config.json says in each family's own way: how it attends and turns, and what would make another model. Pure.

Owns the table of families, one entry each; `families` has the same ones with torch. Fields that all families have are
`shape`'s.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.errors import InputError
from headrace.model.config_fields import Config, count, positive, rope_theta
from headrace.model.expert_fields import Experts, deepseek_v2_experts, deepseek_v3_experts, experts
from headrace.model.latent_fields import LatentAttention, latent_attention
from headrace.model.rope import ROPE_TYPES, RopeScaling, YarnScaling, rope_scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAttention:
    """The layers whose tokens see the last `window` tokens only, their own included; they turn by another base."""

    layers: tuple[int, ...]
    window: int
    rope_theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFields:
    rope_theta: float
    scale: float
    rope_scaling: RopeScaling | None = None
    local: LocalAttention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFields:
    """`defaults`: what fields mean that are absent or null; `known_values`: fields that have one of these values or
    none, any other would make another model; `attention`: of configuration, number of layers and head_dim; `experts`:
    of configuration and number of layers; `latent`: where all heads' keys and values come from; the rest as in the
    shape."""

    defaults: Mapping[str, object]
    known_values: Mapping[str, tuple[object, ...]]
    attention: Callable[[Config, int, int], AttentionFields]
    has_qkv_bias: bool = False
    has_head_norms: bool = False
    has_mtp_layers: bool = False
    experts: Callable[[Config, int], Experts] | None = None
    latent: Callable[[Config], LatentAttention] | None = None


def _llama_attention(config: Config, num_layers: int, head_dim: int) -> AttentionFields:
    # The first two generations were trained with 10,000; their configurations do not say it.
    ropes = {field: config.get(field) for field in ("rope_parameters", "rope_scaling")}  # new, old
    theta = rope_theta(config, "rope_theta", ropes, 10_000.0)
    scaling = rope_scaling(config, ropes, known=ROPE_TYPES)
    return AttentionFields(rope_theta=theta, scale=head_dim**-0.5, rope_scaling=scaling)


def _qwen_attention(config: Config, num_layers: int, head_dim: int) -> AttentionFields:
    kinds = config.get("layer_types")
    if kinds is not None and kinds != [_FULL] * num_layers:
        right = f"{num_layers} (num_hidden_layers) of {_FULL}, the only that is known"
        raise InputError("layer_types", f"must be absent or a list of {right} in config.json, is {kinds!r}")
    return _llama_attention(config, num_layers, head_dim)


def _deepseek_attention(config: Config, num_layers: int, head_dim: int) -> AttentionFields:
    ropes = {field: config.get(field) for field in ("rope_parameters", "rope_scaling")}
    scaling = rope_scaling(config, ropes, known=("default", "yarn"), mscales=True)
    factor = scaling.scores_factor if isinstance(scaling, YarnScaling) else 1.0
    theta = rope_theta(config, "rope_theta", ropes, 10_000.0)
    return AttentionFields(rope_theta=theta, scale=head_dim**-0.5 * factor, rope_scaling=scaling)


def _gemma3_attention(config: Config, num_layers: int, head_dim: int) -> AttentionFields:
    ropes = config.get("rope_parameters", {})
    if not isinstance(ropes, Mapping) or not set(ropes) <= {_FULL, _SLIDING}:
        raise InputError("rope_parameters", f"must be an object of {_FULL} and {_SLIDING} in config.json, is {ropes!r}")
    old, full, sliding = config.get("rope_scaling"), ropes.get(_FULL), ropes.get(_SLIDING)
    everywhere = {f"rope_parameters.{_FULL}": full, "rope_scaling": old}
    local = {f"rope_parameters.{_SLIDING}": sliding}
    rope_scaling(config, {**everywhere, **local}, known=("default",))
    return AttentionFields(
        rope_theta=rope_theta(config, "rope_theta", everywhere, 1e6),
        scale=positive(config, "query_pre_attn_scalar") ** -0.5,
        local=_local_attention(config, num_layers, local),
    )


def _local_attention(config: Config, num_layers: int, ropes: Mapping[str, object]) -> LocalAttention | None:
    layers = tuple(number for number, kind in enumerate(_layer_types(config, num_layers)) if kind == _SLIDING)
    if not layers:
        return None
    theta = rope_theta(config, "rope_local_base_freq", ropes, 1e4)
    return LocalAttention(layers=layers, window=count(config, "sliding_window"), rope_theta=theta)


def _layer_types(config: Config, num_layers: int) -> list[str]:
    """In a list, or in the older form: every so many layers one sees everything."""
    field = "layer_types"
    kinds = config.get(field)
    if kinds is None:
        every = count(config, "sliding_window_pattern")
        return [_SLIDING if number % every else _FULL for number in range(1, num_layers + 1)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in (_FULL, _SLIDING) for kind in kinds):
        right = f"{num_layers} (num_hidden_layers) of {_FULL} and {_SLIDING}"
        raise InputError(field, f"must be a list of {right} in config.json, is {kinds!r}")
    return kinds


_FULL, _SLIDING = "full_attention", "sliding_attention"

_QWEN_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "original_max_position_embeddings": (),
    "use_sliding_window": (False,),  # where it is off, sliding_window and max_window_layers mean nothing
    "use_mrope": (False,),
    "dual_chunk_attention_config": (),
}

_DEEPSEEK_DEFAULTS: Mapping[str, object] = {"moe_layer_freq": 1, "rope_interleave": True}
_DEEPSEEK_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
}

FAMILY_FIELDS: Mapping[str, FamilyFields] = {
    "LlamaForCausalLM": FamilyFields(
        defaults={},
        known_values={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "partial_rotary_factor": (1,),
            "original_max_position_embeddings": (),
            "sliding_window": (),
        },
        attention=_llama_attention,
    ),
    "Qwen2ForCausalLM": FamilyFields(
        defaults={}, known_values=_QWEN_VALUES, attention=_qwen_attention, has_qkv_bias=True
    ),
    "Qwen3ForCausalLM": FamilyFields(
        defaults={"head_dim": 128},
        known_values={**_QWEN_VALUES, "attention_bias": (False,)},
        attention=_qwen_attention,
        has_head_norms=True,
    ),
    "Qwen3MoeForCausalLM": FamilyFields(
        defaults={"decoder_sparse_step": 1, "mlp_only_layers": []},
        known_values={
            **_QWEN_VALUES,
            "attention_bias": (False,),
            "qkv_bias": (False,),
            "use_qk_norm": (True,),
            "shared_expert_intermediate_size": (0,),
        },
        attention=_qwen_attention,
        has_head_norms=True,
        experts=experts,
    ),
    "DeepseekV2ForCausalLM": FamilyFields(
        defaults={**_DEEPSEEK_DEFAULTS, "topk_method": "greedy"},
        known_values={
            **_DEEPSEEK_VALUES,
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),  # true in none that was published, and implementations differ
            "rope_interleave": (True,),
            "num_nextn_predict_layers": (0,),
        },
        attention=_deepseek_attention,
        experts=deepseek_v2_experts,
        latent=latent_attention,
    ),
    "DeepseekV3ForCausalLM": FamilyFields(
        defaults={**_DEEPSEEK_DEFAULTS, "num_nextn_predict_layers": 0},
        known_values={**_DEEPSEEK_VALUES, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
        attention=_deepseek_attention,
        experts=deepseek_v3_experts,
        latent=latent_attention,
        has_mtp_layers=True,
    ),
    "Gemma3ForCausalLM": FamilyFields(
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        known_values={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False,),
            "use_bidirectional_attention": (False,),
            "attn_logit_softcapping": (),
            "final_logit_softcapping": (),
        },
        attention=_gemma3_attention,
        has_head_norms=True,
    ),
}
