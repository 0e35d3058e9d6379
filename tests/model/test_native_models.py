"""Whole tiny models by native kernels: near what plain torch makes of the same weights, and bit by bit the same in
whatever chunks and batches a prompt is computed."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_worlds import (
    BF16_ROUNDING,
    Way,
    bf16,
    drawn,
    each_set,
    each_way,
    native_ops,
    needs_kernels,
    same_bits,
    shape_of,
)

from headrace.kvcache.layout import num_pages_for
from headrace.model.batch import Batch, Row
from headrace.model.expert_fields import Experts
from headrace.model.families import FAMILIES
from headrace.model.family_fields import LocalAttention
from headrace.model.interface import Model
from headrace.model.ops import Ops
from headrace.model.rope import YarnScaling
from headrace.model.shape import ModelShape
from headrace.model.tensors import as_computed
from headrace.model.torch_ops import TorchOps

pytestmark = needs_kernels

LLAMA = shape_of(num_heads=6, num_kv_heads=2, num_layers=3)
SHAPES = {
    "llama": LLAMA,
    "gemma3": replace(
        LLAMA,
        architecture="Gemma3ForCausalLM",
        has_head_norms=True,
        head_dim=64,
        num_heads=4,
        num_kv_heads=1,
        tie_word_embeddings=True,
        local_attention=LocalAttention(layers=(0, 2), window=20, rope_theta=100.0),
    ),
    "qwen2": replace(LLAMA, architecture="Qwen2ForCausalLM", has_qkv_bias=True, num_layers=2),
    "qwen3": replace(
        LLAMA,
        architecture="Qwen3ForCausalLM",
        has_head_norms=True,
        num_layers=2,
        rope_scaling=YarnScaling(
            factor=4.0, slow_turns=1.0, fast_turns=32.0, original_len=16, truncated=True, attention_factor=1.2
        ),
    ),
    "qwen3 moe": replace(
        LLAMA,
        architecture="Qwen3MoeForCausalLM",
        has_head_norms=True,
        num_layers=3,
        experts=Experts(layers=(0, 2), num_experts=5, num_chosen=2, intermediate_size=40, renormalised=True),
    ),
}
each_family = pytest.mark.parametrize("family", SHAPES)


def with_every_expert_chosen(shape: ModelShape) -> ModelShape:
    """Of two experts with like shares a rounding decides which is chosen, and that shows as more than a rounding."""
    if shape.experts is None:
        return shape
    return replace(shape, experts=replace(shape.experts, num_chosen=shape.experts.num_experts))


def seeded_model(shape: ModelShape, ops: Ops) -> Model:
    """Weights that keep the residual stream near one, the same for any `ops`."""
    shapes = FAMILIES[shape.architecture].tensor_shapes(shape)

    def tensor(name: str) -> torch.Tensor:
        size = shapes[name]
        values = drawn(*size, seed=zlib.crc32(name.encode()))
        scaled = (
            0.1 * values + (name.endswith("norm.weight") and shape.architecture != "Gemma3ForCausalLM")
            if len(size) == 1
            else values / 8
        )
        return as_computed(bf16(scaled), ops.dtype)

    return FAMILIES[shape.architecture].model(shape, tensor, ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Of one prompt, by position: what it left in the pages, and the logits that were asked for."""

    kv: torch.Tensor  # [L, n, G, 2, D]
    logits: dict[int, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Pool:
    """Pages of NaN; tables are drawn from them in random order."""

    shape: ModelShape
    page_size: int
    dtype: torch.dtype = torch.bfloat16
    num_pages: int = 400
    views: list[torch.Tensor] = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        size = (self.num_pages, self.shape.num_kv_heads, 2, self.page_size, self.shape.head_dim)
        self.views = [torch.full(size, torch.nan, dtype=self.dtype) for _ in range(self.shape.num_layers)]
        self.free = np.random.default_rng(self.page_size).permutation(self.num_pages).tolist()

    def table(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(num_pages_for(num_tokens, self.page_size))]

    def forward(self, model: Model, rows: Sequence[Row]) -> torch.Tensor:
        vocab_size = self.shape.vocab_size
        batch = Batch.of(rows, page_size=self.page_size, num_pages=self.num_pages, vocab_size=vocab_size)
        return model.forward(batch, self.views)

    def kv(self, table: Sequence[int], num_tokens: int) -> torch.Tensor:
        at = torch.arange(num_tokens)
        pages = torch.tensor(table)[at // self.page_size]
        return torch.stack([view[pages, :, :, at % self.page_size] for view in self.views])


def computed(pool: Pool, model: Model, prompt: Sequence[int], chunks: Sequence[int]) -> Seen:
    """In these chunks, nothing beside."""
    table, begin, logits = pool.table(len(prompt)), 0, {}
    for chunk in chunks:
        row = Row(token_ids=prompt[begin : begin + chunk], begin=begin, page_table=table, wants_logits=True)
        begin += chunk
        logits[begin - 1] = pool.forward(model, [row])[0]
    return Seen(kv=pool.kv(table, len(prompt)), logits=logits)


def tokens(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, LLAMA.vocab_size, num_tokens).tolist()


@each_way
@each_family
def test_logits_are_near_those_of_plain_torch(way: Way, family: str) -> None:
    """Each of a layer's handful of roundings to bf16 moves its part of the stream by up to 2^-8; they do not all point
    the same way."""
    shape, prompt = with_every_expert_chosen(SHAPES[family]), tokens(70, seed=1)
    chunks, plain_pool = [41, 28, 1], Pool(shape=shape, page_size=16, dtype=torch.float32)
    plain = computed(plain_pool, seeded_model(shape, TorchOps(shape, "fp32")), prompt, chunks)
    with native_ops(way, shape) as ops:
        native = computed(Pool(shape=shape, page_size=16), seeded_model(shape, ops), prompt, chunks)
    allowed = 4 * BF16_ROUNDING
    for position, expected in plain.logits.items():
        assert (native.logits[position] - expected).norm() <= allowed * expected.norm()
    assert (native.kv.float() - plain.kv).norm() <= allowed * plain.kv.norm()


@each_set
@each_family
@settings(max_examples=8)
@given(data=st.data())
def test_a_prompt_leaves_the_same_kv_and_logits_however_it_is_cut_and_whatever_is_beside_it(
    instruction_set: str, family: str, data: st.DataObject
) -> None:
    """Several prompts at once: each step takes a random chunk of some of them, in random order."""
    shape, random = SHAPES[family], np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    with native_ops(Way(instruction_set, 1), shape) as ops:
        pool, model = Pool(shape=shape, page_size=16), seeded_model(shape, ops)
        alone = [computed(pool, model, prompt, [1] * len(prompt)) for prompt in prompts]

    pool = Pool(shape=shape, page_size=data.draw(st.sampled_from([1, 3, 8, 16, 24, 32])))
    tables, done = [pool.table(len(prompt)) for prompt in prompts], [0] * len(prompts)
    with native_ops(Way(instruction_set, data.draw(st.integers(1, 3))), shape) as ops:
        model = seeded_model(shape, ops)
        while left := [number for number, prompt in enumerate(prompts) if done[number] < len(prompt)]:
            chosen = random.permutation(left)[: random.integers(1, len(left) + 1)].tolist()
            rows, wanted = [], []
            for number in chosen:
                begin = done[number]
                chunk = prompts[number][begin : begin + int(random.choice([1, 1, 7, 20, 60]))]
                done[number] += len(chunk)
                wants_logits = bool(random.integers(2)) or done[number] == len(prompts[number])
                rows.append(Row(token_ids=chunk, begin=begin, page_table=tables[number], wants_logits=wants_logits))
                wanted += [(number, done[number] - 1)] if wants_logits else []
            for (number, position), logits in zip(wanted, pool.forward(model, rows), strict=True):
                assert same_bits(logits, alone[number].logits[position]), (number, position)
    for table, prompt, expected in zip(tables, prompts, alone, strict=True):
        assert same_bits(pool.kv(table, len(prompt)), expected.kv)
