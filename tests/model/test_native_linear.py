"""Linear layers of the native kernels against plain torch. With whole numbers both sides are exact and must be equal;
with others, sums differ by their order alone."""

import pytest
import torch
from native_worlds import (
    BF16_ROUNDING,
    Way,
    bf16,
    drawn,
    each_way,
    native_ops,
    needs_kernels,
    reference_ops,
    same_bits,
    whole_numbers,
)

from headrace.model.ops import Activation

pytestmark = needs_kernels

NUM_ROWS = (0, 1, 2, 12, 13, 15, 16, 17, 31, 32, 33, 48, 383, 384, 385, 1000)
"""Around the rows of a tile, of a block in either set, and of what stays in the cache."""

SIZES = [(1, 1), (2, 3), (31, 32), (32, 33), (33, 31), (65, 64), (100, 127), (48, 254), (16, 1000)]
"""Outputs and inputs; panels are 32 wide, and 32 inputs are taken at a time."""

ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])


def require_near_sums(result: torch.Tensor, expected: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> None:
    """fp32 sums of K products err by less than K * 2^-24 of the sum of what they add; in fact by far less, since errors
    cancel. Of an average term this is a thousandth."""
    terms = inputs.float().abs() @ weight.float().abs().T
    assert result.dtype is torch.float32 and result.shape == expected.shape
    assert bool(((result - expected).abs() <= 2.0**-20 * terms).all())


@each_way
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_products_of_whole_numbers_are_exact(way: Way, num_outputs: int, num_inputs: int) -> None:
    weight, bias = bf16(whole_numbers(num_outputs, num_inputs)), whole_numbers(num_outputs, seed=1)
    with native_ops(way) as ops:
        plain, biased = ops.linear(weight), ops.linear(weight, bias=bias)
        for num_rows in NUM_ROWS:
            inputs = bf16(whole_numbers(num_rows, num_inputs, seed=num_rows))
            x = whole_numbers(num_rows, num_outputs, seed=2)
            expected = reference_ops().linear(weight.float()).apply(inputs.float())
            assert torch.equal(plain.apply(inputs), expected), num_rows
            assert torch.equal(biased.apply(inputs), expected + bias), num_rows
            added = x.clone()
            biased.add_to(added, inputs)
            assert torch.equal(added, x + expected + bias), num_rows


@each_way
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(65, 127), (33, 640), (64, 2048)])
def test_products_of_any_numbers_err_by_the_rounding_of_fp32_sums(way: Way, num_outputs: int, num_inputs: int) -> None:
    weight, bias = bf16(drawn(num_outputs, num_inputs)), drawn(num_outputs, seed=1)
    reference = reference_ops().linear(weight.float(), bias=bias)
    with native_ops(way) as ops:
        linear = ops.linear(weight, bias=bias)
        for num_rows in (1, 17, 50):
            inputs, x = bf16(drawn(num_rows, num_inputs, seed=2)), drawn(num_rows, num_outputs, seed=3)
            require_near_sums(linear.apply(inputs), reference.apply(inputs.float()), inputs, weight)
            added, expected = x.clone(), x.clone()
            linear.add_to(added, inputs)
            reference.add_to(expected, inputs.float())
            require_near_sums(added, expected, inputs, weight)


@each_way
@pytest.mark.parametrize("heights", [(1, 1), (5, 31, 3), (32, 64), (40, 1, 40), (70, 20, 20)])
def test_several_weights_are_packed_one_below_the_other(way: Way, heights: tuple[int, ...]) -> None:
    weights = [bf16(whole_numbers(height, 45, seed=height + place)) for place, height in enumerate(heights)]
    inputs, bias = bf16(whole_numbers(19, 45, seed=1)), whole_numbers(sum(heights), seed=2)
    with native_ops(way) as ops:
        result = ops.linear(*weights, bias=bias).apply(inputs)
    parts = [reference_ops().linear(weight.float()).apply(inputs.float()) for weight in weights]
    assert torch.equal(result, torch.cat(parts, dim=1) + bias)


@each_way
def test_rows_behind_each_other_in_memory_do_not_leak_into_the_sums_of_odd_inputs(way: Way) -> None:
    """A row of 33 inputs ends in the middle of a pair, and what follows is the next row: here, NaN."""
    weight, inputs = bf16(whole_numbers(40, 33)), bf16(whole_numbers(20, 33, seed=1))
    inputs[1::2] = torch.nan
    with native_ops(way) as ops:
        result = ops.linear(weight).apply(inputs)
    assert torch.equal(result[::2], reference_ops().linear(weight.float()).apply(inputs[::2].float()))
    assert bool(result[1::2].isnan().all())


# ---- gated ---------------------------------------------------------------------------------------------------------


@each_way
@ACTIVATIONS
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (15, 33), (16, 64), (17, 31), (33, 127), (80, 254)])
def test_gates_differ_from_the_reference_by_the_rounding_of_the_result(
    way: Way, activation: Activation, num_outputs: int, num_inputs: int
) -> None:
    """With whole numbers, and fractions of 2 of them, gate and up are exact, and so is the product but for an
    activation's 1e-6 and one rounding to bf16. torch's own gelu takes 1 + tanh, whose seventh digit is rounded."""
    gate = bf16(whole_numbers(num_outputs, num_inputs)) / 64
    up = bf16(whole_numbers(num_outputs, num_inputs, seed=1))
    reference = reference_ops()
    with native_ops(way) as ops:
        gated = ops.gated_linear(gate, up, activation)
        for num_rows in NUM_ROWS:
            inputs = bf16(whole_numbers(num_rows, num_inputs, seed=num_rows)) / 8
            result = gated.apply(inputs)
            expected = reference.gated_linear(gate.float(), up.float(), activation).apply(inputs.float())
            before = [reference.linear(weight.float()).apply(inputs.float()) for weight in (gate, up)]
            allowed = 1.001 * BF16_ROUNDING * expected.abs() + 2.0**-23 * (before[0] * before[1]).abs()
            assert result.dtype is torch.bfloat16 and result.shape == expected.shape
            assert bool(((result.float() - expected).abs() <= allowed).all()), num_rows


@each_way
@ACTIVATIONS
def test_activations_are_right_from_far_below_zero_to_far_above(way: Way, activation: Activation) -> None:
    steps = torch.linspace(-12, 12, 481)
    extremes = torch.tensor([0.0, 1e-30, 1e-4, 80, 88, 100, 200, 1e4, 1e8])
    gate = bf16(torch.cat([steps, extremes, -extremes]))[:, None]
    with native_ops(way) as ops:
        result = ops.gated_linear(gate, torch.ones_like(gate), activation).apply(torch.ones(1, 1, dtype=torch.bfloat16))
    expected = reference_ops().gated_linear(gate.float(), torch.ones(len(gate), 1), activation).apply(torch.ones(1, 1))
    torch.testing.assert_close(result.float(), expected, rtol=BF16_ROUNDING * 1.001, atol=2e-6)
    assert not bool(result.isnan().any())


@each_way
def test_nothing_is_written_for_no_rows(way: Way) -> None:
    weight = bf16(drawn(5, 7))
    with native_ops(way) as ops:
        none = torch.empty(0, 7, dtype=torch.bfloat16)
        assert ops.linear(weight).apply(none).shape == (0, 5)
        assert ops.gated_linear(weight, weight).apply(none).shape == (0, 5)
        x = torch.empty(0, 5)
        ops.linear(weight).add_to(x, none)


@each_way
def test_a_weight_is_read_again_from_what_was_packed(way: Way) -> None:
    """A region that is read-only holds what another process packed: nothing is packed into it, the rest is the same."""
    weight, gate, inputs = bf16(drawn(40, 50)), bf16(drawn(20, 50, seed=1)), bf16(drawn(3, 50, seed=2))
    with native_ops(way) as ops:
        kept = []
        region = ops._region

        def keep(num_bytes: int):  # noqa: ANN202
            kept.append(region(num_bytes))
            return kept[-1]

        ops._region = keep
        first = (ops.linear(weight).apply(inputs), ops.gated_linear(gate, gate).apply(inputs))
        for array in kept:
            array.flags.writeable = False
        again = iter(kept)
        ops._region = lambda _: next(again)
        blank = torch.zeros_like(weight)
        second = (ops.linear(blank).apply(inputs), ops.gated_linear(0 * gate, 0 * gate).apply(inputs))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
