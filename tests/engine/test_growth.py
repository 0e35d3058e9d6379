"""How much room a request reserves for its output."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.growth import FEWEST, OutputLengths
from headrace.errors import InputError
from headrace.kvcache.reservation import DEFAULT_GROWTH_TOKENS


def test_before_there_is_a_p90_the_default_is_reserved() -> None:
    lengths = OutputLengths()
    for _ in range(FEWEST - 1):
        lengths.add("interactive", 3)
    assert lengths.p90("interactive") is None
    assert lengths.growth("interactive", 1000) == DEFAULT_GROWTH_TOKENS
    lengths.add("interactive", 3)
    assert lengths.growth("interactive", 1000) == 3


def test_no_more_is_reserved_than_can_come() -> None:
    lengths = OutputLengths()
    assert lengths.growth("interactive", 5) == 5
    for _ in range(FEWEST):
        lengths.add("interactive", 100)
    assert lengths.growth("interactive", 40) == 40


def test_tiers_are_apart() -> None:
    lengths = OutputLengths()
    for _ in range(FEWEST):
        lengths.add("flex", 500)
    assert (lengths.p90("interactive"), lengths.p90("flex")) == (None, 500)


def test_old_lengths_are_forgotten() -> None:
    lengths = OutputLengths(window=10)
    for num_tokens in [900] * 10 + [4] * 9:
        lengths.add("flex", num_tokens)
    assert lengths.p90("flex") == 4


@given(st.lists(st.integers(1, 50), min_size=FEWEST, max_size=60))
def test_nine_in_ten_are_not_longer_and_one_less_would_not_do(given_lengths: list[int]) -> None:
    lengths = OutputLengths(window=32)
    for num_tokens in given_lengths:
        lengths.add("interactive", num_tokens)
    kept = given_lengths[-32:]
    p90 = lengths.p90("interactive")
    assert p90 in kept
    enough = math.ceil(0.9 * len(kept))
    assert sum(length <= p90 for length in kept) >= enough > sum(length < p90 for length in kept)


def test_lengths_and_windows_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match="num_tokens: must be at least 1, is 0"):
        OutputLengths().add("flex", 0)
    with pytest.raises(InputError, match="window: must be at least 10, is 9"):
        OutputLengths(window=9)
