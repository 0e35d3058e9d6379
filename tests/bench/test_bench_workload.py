import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.prompts import prompt_ids
from headrace.bench.synthetic import KINDS, Process, drawn, read_process, rearrived
from headrace.bench.workload import Arrival, ArrivalList, Fit, at_rate, clipped, cut, part
from headrace.errors import InputError

FIT = Fit(max_prompt_tokens=100, max_output_tokens=20, max_model_len=110)


def a_list(*arrivals: Arrival, **changes: object) -> ArrivalList:
    return ArrivalList(name="some", seed=1, arrivals=arrivals, **changes)  # type: ignore[arg-type]


def one(at_s: float, prompt_tokens: int = 50, max_tokens: int = 10, blocks: tuple[int, ...] = ()) -> Arrival:
    return Arrival(at_s=at_s, prompt_tokens=prompt_tokens, max_tokens=max_tokens, blocks=blocks)


def test_the_digest_is_of_what_is_asked_and_when() -> None:
    asked = a_list(one(0.0), one(1.0))
    assert msgspec.structs.replace(asked, name="another", notes=("n",)).digest == asked.digest
    for other in (a_list(one(0.0), one(1.5)), a_list(one(0.0), one(1.0, 51)), msgspec.structs.replace(asked, seed=2)):
        assert other.digest != asked.digest
    assert msgspec.json.decode(msgspec.json.encode(asked), type=ArrivalList).digest == asked.digest


def test_a_part_begins_at_nought_and_says_which_it_is() -> None:
    kept = cut(a_list(one(0.0), one(3.0), one(4.0), one(9.0)), begin_s=2.0, duration_s=5.0)
    assert [arrival.at_s for arrival in kept.arrivals] == [0.0, 1.0]
    assert kept.notes == ("2 of 4 requests, from 2 s on for 5 s",)
    with pytest.raises(InputError, match="must have requests from 20 s on"):
        cut(kept, begin_s=20.0, duration_s=1.0)


def test_parts_of_one_size_follow_one_another_and_begin_again() -> None:
    whole = a_list(*(one(float(nth), 10 + nth) for nth in range(7)))
    parts = [part(whole, nth=nth, num_requests=3) for nth in range(4)]
    assert [[arrival.prompt_tokens for arrival in found.arrivals] for found in parts] == [
        *([10, 11, 12], [13, 14, 15]),
        *([10, 11, 12], [13, 14, 15]),
    ]
    assert all([arrival.at_s for arrival in found.arrivals] == [0.0, 1.0, 2.0] for found in parts)
    assert parts[1].notes == ("requests 4 to 6 of 7",)
    assert part(whole, nth=3, num_requests=9) is whole


def test_a_rate_stretches_time_and_nothing_else() -> None:
    slow = a_list(one(0.0), one(1.0), one(4.0, 60))
    fast = at_rate(slow, 1.0)
    assert fast.rate == pytest.approx(1.0) and [arrival.at_s for arrival in fast.arrivals] == [0.0, 0.5, 2.0]
    assert [arrival.prompt_tokens for arrival in fast.arrivals] == [50, 50, 60]
    for rate, wrong in ((0.0, slow), (float("nan"), slow), (1.0, a_list(one(0.0)))):
        with pytest.raises(InputError):
            at_rate(wrong, rate)


def test_what_is_too_long_is_clipped_and_counted() -> None:
    kept = clipped(a_list(one(0.0, 50, 10), one(1.0, 500, 10), one(2.0, 50, 200)), FIT)
    assert [(arrival.prompt_tokens, arrival.max_tokens) for arrival in kept.arrivals] == [(50, 10), (100, 10), (50, 20)]
    assert kept.notes[-1].startswith("2 of 3 requests clipped to 100 prompt and 20 output tokens, 110 together")
    assert clipped(kept, FIT) is kept


def test_shared_blocks_stay_shared_when_prompts_are_scaled_down() -> None:
    long = a_list(one(0.0, 160, 8, (1, 2)), one(1.0, 180, 8, (1, 3)), block_tokens=64)
    kept = clipped(long, FIT)
    assert kept.block_tokens == 32 and "1/2 of the trace's" in kept.notes[0]
    ids = [prompt_ids(kept, index) for index in range(2)]
    assert [len(each) for each in ids] == [80, 90] and ids[0][:32] == ids[1][:32] and ids[0][32:64] != ids[1][32:64]


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 500)), min_size=1, max_size=20))
def test_whatever_was_asked_fits_when_it_is_clipped(sizes: list[tuple[int, int]]) -> None:
    kept = clipped(a_list(*(one(float(nth), *size) for nth, size in enumerate(sizes))), FIT)
    for arrival in kept.arrivals:
        assert 1 <= arrival.prompt_tokens <= 100 and 1 <= arrival.max_tokens <= 20
        assert arrival.prompt_tokens + arrival.max_tokens <= 110


def test_prompts_are_the_same_each_time_and_share_only_their_blocks() -> None:
    asked = a_list(one(0.0, 50), one(1.0, 50), one(2.0, 40, 8, (7,)), one(3.0, 40, 8, (7,)), block_tokens=32)
    ids = [prompt_ids(asked, index) for index in range(4)]
    assert ids == [prompt_ids(asked, index) for index in range(4)]
    assert [len(each) for each in ids] == [50, 50, 40, 40]
    assert ids[0][:2] != ids[1][:2] and ids[2][:32] == ids[3][:32] and ids[2][32:34] != ids[3][32:34]
    assert all(300 <= token_id < 49_000 for token_id in ids[0])
    assert prompt_ids(msgspec.structs.replace(asked, seed=2), 0) != ids[0]


def test_drawn_workloads_have_the_same_requests_at_every_rate() -> None:
    slow, fast = (drawn("mixed", rate=rate, num_requests=200, seed=3) for rate in (1.0, 8.0))
    assert [arrival.prompt_tokens for arrival in slow.arrivals] == [arrival.prompt_tokens for arrival in fast.arrivals]
    assert fast.rate == pytest.approx(8 * slow.rate) and 5 < fast.rate < 12
    num_long = sum(arrival.prompt_tokens >= 1000 for arrival in slow.arrivals)
    assert 20 <= num_long <= 60 and set(KINDS) == {"short", "long", "mixed"}
    with pytest.raises(InputError, match="must be short, long, mixed or a trace file, is 'tall'"):
        drawn("tall", rate=1.0, num_requests=2, seed=1)


@pytest.mark.parametrize(("text", "cv"), [("constant", 0.0), ("poisson", 1.0), ("gamma:3", 3.0)])
def test_gaps_have_the_spread_that_was_asked_for(text: str, cv: float) -> None:
    gaps = read_process(text).gaps_s(4.0, random.Random(1))
    values = [next(gaps) for _ in range(20_000)]
    mean = sum(values) / len(values)
    spread = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.08) and spread / mean == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize("text", ["", "often", "gamma:x", "gamma:0", "gamma:99", "poisson:2"])
def test_a_process_that_there_is_not_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match="must be poisson, constant or gamma:CV"):
        read_process(text)


def test_other_arrivals_leave_the_requests_as_they_are() -> None:
    asked = drawn("short", rate=1.0, num_requests=20, seed=1)
    moved = rearrived(asked, Process(name="constant", cv=0.0), 2.0)
    assert [arrival.at_s for arrival in moved.arrivals[:3]] == [0.0, 0.5, 1.0]
    assert [arrival.prompt_tokens for arrival in moved.arrivals] == [
        arrival.prompt_tokens for arrival in asked.arrivals
    ]
    assert moved.notes[-1] == "constant arrivals in place of its own, 2 requests/s"
