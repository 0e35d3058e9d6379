"""What is learned from steps: right soon, in spite of noise, outliers and long one-sided hours; never nonsense."""

import random
from dataclasses import astuple
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.cost import StepCost, StepSize
from headrace.engine.measured_cost import (
    FEWEST,
    FIRST_FIT,
    FIT_EVERY,
    MOST_KINDS,
    MOST_MARGIN,
    STEPS_PER_KIND,
    MeasuredCost,
    nonnegative,
)
from headrace.errors import InputError

TRUE = StepCost(step_s=9e-3, row_s=1e-3, key_s=2e-6, token_s=7e-4, pair_s=3e-7)
TELLING = (
    StepSize().with_row(200),
    StepSize(rows=8, keys=8 * 200),
    StepSize(rows=8, keys=8 * 1500),
    StepSize().with_chunk(0, 64),
    StepSize().with_chunk(0, 256),
    StepSize().with_chunk(1500, 1756),
    StepSize(rows=4, keys=4 * 700).with_chunk(512, 576),
)


class Machine:
    """Steps of all sizes take what `cost` says, with noise; `spikes` of them several times as long."""

    def __init__(self, seed: int, *, noise: float = 0.05, spikes: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.noise, self.spikes = noise, spikes
        self.cost = TRUE
        self.measured = MeasuredCost()

    def size(self) -> StepSize:
        rng, size = self.rng, StepSize()
        for _ in range(rng.choice([0, 1, 1, 2, 4, 8])):
            size = size.with_row(rng.randrange(1, 2000))
        if not size.rows or rng.random() < 0.4:
            begin = rng.randrange(2000)
            size = size.with_chunk(begin, begin + rng.choice([16, 32, 64, 128, 256]))
        return size

    def run(self, size: StepSize, bound_s: float | None = None) -> None:
        seconds = self.cost.predict(size) * self.rng.lognormvariate(0, self.noise)
        if self.rng.random() < self.spikes:
            seconds *= self.rng.uniform(3, 10)
        self.measured.observe(size, seconds, bound_s)

    def run_many(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.run(self.size())

    def worst_error(self) -> float:
        """Of the prediction of any telling step."""
        cost = self.measured.cost
        assert cost is not None
        return max(abs(cost.predict(size) / self.cost.predict(size) - 1) for size in TELLING)


def slower(cost: StepCost, times: float) -> StepCost:
    step_s, row_s, token_s, key_s, pair_s = (times * seconds for seconds in astuple(cost))
    return StepCost(step_s=step_s, row_s=row_s, key_s=key_s, token_s=token_s, pair_s=pair_s)


# ---- what it learns --------------------------------------------------------------------------------------------


def test_without_noise_the_coefficients_come_out_whole() -> None:
    machine = Machine(0, noise=0.0)
    machine.run_many(2 * FIT_EVERY)
    assert machine.measured.cost is not None
    assert astuple(machine.measured.cost) == pytest.approx(astuple(TRUE), rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_with_noise_and_outliers_predictions_are_good_to_a_tenth(seed: int) -> None:
    machine = Machine(seed, spikes=0.05)
    machine.run_many(10 * FIT_EVERY)
    assert machine.worst_error() < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_a_few_telling_steps_are_enough_to_begin_with(seed: int) -> None:
    """As a calibration runs them."""
    machine = Machine(seed)
    for size in TELLING * 2:
        machine.run(size)
    machine.measured.fit()
    assert machine.worst_error() < 0.15


@pytest.mark.parametrize("seed", range(3))
def test_an_hour_of_decoding_does_not_make_it_forget_what_chunks_cost(seed: int) -> None:
    machine = Machine(seed)
    machine.run_many(200)
    for kv_len in range(300, 2300):
        machine.run(StepSize(rows=4, keys=4 * kv_len))
    assert machine.worst_error() < 0.1


def test_a_machine_that_has_become_slower_is_believed() -> None:
    machine = Machine(0)
    machine.run_many(300)
    machine.cost = slower(TRUE, 2.0)
    machine.run_many(400)
    assert machine.worst_error() < 0.15


def test_it_is_right_about_steps_that_come_now_whatever_the_others_took() -> None:
    machine = Machine(0)
    machine.run_many(300)
    machine.cost = slower(TRUE, 2.0)
    size = TELLING[1]
    for _ in range(300):
        machine.run(size)
    assert machine.measured.cost is not None
    assert machine.measured.cost.predict(size) == pytest.approx(machine.cost.predict(size), rel=0.05)


def test_more_kinds_of_steps_than_it_keeps_push_out_those_that_come_no_more() -> None:
    machine = Machine(0)
    for power in range(MOST_KINDS + 20):
        machine.run(StepSize(rows=1 << (power % 12), keys=1 << power // 12, chunk_tokens=1 << (power % 7)))
    assert f"{MOST_KINDS} kinds" in repr(machine.measured)
    machine.run_many(10 * FIT_EVERY)
    assert machine.worst_error() < 0.1


def test_a_kind_that_is_forgotten_counts_no_more() -> None:
    measured = MeasuredCost()
    chunk = StepSize().with_chunk(0, 64)
    for _ in range(STEPS_PER_KIND):
        measured.learn(chunk, 100.0)
    measured.fit()
    assert measured.cost is not None and measured.cost.predict(chunk) > 50
    for number in range(MOST_KINDS):
        size = StepSize(rows=1 << number % 8, keys=1 << number // 8)
        measured.learn(size, TRUE.predict(size))
    measured.fit()
    assert measured.cost.predict(chunk) < 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500), st.floats(0, 100)), min_size=1, max_size=60))
def test_whatever_was_measured_a_prediction_is_a_time_and_grows_with_the_step(
    steps: list[tuple[int, int, float]],
) -> None:
    measured = MeasuredCost()
    for rows, tokens, seconds in steps:
        measured.observe(StepSize(rows=rows, keys=100 * rows).with_chunk(7, 7 + tokens), seconds)
    measured.fit()
    assert measured.cost is not None
    growing = [measured.cost.predict(StepSize(rows=n, keys=9 * n).with_chunk(0, n)) for n in range(0, 2000, 400)]
    assert growing[0] >= 0 and growing == sorted(growing)
    assert 1 <= measured.margin <= MOST_MARGIN


@given(st.integers(0, 10**6))
def test_a_fit_is_the_best_of_all_nonnegative_ones(seed: int) -> None:
    """None that solves the equations of some features alone is better; the slow way, one by one."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0, 1, (12, 5)) * 10.0 ** rng.integers(-3, 3, 5)
    targets = rng.uniform(0, 2, 12)

    def loss(coefficients: np.ndarray) -> float:
        return float(((rows @ coefficients - targets) ** 2).sum())

    found = nonnegative(rows.T @ rows, rows.T @ targets)
    assert (found >= 0).all()
    for num in range(1, 6):
        for used in map(list, combinations(range(5), num)):
            other = np.zeros(5)
            other[used] = np.linalg.lstsq(rows[:, used], targets, rcond=None)[0]
            if (other >= 0).all():
                assert loss(found) <= loss(other) * (1 + 1e-6) + 1e-9


# ---- when, and what it tells -----------------------------------------------------------------------------------


def test_nothing_is_predicted_before_there_were_some_steps() -> None:
    machine = Machine(0)
    machine.run_many(FIRST_FIT - 1)
    assert machine.measured.cost is None
    machine.run_many(1)
    first = machine.measured.cost
    assert first is not None
    machine.run_many(FIT_EVERY - FIRST_FIT - 1)
    assert machine.measured.cost is first
    machine.run_many(1)
    assert machine.measured.cost is not first


def test_errors_are_of_predictions_that_were_made_before() -> None:
    machine = Machine(0, noise=0.0)
    machine.run_many(5 * FIT_EVERY)
    told = machine.measured.statistics()
    assert told.error_p90 is not None and told.error_p90 < 0.01
    machine.cost = slower(TRUE, 2.0)
    machine.run_many(FIT_EVERY - 1)  # no fit could know of it
    told = machine.measured.statistics()
    assert told.error_p90 == pytest.approx(0.5, abs=0.01)


def test_before_there_are_enough_errors_none_is_told() -> None:
    machine = Machine(0)
    machine.run_many(FIRST_FIT + FEWEST - 1)
    assert machine.measured.statistics().error_p50 is None
    machine.run_many(1)
    assert machine.measured.statistics().error_p50 is not None


def test_the_margin_is_what_steps_with_rows_and_chunks_take_beyond_their_prediction() -> None:
    machine = Machine(0, noise=0.0)
    machine.run_many(5 * FIT_EVERY)
    assert machine.measured.margin == pytest.approx(1.0, abs=0.02)
    machine.noise = 0.15
    machine.run_many(20 * FIT_EVERY)
    assert 1.08 < machine.measured.margin < 1.35


def test_what_was_only_learned_says_nothing_of_plans() -> None:
    machine = Machine(0)
    for _ in range(5 * FIT_EVERY):
        size = machine.size()
        machine.measured.learn(size, machine.rng.choice([1, 1, 2]) * TRUE.predict(size))
    assert machine.measured.cost is not None
    assert machine.measured.margin == 1.0
    assert machine.measured.statistics().error_p50 is None


def test_a_long_step_was_planned_so_or_not_foreseen() -> None:
    machine = Machine(0, noise=0.0)
    machine.run_many(5 * FIT_EVERY)
    size = TELLING[4]
    took = TRUE.predict(size)
    machine.measured.observe(size, took, None)
    machine.measured.observe(size, took, 1.1 * took)
    told = machine.measured.statistics()
    assert (told.num_long_planned, told.num_long_unforeseen) == (0, 0)
    machine.measured.observe(size, took, 0.5 * took)
    machine.measured.observe(size, 3 * took, 2 * took)
    told = machine.measured.statistics()
    assert (told.num_long_planned, told.num_long_unforeseen) == (1, 1)


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_what_is_no_duration_is_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="seconds: must be at least 0, is"):
        MeasuredCost().learn(StepSize().with_row(1), seconds)


def test_a_clock_that_stands_still_does_no_harm() -> None:
    measured = MeasuredCost()
    for _ in range(FIRST_FIT):
        measured.observe(StepSize().with_row(1), 0.0)
    assert measured.cost is not None
    assert measured.cost.predict(StepSize().with_row(1)) == pytest.approx(1e-6)
