"""The rate at which memory is read: of any number of threads, and of sizes that they do not divide."""

import pytest

from headrace.model.read_rate import read_rate


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_rate_is_told_whatever_threads_share_the_bytes(num_threads: int) -> None:
    assert 1e6 < read_rate(1_000_003, num_threads=num_threads) < 1e13
