"""What is predicted of a request, and which decoders keep what was promised: rule by rule, then over any fleet."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.gateway.forecast import (
    NOBODY,
    Ahead,
    Fleet,
    Forecast,
    Promise,
    forecast,
    idle,
    kept_by,
    pace_with,
    prefill_rate,
)
from headrace.gateway.route import DecoderView, PrefillerView, Wanted
from headrace.protocol.control import Decoding, Prefilling

WANTED = Wanted(num_tokens=101, max_tokens=20)
FLEX = replace(WANTED, tier="flex")


def at(rate: float, *, step_s: float = 0.0, chunk_tokens: int = 50) -> Prefilling:
    return Prefilling(step_s=step_s, rate=rate, chunk_tokens=chunk_tokens)


def rows(num_rows: int, *, row_s: float = 0.01, num_interactive: int = 0) -> Decoding:
    """10 ms a row, and nothing else."""
    return Decoding(
        step_s=0.0, row_s=row_s, key_s=0.0, num_rows=num_rows, num_keys=num_rows * 100, num_interactive=num_interactive
    )


def decoder(uuid: str = "d", *, running: int = 0, **changes: object) -> DecoderView:
    plain = DecoderView(
        uuid=uuid, num_free_pages=1000, page_size=16, num_running=running, max_running=8, decoding=rows(running)
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def prefiller(uuid: str = "p", *, queued: int = 0, **changes: object) -> PrefillerView:
    plain = PrefillerView(uuid=uuid, num_queued_tokens=queued, max_tokens=4096, prefilling=at(1000.0))
    return replace(plain, **changes)  # type: ignore[arg-type]


def fleet(*decoders: DecoderView, prefillers: Sequence[PrefillerView] = (), **changes: object) -> Fleet:
    return replace(Fleet(decoders=decoders, prefillers=prefillers), **changes)  # type: ignore[arg-type]


def ttft_s(*decoders: DecoderView, wanted: Wanted = WANTED, ahead: Ahead = NOBODY, **changes: object) -> float | None:
    return forecast(fleet(*decoders, **changes), wanted, ahead).ttft_s  # type: ignore[arg-type]


# ---- the first token -------------------------------------------------------------------------------------------


def test_where_nothing_was_measured_nothing_is_predicted() -> None:
    nothing = fleet(decoder(decoding=None), prefillers=[prefiller(prefilling=None)], stay_s=3.0)
    assert forecast(nothing, WANTED, Ahead(num_requests=9, num_tokens=9999)) == Forecast()
    assert forecast(fleet(), WANTED) == Forecast()


def test_the_line_goes_at_the_rate_of_all_prefillers_and_an_unmeasured_one_counts_as_the_fastest() -> None:
    ahead = Ahead(num_requests=1, num_tokens=600)
    two = [prefiller("p"), prefiller("q", prefilling=at(2000.0))]
    assert ttft_s(decoder(), prefillers=two, ahead=ahead) == pytest.approx(600 / 3000 + 100 / 2000)
    three = [*two, prefiller("r", prefilling=None)]
    assert prefill_rate(fleet(decoder(), prefillers=three)) == 5000.0


def test_without_prefillers_the_decoders_rates_count() -> None:
    both = [decoder(uuid, prefilling=at(500.0)) for uuid in ("d", "e")]
    assert ttft_s(*both, ahead=Ahead(num_requests=1, num_tokens=600)) == pytest.approx(600 / 1000 + 100 / 500)


def test_of_background_prompts_an_interactive_one_waits_for_a_chunk() -> None:
    busy = prefiller(queued=5000, num_background_tokens=4900)
    assert ttft_s(decoder(), prefillers=[busy]) == pytest.approx((100 + 50 + 100) / 1000)
    assert ttft_s(decoder(), prefillers=[busy], wanted=FLEX) == pytest.approx((5000 + 100) / 1000)


def test_without_room_it_waits_for_as_many_ends_as_stand_before_it_and_one() -> None:
    full = [decoder("d", running=8), decoder("e", running=8)]
    alone = ttft_s(*full, prefillers=[prefiller()])
    assert alone == pytest.approx(0.1)  # nobody knows how long they stay
    ahead = Ahead(num_requests=3)
    assert ttft_s(*full, prefillers=[prefiller()], stay_s=4.0, ahead=ahead) == pytest.approx(4 * 4.0 / 16 + 0.1)
    roomy = [full[0], decoder("e", running=5)]
    assert ttft_s(*roomy, prefillers=[prefiller()], stay_s=4.0, ahead=ahead) == pytest.approx(1 * 4.0 / 13 + 0.1)
    crowded = decoder("d", running=2, num_free_pages=5)  # a request wants 8
    assert ttft_s(crowded, prefillers=[prefiller()], stay_s=4.0) == pytest.approx(4.0 / 2 + 0.1)


def test_a_decoder_whose_pace_would_suffer_has_no_room() -> None:
    busy = decoder(running=4)
    changes = {"prefillers": [prefiller()], "stay_s": 2.0}
    assert ttft_s(busy, **changes, tpot_s=0.05) == pytest.approx(0.1)
    assert ttft_s(busy, **changes, tpot_s=0.049) == pytest.approx(2.0 / 4 + 0.1)


def test_an_idle_fleet_has_no_queue_and_all_of_its_room() -> None:
    busy = fleet(decoder(running=8, num_free_pages=0), prefillers=[prefiller(queued=900)], stay_s=9.0, tpot_s=0.001)
    assert forecast(idle(busy), WANTED) == Forecast(ttft_s=pytest.approx(0.1), tpot_s=pytest.approx(0.01))


PLACES = st.builds(Ahead, num_requests=st.integers(0, 50), num_tokens=st.integers(0, 5000))


@given(st.integers(0, 8), st.integers(0, 40), st.lists(st.integers(0, 3000), min_size=1, max_size=3), PLACES, PLACES)
def test_who_stands_further_behind_is_never_predicted_to_come_sooner(
    running: int, pages: int, queues: list[int], ahead: Ahead, more: Ahead
) -> None:
    standing = fleet(
        decoder(running=running, num_free_pages=pages),
        prefillers=[prefiller(f"p{nth}", queued=queued) for nth, queued in enumerate(queues)],
        stay_s=2.0,
        tpot_s=0.05,
    )
    behind = Ahead(num_requests=ahead.num_requests + more.num_requests, num_tokens=ahead.num_tokens + more.num_tokens)
    sooner, later = (forecast(standing, WANTED, place).ttft_s for place in (ahead, behind))
    assert sooner is not None and later is not None and sooner <= later


# ---- further tokens --------------------------------------------------------------------------------------------


def test_a_pace_is_that_of_a_step_with_one_more() -> None:
    told = Decoding(step_s=0.004, row_s=0.001, key_s=1e-6, num_rows=3, num_keys=2000, num_interactive=0)
    assert pace_with(decoder(running=3, decoding=told), 500) == pytest.approx(0.004 + 4 * 0.001 + 2500e-6)
    assert pace_with(decoder(decoding=None), 500) is None
    slow = decoder("e", running=6)
    assert forecast(fleet(slow, decoder(running=3)), WANTED).tpot_s == pytest.approx(0.04)


# ---- what others were promised ---------------------------------------------------------------------------------


def kept(*decoders: DecoderView, wanted: Wanted = FLEX, promise: Promise, **changes: object) -> list[DecoderView]:
    return kept_by(fleet(*decoders, **changes), wanted, lambda view: promise)  # type: ignore[arg-type]


def test_background_work_leaves_room_for_one_interactive_request_more() -> None:
    promise = Promise(tpot_s=0.05)
    assert kept(decoder(running=3), decoder("e", running=4), promise=promise) == [decoder(running=3)]
    assert kept(decoder(running=4), decoder("e", running=4), wanted=WANTED, promise=promise, tpot_s=0.05) == [
        decoder(running=4),
        decoder("e", running=4),
    ]
    assert kept(decoder(running=5), wanted=WANTED, promise=promise, tpot_s=0.05) == []


def test_where_interactive_requests_have_a_budget_background_work_leaves_one_of_them_a_row_and_pages() -> None:
    promise = Promise(has_budget=True)
    roomy = decoder(running=6, num_free_pages=16)  # a request wants 8
    assert kept(roomy, promise=promise) == [roomy]
    for full in (replace(roomy, num_running=7), replace(roomy, num_free_pages=15)):
        assert kept(full, promise=promise) == []
        assert kept(full, promise=Promise()) == [full]
        assert kept(full, promise=promise, wanted=WANTED) == [full]
        alone = replace(full, num_running=0)
        assert kept(alone, promise=promise) == [alone]


def test_one_that_is_alone_may_always_run() -> None:
    slow = decoder(decoding=rows(0, row_s=9.0))
    for wanted in (WANTED, FLEX):
        assert kept(slow, wanted=wanted, promise=Promise(tpot_s=0.001), tpot_s=0.001) == [slow]


def test_without_promises_and_measurements_nobody_waits() -> None:
    busy = decoder(running=7)
    assert kept(busy, promise=Promise(is_due=True)) == [busy]
    unmeasured = decoder(running=7, decoding=None, prefilling=None)
    assert kept(unmeasured, promise=Promise(tpot_s=0.001, is_due=True)) == [unmeasured]


def test_a_background_prompt_is_not_computed_beside_interactive_streams_that_it_would_hold_up() -> None:
    # A step with a chunk of 50 takes 0.1 s.
    busy = decoder(running=1, prefilling=at(500.0))
    due = Promise(tpot_s=0.09, is_due=True)
    assert kept(busy, promise=due) == []  # nobody else could compute it
    (elsewhere,) = kept(busy, promise=due, prefillers=[prefiller()])
    assert elsewhere.prefilling is not None and elsewhere.prefilling.rate == 0
    assert kept(replace(busy, is_colocated=True), promise=due, prefillers=[prefiller()]) == []
    for allowed in (replace(due, tpot_s=0.1), replace(due, is_due=False)):
        assert kept(busy, promise=allowed) == [busy]
    assert kept(busy, promise=due, wanted=replace(FLEX, num_tokens=45)) == [busy]  # 44 are no whole chunk
    assert kept(replace(busy, cached_tokens=96), promise=due) != []
    assert kept(replace(busy, prefilling=at(0.0, chunk_tokens=0)), promise=due) == []  # it has said so itself


@given(st.integers(0, 8), st.floats(0.001, 0.2), st.floats(0.001, 0.2))
def test_where_background_work_may_run_an_interactive_request_may_come_after_it(
    running: int, row_s: float, tpot_s: float
) -> None:
    before = decoder(running=running, decoding=rows(running, row_s=row_s))
    after = decoder(running=running + 1, decoding=rows(running + 1, row_s=row_s))
    if running and kept(before, promise=Promise(tpot_s=tpot_s)):
        assert kept(after, wanted=WANTED, promise=Promise(), tpot_s=tpot_s * 1.000001)
