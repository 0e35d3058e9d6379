"""What a step costs: sums over what is in it, and the largest that a budget holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.cost import CHUNK_MULTIPLE, StepCost, StepSize
from headrace.errors import InputError

COST = StepCost(step_s=1.0, row_s=0.1, key_s=0.01, token_s=0.5, pair_s=0.001)
COSTS = st.builds(
    StepCost,
    step_s=st.floats(0, 1),
    row_s=st.floats(0, 0.1),
    key_s=st.floats(0, 1e-3),
    token_s=st.floats(0, 0.1),
    pair_s=st.floats(0, 1e-4),
)
SIZES = st.builds(
    StepSize,
    rows=st.integers(0, 64),
    keys=st.integers(0, 10**6),
    chunk_tokens=st.integers(0, 4096),
    pairs=st.integers(0, 10**8),
)


def test_every_token_of_a_chunk_sees_itself_and_all_before_it_and_the_chunk_reads_all() -> None:
    assert StepSize().with_chunk(3, 6) == StepSize(chunk_tokens=3, keys=6, pairs=4 + 5 + 6)
    both = StepSize().with_chunk(0, 2).with_chunk(10, 11)
    assert both == StepSize(chunk_tokens=3, keys=2 + 11, pairs=1 + 2 + 11)


def test_a_step_takes_what_its_parts_take() -> None:
    size = StepSize().with_row(20).with_row(5).with_chunk(0, 4)
    assert size == StepSize(rows=2, chunk_tokens=4, keys=25 + 4, pairs=10)
    assert COST.predict(size) == pytest.approx(1 + 0.2 + 2 + 0.29 + 0.01)


def test_no_chunk_is_nothing() -> None:
    assert StepSize().with_chunk(7, 7) == StepSize()


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_a_coefficient_that_is_no_time_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="row_s: must be a number of seconds, at least 0, is"):
        StepCost(step_s=0.0, row_s=value, key_s=0.0, token_s=0.0, pair_s=0.0)


@given(COSTS, SIZES, SIZES)
def test_more_in_a_step_never_takes_less(cost: StepCost, size: StepSize, more: StepSize) -> None:
    both = StepSize(
        rows=size.rows + more.rows,
        keys=size.keys + more.keys,
        chunk_tokens=size.chunk_tokens + more.chunk_tokens,
        pairs=size.pairs + more.pairs,
    )
    assert 0 <= cost.predict(size) <= cost.predict(both)


@given(COSTS, SIZES, st.integers(0, 5000), st.floats(0, 10), st.integers(0, 600))
def test_the_largest_chunk_keeps_the_budget_and_the_next_one_does_not(
    cost: StepCost, beside: StepSize, begin: int, budget_s: float, most: int
) -> None:
    chunk = cost.largest_chunk(beside, begin=begin, budget_s=budget_s, most=most)
    assert 0 <= chunk <= most and chunk % CHUNK_MULTIPLE == 0
    if chunk:
        assert cost.predict(beside.with_chunk(begin, begin + chunk)) <= budget_s
    larger = chunk + CHUNK_MULTIPLE
    if larger <= most:
        assert cost.predict(beside.with_chunk(begin, begin + larger)) > budget_s


@given(COSTS, st.integers(0, 5000), st.floats(0, 10), st.integers(0, 64))
def test_the_largest_batch_keeps_the_budget_and_one_row_more_does_not(
    cost: StepCost, keys_each: int, budget_s: float, most: int
) -> None:
    rows = cost.largest_batch(keys_each=keys_each, budget_s=budget_s, most=most)
    assert 0 <= rows <= most
    if rows:
        assert cost.predict(StepSize(rows=rows, keys=rows * keys_each)) <= budget_s
    if rows < most:
        assert cost.predict(StepSize(rows=rows + 1, keys=(rows + 1) * keys_each)) > budget_s


def test_a_cost_is_told_in_microseconds() -> None:
    assert str(COST) == "1e+06 + 1e+05 + 5e+05 + 1e+04 + 1e+03 us (step, row, token, key, pair)"


def test_a_prefill_is_as_fast_as_the_largest_chunks_that_keep_the_bound() -> None:
    beside = StepSize().with_row(20)

    def rate(bound_s: float | None) -> float:
        return COST.prefill_speed(beside, chunk_tokens=100, bound_s=bound_s).rate

    assert rate(None) == rate(1000.0) == pytest.approx(100 / COST.predict(beside.with_chunk(0, 100)))
    assert rate(30.0) == pytest.approx(48 / COST.predict(beside.with_chunk(0, 48)))
    assert rate(5.0) == 0


def test_the_shortest_prefill_takes_a_step_of_what_is_there() -> None:
    assert COST.prefill_speed(StepSize(), chunk_tokens=100, bound_s=None).step_s == 1.0
    assert COST.prefill_speed(StepSize().with_row(20), chunk_tokens=100, bound_s=None).step_s == pytest.approx(1.3)
    nothing = StepCost(step_s=0, row_s=0, key_s=0, token_s=0, pair_s=0)
    assert nothing.prefill_speed(StepSize(), chunk_tokens=8, bound_s=None).rate == pytest.approx(8e6)
