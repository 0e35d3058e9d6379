"""What a model's config.json says, as numbers that planner, gateway and engine share. Pure.

Owns the list of families that are known: an unknown architecture is refused by name, and so is every field whose value
would change what is computed in a way that we do not compute. Reads no file: `checkpoint` does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype, KVLayout
from headrace.model.config_fields import Config, count, flag, positive, require_known, rope_theta, said, token_ids
from headrace.model.rope import ROPE_TYPES, RopeScaling, YarnScaling, rope_scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAttention:
    """The layers whose tokens see the last `window` tokens only, their own included; they turn by another base."""

    layers: tuple[int, ...]
    window: int
    rope_theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of one decoder-only model. `head_dim` need not be hidden_size / num_heads."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    attention_scale: float  # of products of queries and keys
    rope_scaling: RopeScaling | None = None
    has_qkv_bias: bool = False  # a bias on queries, keys and values
    has_head_norms: bool = False  # an rms-norm of each head's query and key, before they turn
    local_attention: LocalAttention | None = None  # None: every layer sees everything
    max_model_len: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # each ends a generation; none where the configuration names none

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Of a Hugging Face config.json. Raises InputError, naming its field, for whatever is wrong or not known."""
        architecture = _architecture(config)
        family = _FAMILIES[architecture]
        config = {**family.defaults, **{field: value for field, value in config.items() if value is not None}}
        require_known(config, family.known_values)
        hidden_size, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        num_layers, vocab_size = count(config, "num_hidden_layers"), count(config, "vocab_size")
        head_dim = _head_dim(config, hidden_size, num_heads)
        attention = family.attention(config, num_layers, head_dim)
        bos_token_ids = token_ids(config, "bos_token_id", vocab_size)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=count(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(config, num_heads),
            head_dim=head_dim,
            vocab_size=vocab_size,
            rope_theta=attention.rope_theta,
            rms_norm_eps=positive(config, "rms_norm_eps"),
            attention_scale=attention.scale,
            rope_scaling=attention.rope_scaling,
            has_qkv_bias=family.has_qkv_bias,
            has_head_norms=family.has_head_norms,
            local_attention=attention.local,
            max_model_len=_max_model_len(config, attention.rope_scaling),
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            eos_token_ids=token_ids(config, "eos_token_id", vocab_size),
        )

    def kv_layout(self, page_size: int, dtype: KVDtype) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            page_size=page_size,
            head_dim=self.head_dim,
            dtype=dtype,
        )


def _architecture(config: Config) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError("architectures", f"must be a list of one in config.json, known are {known}; {said(named)}")
    return str(named[0])


def _num_kv_heads(config: Config, num_heads: int) -> int:
    field = "num_key_value_heads"
    if config.get(field) is None:
        return num_heads
    num_kv_heads = count(config, field)
    if num_heads % num_kv_heads:
        raise InputError(field, f"must divide num_attention_heads ({num_heads}) in config.json, is {num_kv_heads}")
    return num_kv_heads


def _head_dim(config: Config, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = count(config, "head_dim")
    elif hidden_size % num_heads:
        raise InputError("head_dim", f"must be in config.json: {num_heads} heads do not divide {hidden_size}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise InputError("head_dim", f"must be even, so that rotary positions turn its halves, is {head_dim}")
    return head_dim


def _max_model_len(config: Config, scaling: RopeScaling | None) -> int:
    """Who turns YaRN on leaves max_position_embeddings as it was, and reaches `factor` times as far as in training."""
    told = count(config, "max_position_embeddings")
    return max(told, int(scaling.factor * scaling.original_len)) if isinstance(scaling, YarnScaling) else told


# ---- families ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionFields:
    rope_theta: float
    scale: float
    rope_scaling: RopeScaling | None = None
    local: LocalAttention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """`defaults`: what fields mean that are absent or null; `known_values`: fields that have one of these values or
    none, any other would make another model; `attention`: of configuration, number of layers and head_dim; the rest as
    in the shape."""

    defaults: Mapping[str, object]
    known_values: Mapping[str, tuple[object, ...]]
    attention: Callable[[Config, int, int], _AttentionFields]
    has_qkv_bias: bool = False
    has_head_norms: bool = False


def _llama_attention(config: Config, num_layers: int, head_dim: int) -> _AttentionFields:
    # The first two generations were trained with 10,000; their configurations do not say it.
    ropes = {field: config.get(field) for field in ("rope_parameters", "rope_scaling")}  # new, old
    theta = rope_theta(config, "rope_theta", ropes, 10_000.0)
    scaling = rope_scaling(config, ropes, known=ROPE_TYPES)
    return _AttentionFields(rope_theta=theta, scale=head_dim**-0.5, rope_scaling=scaling)


def _qwen_attention(config: Config, num_layers: int, head_dim: int) -> _AttentionFields:
    kinds = config.get("layer_types")
    if kinds is not None and kinds != [_FULL] * num_layers:
        right = f"{num_layers} (num_hidden_layers) of {_FULL}, the only that is known"
        raise InputError("layer_types", f"must be absent or a list of {right} in config.json, is {kinds!r}")
    return _llama_attention(config, num_layers, head_dim)


def _gemma3_attention(config: Config, num_layers: int, head_dim: int) -> _AttentionFields:
    ropes = config.get("rope_parameters", {})
    if not isinstance(ropes, Mapping) or not set(ropes) <= {_FULL, _SLIDING}:
        raise InputError("rope_parameters", f"must be an object of {_FULL} and {_SLIDING} in config.json, is {ropes!r}")
    old, full, sliding = config.get("rope_scaling"), ropes.get(_FULL), ropes.get(_SLIDING)
    everywhere, local = (
        {f"rope_parameters.{_FULL}": full, "rope_scaling": old},
        {f"rope_parameters.{_SLIDING}": sliding},
    )
    rope_scaling(config, {**everywhere, **local}, known=("default",))
    return _AttentionFields(
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
    "quantization_config": (),
}

_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(
        defaults={},
        known_values={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "partial_rotary_factor": (1,),
            "original_max_position_embeddings": (),
            "sliding_window": (),
            "quantization_config": (),
        },
        attention=_llama_attention,
    ),
    "Qwen2ForCausalLM": _Family(defaults={}, known_values=_QWEN_VALUES, attention=_qwen_attention, has_qkv_bias=True),
    "Qwen3ForCausalLM": _Family(
        defaults={"head_dim": 128},
        known_values={**_QWEN_VALUES, "attention_bias": (False,)},
        attention=_qwen_attention,
        has_head_norms=True,
    ),
    "Gemma3ForCausalLM": _Family(
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
            "quantization_config": (),
        },
        attention=_gemma3_attention,
        has_head_norms=True,
    ),
}

ARCHITECTURES = tuple(_FAMILIES)
