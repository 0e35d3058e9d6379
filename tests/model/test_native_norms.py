"""Norms of the native kernels against plain torch."""

import pytest
import torch
from native_worlds import BF16_ROUNDING, Way, drawn, each_way, native_ops, needs_kernels, reference_ops

pytestmark = needs_kernels

SIZES = pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 31, 63, 64, 65, 77, 129, 576])
NUM_ROWS = (0, 1, 2, 31, 32, 33, 100)  # from 32 on, threads share them


@each_way
@SIZES
def test_a_norm_differs_from_the_reference_by_one_rounding_to_bf16(way: Way, size: int) -> None:
    weight = drawn(size, seed=1)
    with native_ops(way) as ops:
        for num_rows in NUM_ROWS:
            x = 3 * drawn(num_rows, size, seed=num_rows)
            result = ops.rms_norm(x, weight, 1e-3)
            assert result.dtype is torch.bfloat16
            expected = reference_ops().rms_norm(x, weight, 1e-3)
            torch.testing.assert_close(result.float(), expected, rtol=BF16_ROUNDING * 1.001, atol=0)


@each_way
@SIZES
def test_an_added_norm_differs_by_the_rounding_of_fp32_alone(way: Way, size: int) -> None:
    weight = drawn(size, seed=1)
    with native_ops(way) as ops:
        for num_rows in NUM_ROWS:
            values, x = 3 * drawn(num_rows, size, seed=num_rows), drawn(num_rows, size, seed=2)
            result, expected, values_before = x.clone(), x.clone(), values.clone()
            ops.add_rms_norm(result, values, weight, 1e-3)
            reference_ops().add_rms_norm(expected, values, weight, 1e-3)
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=2e-6)
            assert torch.equal(values, values_before)


@each_way
@SIZES
def test_every_number_counts_in_its_rows_mean_square(way: Way, size: int) -> None:
    """Row i has one number that outweighs all others, the i-th: without it the others would stand out."""
    x = 1 + 999 * torch.eye(size)
    with native_ops(way) as ops:
        result = ops.rms_norm(x, torch.ones(size), 1e-6).float()
    expected = reference_ops().rms_norm(x, torch.ones(size), 1e-6)
    torch.testing.assert_close(result, expected, rtol=BF16_ROUNDING * 1.001, atol=0)


@each_way
def test_epsilon_holds_a_row_of_zeros_at_zero(way: Way) -> None:
    with native_ops(way) as ops:
        assert torch.equal(ops.rms_norm(torch.zeros(2, 20), torch.ones(20), 1e-6), torch.zeros(2, 20).bfloat16())
