"""Who is let in: lengths against limits, defaults, and the queue."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.gateway.admit import Queue, admit, longest_sequence, predicted_wait_s, require_in_time
from headrace.gateway.budgets import Budget
from headrace.gateway.forecast import Ahead, Fleet, Forecast
from headrace.gateway.generation import BudgetExceeded, Overloaded
from headrace.gateway.openai_errors import error_answer
from headrace.gateway.route import DecoderView, PrefillerView, Wanted
from headrace.protocol.control import MAX_PROMPT_TOKENS, Decoding, Limits, Prefilling

LIMITS = Limits(max_model_len=100, pool_tokens=160, page_size=16, max_running=4)
EMPTY = Queue(num_queued=0, max_queued=2, placed_at=())


def limits(max_model_len: int, pool_tokens: int) -> Limits:
    return Limits(max_model_len=max_model_len, pool_tokens=pool_tokens, page_size=16, max_running=4)


def test_what_fits_is_let_in_as_it_is() -> None:
    assert admit([1] * 60, 40, LIMITS, EMPTY, 0.0) == 40


def test_without_a_wish_everything_that_fits_is_given() -> None:
    assert admit([1] * 60, None, LIMITS, EMPTY, 0.0) == 40
    assert admit([1] * 99, None, LIMITS, EMPTY, 0.0) == 1


def test_too_many_tokens_to_come_are_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match=re.escape("max_tokens: must be at most 40, is 41")) as refused:
        admit([1] * 60, 41, LIMITS, EMPTY, 0.0)
    assert refused.value.field == "max_tokens"
    assert "the prompt's 60 tokens" in str(refused.value) and "the 100 that are served" in str(refused.value)


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_a_prompt_that_leaves_no_room_is_itself_at_fault(max_tokens: int | None) -> None:
    with pytest.raises(InputError, match="prompt: must be at most 99 tokens, is 100") as refused:
        admit([1] * 100, max_tokens, LIMITS, EMPTY, 0.0)
    assert refused.value.field == "prompt"
    assert f"with max_tokens {max_tokens or 1} " in str(refused.value)


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "text"),
    [
        ([], 1, "prompt: must be at least one token, is empty"),
        ([1], 0, "max_tokens: must be at least 1, is 0"),
        ([1, -2], 1, "prompt: token ids must be in 0..2147483647, one is -2"),
        ([1, 2**31], 1, "prompt: token ids must be in 0..2147483647, one is 2147483648"),
    ],
)
def test_what_is_no_prompt_or_no_length_is_refused_by_name(token_ids: list[int], max_tokens: int, text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        admit(token_ids, max_tokens, LIMITS, EMPTY, 0.0)


def test_the_smallest_of_model_pool_and_wire_counts() -> None:
    assert longest_sequence(limits(100, 160)) == 100
    assert longest_sequence(limits(200, 160)) == 160
    assert longest_sequence(limits(2**30, 2**30)) == MAX_PROMPT_TOKENS


@given(st.integers(1, 120), st.none() | st.integers(1, 120), st.integers(2, 120), st.integers(2, 120))
def test_what_is_let_in_fits_and_what_fits_is_let_in(
    num_tokens: int, max_tokens: int | None, max_model_len: int, pool_tokens: int
) -> None:
    longest = min(max_model_len, pool_tokens)
    fits = num_tokens + (max_tokens or 1) <= longest
    try:
        admitted = admit([0] * num_tokens, max_tokens, limits(max_model_len, pool_tokens), EMPTY, 0.0)
    except InputError:
        assert not fits
    else:
        assert fits and num_tokens + admitted <= longest
        assert admitted == (longest - num_tokens if max_tokens is None else max_tokens)


def test_a_full_queue_turns_away_with_the_time_that_it_will_take() -> None:
    placed_at = [10.0, 11.0, 12.0, 13.0]  # 4 in the 5 s before now
    with pytest.raises(Overloaded) as refused:
        admit([1], 1, LIMITS, Queue(num_queued=12, max_queued=12, placed_at=placed_at), 15.0)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 15.0)
    assert "12 requests wait already, of at most 12" in str(refused.value)
    assert admit([1], 1, LIMITS, Queue(num_queued=11, max_queued=12, placed_at=placed_at), 15.0) == 1


def test_what_can_never_run_is_a_400_even_when_the_queue_is_full() -> None:
    with pytest.raises(InputError):
        admit([1] * 100, 1, LIMITS, Queue(num_queued=2, max_queued=2, placed_at=()), 0.0)


def test_a_predicted_wait_has_bounds_and_a_guess_without_history() -> None:
    assert predicted_wait_s(Queue(num_queued=9, max_queued=9, placed_at=()), 5.0) == 1.0
    assert predicted_wait_s(Queue(num_queued=9, max_queued=9, placed_at=[5.0] * 64), 5.0) == 1.0
    assert predicted_wait_s(Queue(num_queued=9, max_queued=9, placed_at=[0.0]), 1e6) == 60.0


# ---- budgets -----------------------------------------------------------------------------------------------------

WANTED = Wanted(num_tokens=101, max_tokens=20)


def standing(*, queued: int = 0, num_rows: int = 0, tpot_s: float | None = None, measured: bool = True) -> Fleet:
    """A prefiller with 1,000 tokens a second, and a decoder whose rows take 10 ms each."""
    decoding = Decoding(step_s=0.0, row_s=0.01, key_s=0.0, num_rows=num_rows, num_keys=0, num_interactive=0)
    decoder = DecoderView(
        uuid="d",
        num_free_pages=1000,
        page_size=16,
        num_running=num_rows,
        max_running=8,
        decoding=decoding if measured else None,
    )
    speed = Prefilling(step_s=0.0, rate=1000.0) if measured else None
    prefiller = PrefillerView(uuid="p", num_queued_tokens=queued, max_tokens=4096, prefilling=speed)
    return Fleet(decoders=[decoder], prefillers=[prefiller], stay_s=2.0, tpot_s=tpot_s)


def refused(fleet: Fleet, budget: Budget, ahead: Ahead = Ahead()) -> BudgetExceeded | None:  # noqa: B008 (frozen)
    try:
        require_in_time(fleet, WANTED, budget, ahead)
    except BudgetExceeded as error:
        return error
    return None


def test_what_comes_in_time_is_let_in_with_what_is_predicted_of_it() -> None:
    expected = require_in_time(standing(queued=300), WANTED, Budget(ttft_s=0.4, tpot_s=0.01))
    assert expected == Forecast(ttft_s=pytest.approx(0.4), tpot_s=0.01)


def test_what_would_come_late_is_told_by_how_much_and_when_to_come_back() -> None:
    error = refused(standing(queued=3000), Budget(ttft_s=0.5), Ahead(num_requests=2, num_tokens=1000))
    assert error is not None and (error.status, error.latency) == (429, "ttft")
    assert str(error) == ("its first token would take about 4,100 ms, of a budget of 500 ms: 2 requests wait before it")
    answer = error_answer(error)
    assert answer.headers() == {"retry-after": "4"}  # by then it would come in time
    assert answer.body()["error"] == {
        "message": str(error),
        "type": "rate_limit_error",
        "param": None,
        "code": "ttft_budget_exceeded",
        "predicted_ttft_ms": 4100.0,
        "ttft_budget_ms": 500.0,
    }


@pytest.mark.parametrize(
    ("budget", "text", "code"),
    [
        (Budget(ttft_s=0.05), "take about 100 ms, of a budget of 50 ms: on an idle fleet too", "ttft_budget_exceeded"),
        (Budget(tpot_s=0.0095), "take about 10 ms, of a budget of 9.5 ms: on an idle", "tpot_budget_exceeded"),
    ],
)
def test_what_is_late_on_an_idle_fleet_too_is_told_that_coming_back_does_not_help(
    budget: Budget, text: str, code: str
) -> None:
    error = refused(standing(queued=3000, num_rows=3), budget)
    assert error is not None and text in str(error) and "x-headrace-" in str(error)
    answer = error_answer(error)
    assert (answer.code, answer.headers()) == (code, {"x-should-retry": "false"})


def test_a_pace_of_its_own_must_be_there_and_one_of_its_tier_is_waited_for() -> None:
    budget = Budget(tpot_s=0.03)
    assert refused(standing(num_rows=2), budget) is None
    assert refused(standing(num_rows=3, tpot_s=0.03), budget) is None
    error = refused(standing(num_rows=3, tpot_s=0.05), budget)
    assert error is not None and error.latency == "tpot" and "take about 40 ms, of a budget of 30 ms" in str(error)
    assert error.retry_after_s == 1.0


def test_where_nothing_was_measured_nobody_is_refused_for_a_budget() -> None:
    assert refused(standing(queued=10**6, num_rows=8, measured=False), Budget(ttft_s=0.001, tpot_s=0.001)) is None


BUDGETS = st.builds(Budget, ttft_s=st.floats(0.01, 10), tpot_s=st.none() | st.floats(0.005, 0.2))
PLACES = st.builds(Ahead, num_requests=st.integers(0, 20), num_tokens=st.integers(0, 5000))
QUEUES = st.tuples(st.integers(0, 5000), st.integers(0, 5000))


@given(BUDGETS, st.integers(0, 8), PLACES, PLACES, QUEUES)
def test_more_that_waits_never_turns_a_refusal_into_an_admission(
    budget: Budget, num_rows: int, ahead: Ahead, more: Ahead, queues: tuple[int, int]
) -> None:
    queued, more_queued = queues
    if refused(standing(queued=queued, num_rows=num_rows), budget, ahead):
        behind = Ahead(
            num_requests=ahead.num_requests + more.num_requests, num_tokens=ahead.num_tokens + more.num_tokens
        )
        assert refused(standing(queued=queued + more_queued, num_rows=num_rows), budget, behind)
