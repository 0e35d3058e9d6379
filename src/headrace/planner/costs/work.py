"""What a step of a model has to do, from its shape: bytes that are read, operations, bytes that ranks exchange. Pure.

Of a mixture the experts that nobody chose are not read: how many are, follows from the number of tokens, as if each
chose its own at random.
"""

from dataclasses import dataclass

from headrace.model.shape import ModelShape

OPERATIONS = 2
"""Of each weight and token: a product and a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of a whole model; bytes as its weights and KV are held. `token_weights`: that every token is multiplied with,
    without the head and the experts. `expert_weights`: of one expert in one layer. `pair_operations`: of a token and a
    key that it sees in a chunk, in all layers; `row_pair_operations`: of a row's token, which reads a latent as it is.
    `key_bytes`: of a token, in all layers; so many ranks at most read a part of it each."""

    num_layers: int
    hidden_size: int
    token_weights: int
    head_weights: int
    expert_weights: int
    num_experts: int
    num_chosen: int
    num_expert_layers: int
    weight_bytes_each: float
    key_bytes: int
    num_key_parts: int
    pair_operations: int
    row_pair_operations: int
    activation_bytes_each: int = 2

    @classmethod
    def of(cls, shape: ModelShape, *, kv_itemsize: int = 2, weight_bytes_each: float | None = None) -> "Work":
        """`weight_bytes_each` None: one of blocks of FP8, else two."""
        experts = shape.experts
        num_expert_layers = len(experts.layers) if experts else 0
        mlps = (shape.num_layers - num_expert_layers) * 3 * shape.hidden_size * shape.intermediate_size
        beside = 0
        if experts:
            beside = num_expert_layers * shape.hidden_size * (experts.num_experts + 3 * experts.shared_size)
        if weight_bytes_each is None:
            weight_bytes_each = 2.0 if shape.weight_block_size is None else 1.0
        return cls(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            token_weights=shape.num_layers * _attention_weights(shape) + mlps + beside,
            head_weights=shape.vocab_size * shape.hidden_size,
            expert_weights=3 * shape.hidden_size * experts.intermediate_size if experts else 0,
            num_experts=experts.num_experts if experts else 0,
            num_chosen=experts.num_chosen if experts else 0,
            num_expert_layers=num_expert_layers,
            weight_bytes_each=weight_bytes_each,
            key_bytes=shape.num_layers * _key_numbers(shape) * kv_itemsize,
            num_key_parts=1 if shape.latent else shape.num_kv_heads,
            pair_operations=shape.num_layers * OPERATIONS * _pair_products(shape),
            row_pair_operations=shape.num_layers * OPERATIONS * _row_pair_products(shape),
        )

    # ---- of a model --------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> float:
        """All that devices hold together, each weight once; the embedding as large as the head."""
        return self.token_weights * self.weight_bytes_each + self.all_expert_bytes + 2 * self.embedding_bytes

    @property
    def all_expert_bytes(self) -> float:
        return self.num_expert_layers * self.num_experts * self.expert_weights * self.weight_bytes_each

    @property
    def embedding_bytes(self) -> int:
        """In bf16, as the head."""
        return 2 * self.head_weights

    # ---- of a step ---------------------------------------------------------------------------------------------

    def num_experts_read(self, num_tokens: int) -> float:
        """In one layer, of those that there are."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)

    def dense_bytes(self) -> float:
        """Weights that every step reads."""
        return self.token_weights * self.weight_bytes_each + self.embedding_bytes

    def expert_bytes(self, num_tokens: int) -> float:
        return self.num_expert_layers * self.num_experts_read(num_tokens) * self.expert_weights * self.weight_bytes_each

    def dense_operations(self, *, num_tokens: int, num_rows: int) -> float:
        """Logits are of the rows that decode alone."""
        return OPERATIONS * (self.token_weights * num_tokens + self.head_weights * num_rows)

    def expert_operations(self, num_tokens: int) -> float:
        return OPERATIONS * self.num_expert_layers * self.num_chosen * self.expert_weights * num_tokens

    def exchanged_bytes(self, num_tokens: int) -> float:
        """In one sum over all ranks, of which there are two in each layer."""
        return num_tokens * self.hidden_size * self.activation_bytes_each


def _attention_weights(shape: ModelShape) -> int:
    """Of one layer."""
    latent, hidden, heads = shape.latent, shape.hidden_size, shape.num_heads
    if latent is None:
        return hidden * shape.head_dim * 2 * (heads + shape.num_kv_heads)
    queries = heads * latent.head_dim
    asked = hidden * queries if latent.q_rank is None else latent.q_rank * (hidden + queries)
    kept = hidden * latent.width + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    return asked + kept + heads * latent.value_dim * hidden


def _key_numbers(shape: ModelShape) -> int:
    """That a token keeps in one layer."""
    return shape.latent.width if shape.latent else 2 * shape.num_kv_heads * shape.head_dim


def _pair_products(shape: ModelShape) -> int:
    """Of one token with one key of one layer, and with its value."""
    latent = shape.latent
    return shape.num_heads * (shape.head_dim + (latent.value_dim if latent else shape.head_dim))


def _row_pair_products(shape: ModelShape) -> int:
    if shape.latent is None:
        return _pair_products(shape)
    return shape.num_heads * (shape.latent.width + shape.latent.kv_rank)
