"""What a model's config.json says, as numbers that planner, gateway and engine share. Pure.

Owns what all families have; `family_fields` knows each by itself. An unknown architecture is refused by name, and so is
every field whose value would change what is computed in a way that we do not compute. Reads no file: `checkpoint` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype, KVLayout
from headrace.model.config_fields import Config, count, flag, positive, require_known, said, token_ids
from headrace.model.expert_fields import Experts
from headrace.model.family_fields import FAMILY_FIELDS, LocalAttention
from headrace.model.latent_fields import LatentAttention
from headrace.model.quantization import weight_block_size
from headrace.model.rope import RopeScaling, YarnScaling

ARCHITECTURES = tuple(FAMILY_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of one decoder-only model. `head_dim`, of queries and keys, need not be hidden_size / num_heads; with
    `latent` attention there is one KV head, the latent that all heads see."""

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
    weight_block_size: tuple[int, int] | None = None  # rows and columns of FP8 weights that share a scale
    experts: Experts | None = None  # None: every layer has one MLP, of intermediate_size
    latent: LatentAttention | None = None  # None: pages hold each KV head's keys and values
    num_mtp_layers: int = 0  # behind the others, for drafts: nothing is computed with them
    head_rows: int | None = None  # of a rank's part of the head; None: all of vocab_size
    max_model_len: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # each ends a generation; none where the configuration names none

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Of a Hugging Face config.json. Raises InputError, naming its field, for whatever is wrong or not known."""
        architecture = _architecture(config)
        family = FAMILY_FIELDS[architecture]
        config = {**family.defaults, **{field: value for field, value in config.items() if value is not None}}
        require_known(config, family.known_values)
        hidden_size, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        num_layers, vocab_size = count(config, "num_hidden_layers"), count(config, "vocab_size")
        latent = family.latent(config) if family.latent else None
        head_dim = latent.head_dim if latent else _head_dim(config, hidden_size, num_heads)
        attention = family.attention(config, num_layers, head_dim)
        bos_token_ids = token_ids(config, "bos_token_id", vocab_size)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=count(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=1 if latent else _num_kv_heads(config, num_heads),
            head_dim=head_dim,
            vocab_size=vocab_size,
            rope_theta=attention.rope_theta,
            rms_norm_eps=positive(config, "rms_norm_eps"),
            attention_scale=attention.scale,
            rope_scaling=attention.rope_scaling,
            has_qkv_bias=family.has_qkv_bias,
            has_head_norms=family.has_head_norms,
            local_attention=attention.local,
            weight_block_size=weight_block_size(config),
            experts=family.experts(config, num_layers) if family.experts else None,
            latent=latent,
            num_mtp_layers=count(config, "num_nextn_predict_layers", least=0) if family.has_mtp_layers else 0,
            max_model_len=_max_model_len(config, attention.rope_scaling),
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            bos_token_id=bos_token_ids[0] if bos_token_ids else None,
            eos_token_ids=token_ids(config, "eos_token_id", vocab_size),
        )

    @property
    def rotary_dim(self) -> int:
        """Of a head's query and key, what turns."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def head_size(self) -> int:
        """Tokens whose logits are computed."""
        return self.head_rows or self.vocab_size

    def kv_layout(self, page_size: int, dtype: KVDtype) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            page_size=page_size,
            head_dim=self.latent.width if self.latent else self.head_dim,
            dtype=dtype,
            kind="mla" if self.latent else "gqa",
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
