"""What a step appends, by native kernels and by plain torch: turned queries, and keys and values in their slots."""

import pytest
import torch
from native_worlds import (
    BF16_ROUNDING,
    Way,
    angles,
    drawn,
    each_way,
    empty_view,
    fill,
    native_ops,
    needs_kernels,
    paged,
    reference_ops,
    same_bits,
    shape_of,
)

from headrace.model.batch import Batch
from headrace.model.ops import HeadNorms
from headrace.model.shape import ModelShape

pytestmark = needs_kernels

ROWS = [(0, 1), (0, 7), (40, 1), (5, 20), (31, 2), (63, 1)]
FEW_ROWS = [(3, 2), (0, 1)]
"""Too few tokens for threads."""


def written(batch: Batch, view: torch.Tensor) -> torch.Tensor:
    """K and V of the batch's tokens, `[T, G, 2, D]`."""
    slots = torch.from_numpy(batch.slots)
    return view[slots // view.shape[3], :, :, slots % view.shape[3]]


def norms_of(head_dim: int) -> HeadNorms:
    return HeadNorms(q=drawn(head_dim, seed=5), k=drawn(head_dim, seed=6), eps=1e-3)


def filled_view(batch: Batch, num_pages: int, shape: ModelShape, page_size: int) -> torch.Tensor:
    """NaN but for what the rows have already."""
    view = empty_view(num_pages, shape, page_size)
    for row in range(batch.num_rows):
        begin = int(batch.positions[batch.qo_indptr[row]])
        fill(view, batch, row, drawn(begin, shape.num_kv_heads, 2, shape.head_dim, seed=row))
    return view


@each_way
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("has_norms", [False, True])
def test_queries_and_keys_are_turned_and_values_rounded_into_their_slots(
    way: Way, head_dim: int, has_norms: bool
) -> None:
    shape = shape_of(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    norms = norms_of(head_dim) if has_norms else None
    for rows, page_size in ((ROWS, 16), (ROWS, 3), (FEW_ROWS, 8), (FEW_ROWS, 1)):
        batch, num_pages = paged(rows, page_size=page_size)
        cos, sin = angles(batch, head_dim)
        qkv = 3 * drawn(batch.num_tokens, 10 * head_dim, seed=1)
        view = filled_view(batch, num_pages, shape, page_size)
        before, expected_view = view.clone(), view.float()
        with native_ops(way, shape) as ops:
            q = ops.attention(batch, page_size, cos, sin).append(qkv, view, norms)
        reference = reference_ops(shape).attention(batch, page_size, cos, sin)
        expected_q = reference.append(qkv, expected_view, norms)
        expected, found = written(batch, expected_view), written(batch, view)
        assert q.dtype is torch.bfloat16 and q.shape == (batch.num_tokens, 6, head_dim)
        # A turn may cancel: then what is left carries fp32's rounding of numbers around ten.
        torch.testing.assert_close(q.float(), expected_q, rtol=BF16_ROUNDING * 1.001, atol=4e-6)
        torch.testing.assert_close(found[:, :, 0].float(), expected[:, :, 0], rtol=BF16_ROUNDING * 1.001, atol=4e-6)
        assert same_bits(found[:, :, 1], expected[:, :, 1].bfloat16())
        slots = torch.from_numpy(batch.slots)
        before[slots // page_size, :, :, slots % page_size] = found
        assert same_bits(view, before)  # nothing else was written


@each_way
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (16, 1), (9, 3)])
def test_every_head_is_turned_by_its_own_tokens_angles(way: Way, num_heads: int, num_kv_heads: int) -> None:
    """By a quarter turn for odd tokens and none for even ones: halves change places, exactly."""
    shape = shape_of(num_heads=num_heads, num_kv_heads=num_kv_heads)
    batch, num_pages = paged([(0, 40)], page_size=8)
    is_odd = (torch.arange(40) % 2).float()[:, None].expand(40, 16)
    qkv = drawn(40, (num_heads + 2 * num_kv_heads) * 32).bfloat16().float()
    view = empty_view(num_pages, shape, 8)
    with native_ops(way, shape) as ops:
        q = ops.attention(batch, 8, 1 - is_odd, is_odd).append(qkv, view)
    heads = qkv.view(40, -1, 32)[:, : num_heads + num_kv_heads].clone()
    a, b = heads[1::2].chunk(2, dim=-1)
    heads[1::2] = torch.cat((-b, a), dim=-1)
    assert torch.equal(q.float(), heads[:, :num_heads])
    assert torch.equal(written(batch, view)[:, :, 0].float(), heads[:, num_heads:])
