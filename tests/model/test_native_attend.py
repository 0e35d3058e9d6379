"""Attention of the native kernels against plain torch, over pages that hold NaN wherever no row has a key.

Powers are rounded to bf16 before they meet the values, and so is the result: it errs by at most 2^-8 of what the same
weights make of the values' sizes, and by 2^-8 of itself. One key in a hundred would hide in that. So queries look for
one key each (`seeking`), which then has nearly all the weight; and keys are counted (`counted`).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_worlds import (
    BF16_ROUNDING,
    WAYS,
    Way,
    drawn,
    each_way,
    empty_view,
    fill,
    native_ops,
    needs_kernels,
    paged,
    places,
    reference_ops,
    shape_of,
)

from headrace.model.batch import Batch
from headrace.model.shape import ModelShape

pytestmark = needs_kernels

HEAD_DIMS = (32, 64, 96, 128, 256)
PAGE_SIZES = (1, 3, 8, 16, 24, 32, 64)
WINDOWS = (None, 1, 5, 16, 33, 200)
ROWS = [(0, 1), (31, 1), (32, 1), (230, 1), (0, 21), (57, 34), (250, 2), (15, 17)]
"""Decodes and chunks; kv_len from 1 to 252, at and around the tiles of 32 and the windows."""


def no_turns(batch: Batch, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(batch.num_tokens, head_dim // 2), torch.zeros(batch.num_tokens, head_dim // 2)


def filled(batch: Batch, num_pages: int, shape: ModelShape, page_size: int) -> torch.Tensor:
    """Random keys and values of all that rows see, NaN everywhere else."""
    view = empty_view(num_pages, shape, page_size)
    for row in range(batch.num_rows):
        fill(view, batch, row, drawn(int(batch.kv_lens[row]), shape.num_kv_heads, 2, shape.head_dim, seed=row))
    return view


def seeking(batch: Batch, view: torch.Tensor, shape: ModelShape, window: int | None) -> torch.Tensor:
    """Queries that each look like one of the keys in sight, which outweighs the others."""
    rng, group = np.random.default_rng(7), shape.num_heads // shape.num_kv_heads
    q = torch.empty(batch.num_tokens, shape.num_heads, shape.head_dim, dtype=view.dtype)
    for row in range(batch.num_rows):
        tokens = np.arange(batch.qo_indptr[row], batch.qo_indptr[row + 1])
        last = batch.positions[tokens]
        first = np.zeros_like(last) if window is None else np.maximum(last - window + 1, 0)
        for head in range(shape.num_heads):
            pages, offsets = places(batch, row, rng.integers(first, last + 1), view.shape[3])
            q[tokens, head] = 2 * view[pages, head // group, 0, offsets]
    return q


def require_attended(shape: ModelShape, batch: Batch, view: torch.Tensor, windows: tuple[int | None, ...]) -> None:
    """In all ways: the reference takes longer than they do."""
    page_size, cos_sin, before = view.shape[3], no_turns(batch, shape.head_dim), view.clone()
    whole = view.float()
    sizes = whole.clone()
    sizes[:, :, 1].abs_()
    for window in windows:
        q = seeking(batch, view, shape, window)
        reference = reference_ops(shape).attention(batch, page_size, *cos_sin, window=window)
        expected, size = (reference.attend(q.float(), each) for each in (whole, sizes))
        allowed = BF16_ROUNDING * 1.01 * (size + expected.abs()) + 1e-6
        for way in WAYS:
            with native_ops(way, shape) as ops:
                result = ops.attention(batch, page_size, *cos_sin, window=window).attend(q, view)
            assert result.dtype is torch.bfloat16 and result.shape == expected.shape
            assert bool(((result.float() - expected).abs() <= allowed).all()), f"{way}, window {window}"
    assert torch.equal(view.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("group", range(1, 17))
def test_decodes_and_chunks_beside_each_other_find_the_keys_that_they_look_for(group: int) -> None:
    head_dim, page_size = HEAD_DIMS[group % 5], PAGE_SIZES[group % 7]
    shape = shape_of(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    batch, num_pages = paged(ROWS, page_size=page_size)
    require_attended(shape, batch, filled(batch, num_pages, shape, page_size), WINDOWS)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_head_dim_is_attended_over_every_page_size(page_size: int) -> None:
    batch, num_pages = paged(ROWS, page_size=page_size, seed=1)
    for head_dim in (*HEAD_DIMS, 512):
        shape = shape_of(num_heads=4, num_kv_heads=1, head_dim=head_dim)
        require_attended(shape, batch, filled(batch, num_pages, shape, page_size), (None, 33))


@pytest.mark.parametrize("kv_len", [1, 2, 31, 32, 33, 63, 64, 65])
def test_a_single_token_is_attended_at_any_edge(kv_len: int) -> None:
    shape = shape_of(num_heads=3)
    for page_size in PAGE_SIZES:
        batch, num_pages = paged([(kv_len - 1, 1)], page_size=page_size)
        require_attended(shape, batch, filled(batch, num_pages, shape, page_size), (None, 1, 16))


@settings(max_examples=40)
@given(data=st.data())
def test_any_batch_is_attended(data: st.DataObject) -> None:
    group, num_kv_heads = data.draw(st.integers(1, 18)), data.draw(st.integers(1, 3))
    head_dim, page_size = data.draw(st.sampled_from(HEAD_DIMS)), data.draw(st.integers(1, 70))
    rows = data.draw(st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=5))
    window = data.draw(st.none() | st.integers(1, 250))
    shape = shape_of(num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    batch, num_pages = paged(rows, page_size=page_size)
    require_attended(shape, batch, filled(batch, num_pages, shape, page_size), (window,))


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (24, 256)])
def test_long_rows_find_their_keys(page_size: int, head_dim: int) -> None:
    shape = shape_of(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    batch, num_pages = paged([(8191, 1), (3000, 19), (2047, 1)], page_size=page_size)
    require_attended(shape, batch, filled(batch, num_pages, shape, page_size), (None, 1024))


# ---- every key once ------------------------------------------------------------------------------------------------


def counted(batch: Batch, num_pages: int, shape: ModelShape, page_size: int, per_dim: int) -> torch.Tensor:
    """Keys that are all alike, so that each has the same weight; dimension d of V marks `per_dim` of them."""
    view = empty_view(num_pages, shape, page_size)
    for row in range(batch.num_rows):
        kv_len = int(batch.kv_lens[row])
        entries = torch.zeros(kv_len, shape.num_kv_heads, 2, shape.head_dim)
        at = torch.arange(kv_len)
        entries[at, :, 1, at // per_dim % shape.head_dim] = 1
        fill(view, batch, row, entries)
    return view


@each_way
@pytest.mark.parametrize("window", [None, 1, 31, 97])
@pytest.mark.parametrize("page_size", [3, 16, 64])
def test_every_key_in_sight_counts_once_and_no_other(way: Way, window: int | None, page_size: int) -> None:
    """Up to 256 keys: each has a dimension of its own."""
    shape = shape_of(num_heads=6, num_kv_heads=2, head_dim=256)
    batch, num_pages = paged([(0, 100), (200, 56), (254, 1), (95, 1)], page_size=page_size)
    view = counted(batch, num_pages, shape, page_size, per_dim=1)
    with native_ops(way, shape) as ops:
        attention = ops.attention(batch, page_size, *no_turns(batch, 256), window=window)
        result = attention.attend(drawn(batch.num_tokens, 6, 256).bfloat16(), view).view(-1, 6, 256)
    at, last = torch.arange(256), torch.from_numpy(batch.positions)[:, None]
    is_seen = (at <= last) & (at > last - (window or 1000))
    expected = is_seen / is_seen.sum(1, keepdim=True)
    torch.testing.assert_close(result.float(), expected[:, None].expand(-1, 6, -1), rtol=BF16_ROUNDING * 1.001, atol=0)


@each_way
@pytest.mark.parametrize("rows", [[(8191, 1)], [(8180, 12)]])
def test_every_key_of_a_long_row_counts_once(way: Way, rows: list[tuple[int, int]]) -> None:
    """32 to a dimension: one of them makes a difference of 3 percent, of which 0.4 may be rounding."""
    shape = shape_of(num_heads=2, num_kv_heads=1, head_dim=256)
    batch, num_pages = paged(rows, page_size=24)
    view = counted(batch, num_pages, shape, 24, per_dim=32)
    with native_ops(way, shape) as ops:
        attention = ops.attention(batch, 24, *no_turns(batch, 256))
        result = attention.attend(drawn(batch.num_tokens, 2, 256).bfloat16(), view).view(-1, 2, 256)
    at, last = torch.arange(8192), torch.from_numpy(batch.positions)[:, None]
    expected = (at <= last).float().view(-1, 256, 32).sum(2) / (last + 1)
    torch.testing.assert_close(result.float(), expected[:, None].expand(-1, 2, -1), rtol=BF16_ROUNDING * 1.001, atol=0)


@pytest.mark.parametrize("window", [252, 2**31, 2**32, 2**63 - 1])
def test_a_window_wider_than_any_row_hides_nothing(window: int) -> None:
    shape = shape_of(num_heads=3)
    batch, num_pages = paged(ROWS, page_size=16)
    require_attended(shape, batch, filled(batch, num_pages, shape, 16), (window,))


@pytest.mark.parametrize("scale", [1e-3, 0.25, 2.0])
def test_scores_are_scaled_as_the_model_says(scale: float) -> None:
    """Also to scores of hundreds: powers are taken of differences to the largest."""
    shape = replace(shape_of(num_heads=2), attention_scale=scale)
    batch, num_pages = paged(ROWS, page_size=16)
    require_attended(shape, batch, filled(batch, num_pages, shape, 16), (None, 33))
