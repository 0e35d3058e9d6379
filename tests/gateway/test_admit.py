"""Who is let in: lengths against limits, defaults, and the queue."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.gateway.admit import Queue, admit, longest_sequence, predicted_wait_s
from headrace.gateway.generation import Overloaded
from headrace.protocol.control import MAX_PROMPT_TOKENS, Limits

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
