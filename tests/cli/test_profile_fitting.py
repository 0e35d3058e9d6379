"""From steps and requests to what a simulation takes: what was planted is found."""

import random

import pytest

from headrace.bench.records import RequestRecord
from headrace.cli.profile.fitting import (
    Alone,
    came_by_themselves,
    fit_link,
    fit_steps,
    left_over_s,
    were_alone,
)
from headrace.cli.profile.load import MOST_ROWS, OUTPUTS, Asked, Pace, calibrating, probe
from headrace.cli.profile.step_log import Timed
from headrace.engine.cost import StepCost, StepSize
from headrace.errors import InputError

COST = StepCost(step_s=0.012, row_s=0.0004, token_s=0.0011, key_s=6e-6, pair_s=6e-7)


def steps(num: int, *, noise: float, chunks: bool = True) -> list[Timed]:
    draw, found = random.Random(1), []
    for _ in range(num):
        size = StepSize()
        for _ in range(draw.randrange(0, 17)):
            size = size.with_row(draw.randint(16, 3000))
        if chunks and (draw.random() < 0.4 or not size.rows):
            begin = 256 * draw.randrange(0, 8)
            size = size.with_chunk(begin, begin + draw.randint(1, 256))
        found.append(Timed(size=size, seconds=COST.predict(size) * draw.uniform(1 - noise, 1 + noise)))
    return found


def test_a_fit_finds_the_coefficients_that_were_planted() -> None:
    fitted = fit_steps("colocated", steps(400, noise=0.0))
    for name in ("step_s", "row_s", "token_s", "key_s", "pair_s"):
        assert getattr(fitted.cost, name) == pytest.approx(getattr(COST, name), rel=1e-3)
    assert fitted.num_steps == 400 and fitted.error_p90 < 1e-3


def test_a_fit_of_noisy_steps_is_right_of_all_of_them_together() -> None:
    timed = steps(1000, noise=0.5)
    fitted = fit_steps("colocated", timed)
    predicted = sum(fitted.cost.predict(one.size) for one in timed)
    assert predicted == pytest.approx(sum(one.seconds for one in timed), rel=0.02)
    assert 0.15 < fitted.error_p50 < 0.5 < fitted.error_p90


def test_kinds_of_steps_that_others_had_are_in_the_fit_and_not_in_the_errors() -> None:
    rows, others = steps(200, noise=0.0, chunks=False), steps(200, noise=0.0)
    fitted = fit_steps("decoder", [one for one in rows if one.size.rows], [one for one in others if one.size.rows])
    assert fitted.cost.token_s == pytest.approx(COST.token_s, rel=1e-3)


def test_too_few_steps_tell_nothing() -> None:
    with pytest.raises(InputError, match="seconds: must be long enough for 10 steps of a decoder, were 3"):
        fit_steps("decoder", steps(3, noise=0.0))


# ---- requests --------------------------------------------------------------------------------------------------


def record(arrival_s: float, *token_s: float) -> RequestRecord:
    return RequestRecord(
        index=0,
        id=f"{arrival_s}",
        arrival_s=arrival_s,
        sent_s=arrival_s,
        prompt_tokens=8,
        max_tokens=2,
        token_s=token_s,
    )


def test_what_is_left_over_is_of_those_that_were_alone() -> None:
    records = [record(0.0, 0.1, 0.2), record(1.0, 1.5, 2.0), record(1.9, 2.1, 2.2), record(3.0), record(3.0, 3.2)]
    assert were_alone(records) == [records[0], records[4]]
    assert came_by_themselves(records) == records[:3]
    parts = {"0.0": {"prefill": 60.0, "first step": 30.0, "queue": 5.0}, "1.0": {"prefill": 400.0}}
    left = left_over_s(records, lambda one: parts.get(one.id), ("prefill", "first step"))
    assert left == [pytest.approx(0.01)]


@pytest.mark.parametrize("bytes_s", [2e6, 5e7])
def test_a_link_is_told_by_what_transfers_added(bytes_s: float) -> None:
    alone = []
    for num_tokens in (16, 100, 256, 400, 700, 1000):
        num_bytes, last_bytes = num_tokens * 20_000, (num_tokens % 256 or 256) * 20_000
        exposed_s = 0.003 + max(last_bytes / 10 / bytes_s, num_bytes / bytes_s - num_tokens * 1e-3)
        alone.append(
            Alone(num_bytes=num_bytes, last_bytes=last_bytes, prefill_s=num_tokens * 1e-3, exposed_s=exposed_s)
        )
    link = fit_link(alone, num_layers=10, bytes_s=None)
    assert link.bytes_s == pytest.approx(bytes_s, rel=0.15) and link.latency_s == pytest.approx(0.003, abs=0.004)
    given = fit_link(alone, num_layers=10, bytes_s=bytes_s)
    assert given.bytes_s == bytes_s and given.latency_s == pytest.approx(0.003)


def test_without_transfers_there_is_no_limit() -> None:
    assert fit_link([], num_layers=4, bytes_s=None).bytes_s >= 1e11


# ---- what is asked ---------------------------------------------------------------------------------------------


def asked(*, longest: int = 8192, is_split: bool = False) -> Asked:
    return Asked(num_prefilling=1, num_decoding=2, is_split=is_split, longest=longest, max_running=32)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("longest", [200, 8192])
def test_what_is_asked_fits_the_model_and_the_time(longest: int, is_split: bool) -> None:
    pace, arm = Pace(token_s=1.5e-3, step_s=0.015), asked(longest=longest, is_split=is_split)
    asking = calibrating(arm, pace, seconds=30.0, seed=1)
    load = asking.arrivals
    assert (asking.alone_s > 0) == is_split
    assert all(one.prompt_tokens + one.max_tokens <= longest for one in load.arrivals)
    assert asking == calibrating(arm, pace, seconds=30.0, seed=1)
    last = load.arrivals[-1].at_s
    assert sum(one.at_s == last for one in load.arrivals) == 2 * MOST_ROWS and last < 30.0
    assert {one.max_tokens for one in load.arrivals} <= set(range(8, OUTPUTS[1] + 1))
    assert probe(arm, seed=1).arrivals[0].prompt_tokens <= 1000


def test_a_faster_machine_is_asked_more_up_to_a_limit() -> None:
    slow, fast = (
        calibrating(asked(), Pace(token_s=token_s, step_s=10 * token_s), seconds=30.0, seed=1).arrivals
        for token_s in (2e-3, 1e-6)
    )
    assert len(slow.arrivals) < 100 < 600 < len(fast.arrivals) < 700
