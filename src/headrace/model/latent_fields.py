"""What a config.json says of latent attention, DeepSeek's: keys and values of all heads are made from one short vector
of each token, its latent, and the KV cache holds that. Pure.

Owns its numbers, and what is refused of them; `family_fields` says which families attend so.
"""

from dataclasses import dataclass

from headrace.errors import InputError
from headrace.model.config_fields import Config, count, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """A head's query and key are a part that stays as it is, and one that turns with the position; the turned key is
    the same for all heads, and is kept beside the latent."""

    q_rank: int | None  # of the vector that queries are made from; None: from the hidden state itself
    kv_rank: int  # of the latent
    nope_dim: int  # of queries and keys, what stays
    rope_dim: int  # of them, what turns
    value_dim: int
    interleaved: bool  # in the checkpoint: dimension 2i turns with 2i + 1, not i with i + rope_dim / 2

    @property
    def head_dim(self) -> int:
        """Of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Of what the KV cache holds of a token in a layer."""
        return self.kv_rank + self.rope_dim


def latent_attention(config: Config) -> LatentAttention:
    rope_dim, num_heads = count(config, "qk_rope_head_dim"), count(config, "num_attention_heads")
    if rope_dim % 2:
        raise InputError("qk_rope_head_dim", f"must be even, so that its pairs turn, is {rope_dim}")
    _require_if_there(config, "head_dim", rope_dim, "qk_rope_head_dim")  # transformers writes it so
    _require_if_there(config, "num_key_value_heads", num_heads, "num_attention_heads")
    return LatentAttention(
        q_rank=None if config.get("q_lora_rank") is None else count(config, "q_lora_rank"),
        kv_rank=count(config, "kv_lora_rank"),
        nope_dim=count(config, "qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=count(config, "v_head_dim"),
        interleaved=flag(config, "rope_interleave"),
    )


def _require_if_there(config: Config, field: str, right: int, source: str) -> None:
    if config.get(field) not in (None, right):
        raise InputError(field, f"must be absent or {source} ({right}) in config.json, is {config[field]!r}")
