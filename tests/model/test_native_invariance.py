"""Bit by bit: a row's results are its own. Not what is computed beside it, nor how a prompt is cut into chunks, nor
which pages it lies in, nor the number of threads changes a bit of them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_worlds import (
    Way,
    angles,
    bf16,
    drawn,
    each_set,
    empty_view,
    entries_of,
    fill,
    native_ops,
    needs_kernels,
    paged,
    same_bits,
    shape_of,
)

from headrace.model.native_ops import NativeOps
from headrace.model.ops import HeadNorms
from headrace.model.shape import ModelShape

pytestmark = needs_kernels

Rowwise = Callable[[NativeOps, torch.Tensor], torch.Tensor]

NUM_INPUTS = 77


def added(ops: NativeOps, inputs: torch.Tensor) -> torch.Tensor:
    x = inputs[:, :1].float().expand(-1, 50).contiguous()
    ops.linear(bf16(drawn(50, NUM_INPUTS))).add_to(x, bf16(inputs))
    return x


def norm_added(ops: NativeOps, inputs: torch.Tensor) -> torch.Tensor:
    x = inputs.flip(1).contiguous()
    ops.add_rms_norm(x, inputs, drawn(NUM_INPUTS, seed=1), 1e-5)
    return x


ROWWISE: dict[str, Rowwise] = {
    "linear": lambda ops, x: ops.linear(bf16(drawn(100, NUM_INPUTS)), bias=drawn(100)).apply(bf16(x)),
    "linear of whole inputs": lambda ops, x: ops.linear(bf16(drawn(40, 64))).apply(bf16(x[:, :64]).contiguous()),
    "linear_add": added,
    "silu": lambda ops, x: ops.gated_linear(bf16(drawn(50, NUM_INPUTS)), bf16(drawn(50, NUM_INPUTS))).apply(bf16(x)),
    "gelu": lambda ops, x: ops.gated_linear(bf16(drawn(9, 77)), bf16(drawn(9, 77)), "gelu_tanh").apply(bf16(x)),
    "rms_norm": lambda ops, x: ops.rms_norm(x, drawn(NUM_INPUTS, seed=1), 1e-5),
    "add_rms_norm": norm_added,
}


@each_set
@pytest.mark.parametrize("op", ROWWISE)
@settings(max_examples=12)
@given(num_rows=st.one_of(st.integers(1, 100), st.integers(380, 420)), num_threads=st.integers(1, 3), data=st.data())
def test_a_row_beside_any_others_is_what_it_is_alone(
    instruction_set: str, op: str, num_rows: int, num_threads: int, data: st.DataObject
) -> None:
    inputs = drawn(num_rows, NUM_INPUTS, seed=num_rows)
    with native_ops(Way(instruction_set, num_threads)) as ops:
        together = ROWWISE[op](ops, inputs)
    with native_ops(Way(instruction_set, 1)) as ops:
        for row in data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=8, unique=True)):
            assert same_bits(together[row : row + 1], ROWWISE[op](ops, inputs[row : row + 1])), row
        begin = data.draw(st.integers(0, num_rows - 1))
        assert same_bits(together[begin:], ROWWISE[op](ops, inputs[begin:]))


# ---- attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one layer is given for all tokens of a prompt."""

    shape: ModelShape
    qkv: torch.Tensor  # [n, (H + 2G) * D] fp32
    norms: HeadNorms | None
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What came out: of all tokens of a prompt, by position."""

    kv: torch.Tensor  # [n, G, 2, D] bf16
    q: torch.Tensor  # [n, H, D] bf16
    out: torch.Tensor  # [n, H * D] bf16

    def require_equal(self, other: "Computed") -> None:
        assert same_bits(self.kv, other.kv), "KV"
        assert same_bits(self.q, other.q), "q"
        assert same_bits(self.out, other.out), "attention"


def token_by_token(way: Way, prompt: Prompt) -> Computed:
    return in_chunks(way, prompt, [1] * len(prompt.qkv), page_size=16, neighbours=[], place=0)


def in_chunks(
    way: Way, prompt: Prompt, chunks: list[int], *, page_size: int, neighbours: list[tuple[int, int]], place: int
) -> Computed:
    """Each chunk in a step of its own, in new pages each time, at `place` among its neighbours."""
    shape, kv = prompt.shape, torch.empty(0, prompt.shape.num_kv_heads, 2, prompt.shape.head_dim, dtype=torch.bfloat16)
    qs, outs, begin = [], [], 0
    with ExitStack() as opened:
        ops = opened.enter_context(native_ops(way, shape))
        for chunk in chunks:
            rows = [*neighbours[:place], (begin, chunk), *neighbours[place:]]
            row = min(place, len(neighbours))
            batch, num_pages = paged(rows, page_size=page_size, seed=begin)
            view = empty_view(num_pages, shape, page_size)
            for other, (already, _) in enumerate(rows):
                random = drawn(already, shape.num_kv_heads, 2, shape.head_dim, seed=other)
                fill(view, batch, other, kv if other == row else random)
            mine = slice(*batch.qo_indptr[row : row + 2].tolist())
            qkv = drawn(batch.num_tokens, prompt.qkv.shape[1], seed=begin)
            qkv[mine] = prompt.qkv[begin : begin + chunk]
            attention = ops.attention(batch, page_size, *angles(batch, shape.head_dim), window=prompt.window)
            q = attention.append(qkv, view, prompt.norms)
            qs.append(q[mine])
            outs.append(attention.attend(q, view)[mine])
            kv, begin = entries_of(view, batch, row), begin + chunk
    return Computed(kv=kv, q=torch.cat(qs), out=torch.cat(outs))


def cut(num_tokens: int, random: np.random.Generator) -> list[int]:
    chunks = []
    while (left := num_tokens - sum(chunks)) > 0:
        most = random.choice([1, 4, 17, 40, num_tokens])
        chunks.append(int(random.integers(1, min(left, most) + 1)))
    return chunks


ROW = st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 1, 2, 19, 40]))


@each_set
@settings(max_examples=40)
@given(
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (16, 1), (20, 1), (5, 5)]),
    head_dim=st.sampled_from([32, 64, 96, 256]),
    num_tokens=st.integers(1, 110),
    window=st.none() | st.integers(1, 70),
    data=st.data(),
)
def test_a_prompt_in_any_chunks_beside_any_rows_is_what_it_is_token_by_token_alone(
    instruction_set: str,
    *,
    heads: tuple[int, int],
    head_dim: int,
    num_tokens: int,
    window: int | None,
    data: st.DataObject,
) -> None:
    num_heads, num_kv_heads = heads
    has_norms = data.draw(st.booleans())
    norms = HeadNorms(q=drawn(head_dim, seed=8), k=drawn(head_dim, seed=9), eps=1e-5) if has_norms else None
    prompt = Prompt(
        shape=shape_of(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim),
        qkv=2 * drawn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, seed=num_tokens),
        norms=norms,
        window=window,
    )
    alone = token_by_token(Way(instruction_set, 1), prompt)
    chunks = cut(num_tokens, np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))))
    computed = in_chunks(
        Way(instruction_set, data.draw(st.integers(1, 3))),
        prompt,
        chunks,
        page_size=data.draw(st.sampled_from([1, 3, 8, 16, 24, 32, 64])),
        neighbours=data.draw(st.lists(ROW, max_size=4)),
        place=data.draw(st.integers(0, 4)),
    )
    computed.require_equal(alone)


@each_set
@pytest.mark.parametrize("window", [None, 21])
def test_not_one_of_millions_of_numbers_is_rounded_otherwise(instruction_set: str, window: int | None) -> None:
    """Rounding to bf16 hides what differs by the last bit of fp32, but for one number in some ten thousand."""
    shape = shape_of(num_heads=16, num_kv_heads=1, head_dim=256)
    for seed in range(8):
        prompt = Prompt(shape=shape, qkv=drawn(60, 18 * 256, seed=seed), norms=None, window=window)
        chunks = cut(60, np.random.default_rng(seed))
        computed = in_chunks(Way(instruction_set, 2), prompt, chunks, page_size=16, neighbours=[], place=0)
        computed.require_equal(token_by_token(Way(instruction_set, 1), prompt))


@each_set
@pytest.mark.parametrize("window", [None, 700])
def test_a_decode_is_the_last_row_of_a_long_chunk(instruction_set: str, window: int | None) -> None:
    shape = shape_of(num_heads=6, num_kv_heads=2, head_dim=64)
    prompt = Prompt(shape=shape, qkv=2 * drawn(2500, 10 * 64, seed=3), norms=None, window=window)
    whole = in_chunks(Way(instruction_set, 2), prompt, [2500], page_size=16, neighbours=[], place=0)
    decoded = in_chunks(
        Way(instruction_set, 1), prompt, [7, 1041, 999, 451, 1, 1], page_size=24, neighbours=[(99, 1)], place=1
    )
    decoded.require_equal(whole)
