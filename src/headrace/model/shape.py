"""What a model's config.json says, as numbers that planner, gateway and engine share. Pure.

Owns the list of families that are known: an unknown architecture is refused by name, and so is every field whose value
would change what is computed in a way that we do not compute. Reads no file: `checkpoint` does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype, KVLayout

ARCHITECTURES = ("LlamaForCausalLM",)

LLAMA_ROPE_THETA = 10_000.0
"""What the first two generations of Llama were trained with; their configurations do not say it."""

_ONLY_KNOWN: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "sliding_window": (),
    "quantization_config": (),
}
"""Fields that may be absent or null, or have one of these values; any other would make another model."""


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
    max_model_len: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # each ends a generation; none where the configuration names none

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Of a Hugging Face config.json. Raises InputError, naming its field, for whatever is wrong or not known."""
        architecture = _architecture(config)
        for field, known in _ONLY_KNOWN.items():
            if config.get(field) is not None and config[field] not in known:
                right = " or ".join(["absent", *(f"{value!r}" for value in known)])
                raise InputError(field, f"must be {right} in config.json, the only that is known, is {config[field]!r}")
        hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        vocab_size = _count(config, "vocab_size")
        bos_token_ids = _token_ids(config, "bos_token_id", vocab_size)
        return cls(
            architecture=architecture,
            num_layers=_count(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(config, num_heads),
            head_dim=_head_dim(config, hidden_size, num_heads),
            vocab_size=vocab_size,
            rope_theta=_rope_theta(config),
            rms_norm_eps=_positive(config, "rms_norm_eps"),
            max_model_len=_count(config, "max_position_embeddings"),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            eos_token_ids=_token_ids(config, "eos_token_id", vocab_size),
        )

    def kv_layout(self, page_size: int, dtype: KVDtype) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            page_size=page_size,
            head_dim=self.head_dim,
            dtype=dtype,
        )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError("architectures", f"must be a list of one in config.json, known are {known}; {_is(named)}")
    return str(named[0])


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    field = "num_key_value_heads"
    if config.get(field) is None:
        return num_heads
    num_kv_heads = _count(config, field)
    if num_heads % num_kv_heads:
        raise InputError(field, f"must divide num_attention_heads ({num_heads}) in config.json, is {num_kv_heads}")
    return num_kv_heads


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim")
    elif hidden_size % num_heads:
        raise InputError("head_dim", f"must be in config.json: {num_heads} heads do not divide {hidden_size}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise InputError("head_dim", f"must be even, so that rotary positions turn its halves, is {head_dim}")
    return head_dim


def _rope_theta(config: Mapping[str, Any]) -> float:
    """It stands at the top (old) or in rope_parameters (new), sometimes in both: then they must agree."""
    found = {"rope_theta": _positive(config, "rope_theta")} if config.get("rope_theta") is not None else {}
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise InputError(field, f"must be an object in config.json, is {rope!r}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        surplus = set(rope) - {"rope_type", "type", "rope_theta"}
        if kind != "default" or surplus:
            raise InputError(field, f"must have rope_type 'default', the only one known, and no factors, is {rope!r}")
        if rope.get("rope_theta") is not None:
            found[f"{field}.rope_theta"] = _positive(rope, "rope_theta")
    if len(set(found.values())) > 1:
        said = ", ".join(f"{field} {theta:g}" for field, theta in found.items())
        raise InputError("rope_theta", f"must be one number in config.json, is {said}")
    return next(iter(found.values()), LLAMA_ROPE_THETA)


def _token_ids(config: Mapping[str, Any], field: str, vocab_size: int) -> tuple[int, ...]:
    value = config.get(field)
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise InputError(field, f"must be in 0..{vocab_size - 1} in config.json, or a list of such, is {value!r}")
    return ids


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if type(value) is not int or value < 1:
        raise InputError(field, f"must be a whole number of at least 1 in config.json, {_is(value)}")
    return value


def _positive(config: Mapping[str, Any], field: str) -> float:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(field, f"must be a number above 0 in config.json, {_is(value)}")
    return float(value)


def _flag(config: Mapping[str, Any], field: str) -> bool:
    """False where the configuration says nothing, as in the family's own definition."""
    value = config.get(field)
    if value is not None and type(value) is not bool:
        raise InputError(field, f"must be true or false in config.json, is {value!r}")
    return bool(value)


def _is(value: object) -> str:
    return "is missing" if value is None else f"is {value!r}"
