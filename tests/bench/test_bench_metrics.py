from math import inf, isnan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.metrics import (
    Goodput,
    Slo,
    Spread,
    Summary,
    attainment,
    by_length,
    goodput,
    interval,
    itls_in_flight_s,
    itls_s,
    keeps,
    percentile,
    second_token_s,
    summarize,
    tpot_s,
    ttft_s,
)
from headrace.bench.records import RequestRecord, Waterfall

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def record(index: int = 0, arrival_s: float = 0.0, token_s: tuple[float, ...] = (), **changes: object) -> RequestRecord:
    plain = RequestRecord(
        index=index,
        arrival_s=arrival_s,
        sent_s=arrival_s,
        prompt_tokens=100,
        max_tokens=len(token_s),
        token_s=token_s,
    )
    return msgspec.structs.replace(plain, **changes)


def test_times_are_from_the_intended_arrival_to_the_bytes() -> None:
    one = record(arrival_s=1.0, token_s=(1.5, 1.7, 1.8), sent_s=1.4)
    assert ttft_s(one) == pytest.approx(0.5) and second_token_s(one) == pytest.approx(0.2)
    assert tpot_s(one) == pytest.approx(0.15) and itls_s(one) == pytest.approx([0.2, 0.1])
    none = record(max_tokens=3)
    assert (ttft_s(none), second_token_s(none), tpot_s(none)) == (inf, None, None)


@pytest.mark.parametrize(
    ("kept", "changes"),
    [
        (True, {}),
        (False, {"arrival_s": -0.6}),
        (False, {"token_s": (0.5, 0.8, 1.1)}),
        (False, {"error": "gone"}),
        (False, {"max_tokens": 4}),
    ],
)
def test_a_request_keeps_both_budgets_whole_or_it_does_not(kept: bool, changes: dict[str, object]) -> None:
    assert keeps(msgspec.structs.replace(record(token_s=(0.5, 0.6, 0.7)), **changes), SLO) is kept


def test_what_failed_counts_as_missed() -> None:
    records = [record(0, token_s=(0.5, 0.6)), record(1, error="429", max_tokens=2)]
    assert attainment(records, SLO) == 0.5 and attainment([], SLO) == 0.0


def test_percentiles_are_linear_between_the_two_nearest() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5 and percentile([5.0], 0.99) == 5.0
    assert percentile([1.0, inf], 0.0) == 1.0 and percentile([1.0, inf, inf], 0.5) == inf and isnan(percentile([], 0.5))


def test_a_gap_is_in_flight_while_somebody_else_waits_for_a_first_token() -> None:
    streaming = record(0, 0.0, (1.0, 2.0, 3.0, 4.0, 5.0))
    waiting = record(1, 2.5, (3.5, 3.6))
    assert itls_in_flight_s([streaming, waiting]) == pytest.approx([1.0, 1.0])
    assert itls_in_flight_s([streaming]) == []
    failed = record(2, 4.5, error="503", max_tokens=3)  # waited for no time
    assert itls_in_flight_s([streaming, failed]) == []


@given(st.lists(st.tuples(st.floats(0, 20), st.lists(st.floats(0.01, 5), max_size=6)), max_size=12))
def test_gaps_in_flight_are_those_that_a_look_at_every_pair_finds(spans: list[tuple[float, list[float]]]) -> None:
    records = []
    for index, (arrival_s, gaps) in enumerate(spans):
        times, now = [], arrival_s
        for gap in gaps:
            now += gap
            times.append(now)
        records.append(record(index, arrival_s, tuple(times)))
    slow = [
        late - early
        for one in records
        for early, late in zip(one.token_s, one.token_s[1:], strict=False)
        if any(
            other.index != one.index and other.token_s and other.arrival_s < late and other.token_s[0] > early
            for other in records
        )
    ]
    assert sorted(itls_in_flight_s(records)) == pytest.approx(sorted(slow))


def test_a_summary_tells_rates_spreads_and_where_the_time_went() -> None:
    records = [
        record(0, 0.0, (0.5, 0.6, 0.8), cached_tokens=40, waterfall=Waterfall(queue_s=0.1, prefill_s=0.3)),
        record(1, 1.0, (2.0, 2.05), waterfall=Waterfall(queue_s=0.3)),
        record(2, 1.5, error="429", max_tokens=2),
    ]
    told = summarize(records, SLO)
    assert (told.num_requests, told.num_failed, told.attainment) == (3, 1, 1 / 3)
    assert told.duration_s == pytest.approx(2.05) and told.output_tokens_s == pytest.approx(5 / 2.05)
    assert told.ttft.p50 == 1.0 and told.ttft.max is None and told.ttft.num == 3  # one never came
    assert told.stall_s == pytest.approx(0.2) and told.itl.num == 3 and told.cached_share == pytest.approx(0.2)
    assert told.waterfall == Waterfall(queue_s=0.2, prefill_s=0.15)
    assert msgspec.json.decode(msgspec.json.encode(told), type=Summary) == told


def test_nothing_is_told_of_nothing() -> None:
    told = summarize([], SLO)
    assert told.ttft == Spread() and told.stall_s is None and told.num_requests == 0


def test_short_and_long_prompts_are_told_apart_where_there_are_both() -> None:
    short, long = record(0, token_s=(0.1, 0.2)), record(1, token_s=(0.1, 0.2), prompt_tokens=1000)
    assert by_length([short]) == {"all": [short]} and by_length([long]) == {"all": [long]}
    assert by_length([short, long]) == {"all": [short, long], "short": [short], "long": [long]}


def test_goodput_is_where_the_attainment_crosses_its_target() -> None:
    points = [(1.0, 1.0), (2.0, 1.0), (4.0, 0.8), (2.0, 0.9)]
    assert goodput(points, 0.9) == Goodput(rate=pytest.approx(2 + 2 * 0.05 / 0.15))
    assert goodput(points[:2], 0.9) == Goodput(rate=2.0, is_bound=True)
    assert goodput([(1.0, 0.5), (2.0, 1.0)], 0.9) == Goodput(rate=0.0)
    assert goodput([], 0.9) == Goodput(rate=0.0)


def test_an_interval_of_few_values_is_wide_and_of_one_there_is_none() -> None:
    assert interval([3.0]).low is None and not interval([3.0]).excludes_zero
    few, many = interval([1.0, 2.0, 3.0]), interval([1.0, 2.0, 3.0] * 10)
    assert few.mean == many.mean == pytest.approx(2.0)
    assert few.low is not None and many.low is not None and few.low < 0.5 < many.low and many.excludes_zero
    assert interval([1.0, 2.0, 3.0]) == few  # by seed


def test_intervals_hold_the_mean_about_as_often_as_they_say() -> None:
    import random

    draw = random.Random(5)
    held = 0
    for seed in range(300):
        told = interval([draw.gauss(1.0, 1.0) for _ in range(5)], seed=seed, num_draws=300)
        assert told.low is not None and told.high is not None
        held += told.low <= 1.0 <= told.high
    assert 0.9 <= held / 300 <= 0.99
