"""The hash chain, the index, and PROTOCOL's rules for h and p."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.kvcache.prefix import HASH_BYTES, PrefixIndex, hit_tokens, num_whole_pages, page_hashes

tokens = st.lists(st.integers(0, 2), max_size=14)  # few values: prefixes meet often


def test_the_chain_is_blake2b_over_the_previous_hash_and_little_endian_int32_tokens() -> None:
    root = hashlib.blake2b(b"salt", digest_size=16).digest()
    first = hashlib.blake2b(root + struct.pack("<3i", 1, 256, 2**31 - 1), digest_size=16).digest()
    second = hashlib.blake2b(first + struct.pack("<3i", 4, 5, 6), digest_size=16).digest()
    assert page_hashes([1, 256, 2**31 - 1, 4, 5, 6, 7, 8], 3, b"salt") == [first, second]


@given(left=tokens, right=tokens, page_size=st.integers(1, 4))
def test_pages_have_equal_hashes_exactly_when_everything_up_to_their_end_is_equal(
    left: list[int], right: list[int], page_size: int
) -> None:
    left_hashes, right_hashes = page_hashes(left, page_size, b""), page_hashes(right, page_size, b"")
    assert len(left_hashes) == len(left) // page_size
    for i, left_hash in enumerate(left_hashes, start=1):
        for k, right_hash in enumerate(right_hashes, start=1):
            assert (left_hash == right_hash) == (left[: i * page_size] == right[: k * page_size])


def test_another_salt_shares_nothing() -> None:
    token_ids = list(range(32))
    assert not set(page_hashes(token_ids, 4, b"model a")) & set(page_hashes(token_ids, 4, b"model b"))


def test_numpy_tokens_and_tuples_hash_like_lists() -> None:
    token_ids = [5, 6, 7, 8, 9]
    expected = page_hashes(token_ids, 2, b"s")
    assert page_hashes(tuple(token_ids), 2, b"s") == expected
    assert page_hashes(np.array(token_ids), 2, b"s") == expected  # type: ignore[arg-type]
    assert all(len(page_hash) == HASH_BYTES for page_hash in expected)


@pytest.mark.parametrize("bad", [-1, 2**31, 1.5, "7"])
def test_token_ids_outside_int32_are_refused(bad: object) -> None:
    with pytest.raises(InputError, match=r"token_ids: must be integers in 0\.\.2147483647"):
        page_hashes([1, bad, 2], 1, b"")  # type: ignore[list-item]


def test_a_page_size_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="page_size: must be at least 1"):
        page_hashes([1], 0, b"")
    with pytest.raises(InputError, match="page_size: must be at least 1"):
        num_whole_pages(1, 0)


@given(stored=st.lists(tokens, max_size=4), asked=tokens, page_size=st.integers(1, 4))
def test_lookup_finds_the_longest_prefix_that_was_inserted(
    stored: list[list[int]], asked: list[int], page_size: int
) -> None:
    index = PrefixIndex()
    content: dict[int, list[int]] = {}  # page -> all tokens up to its end
    for token_ids in stored:
        for i, page_hash in enumerate(page_hashes(token_ids, page_size, b""), start=1):
            page = len(content)
            known = token_ids[: i * page_size] in content.values()
            assert index.try_insert(page, page_hash) is not known
            if not known:
                content[page] = token_ids[: i * page_size]
    found = index.lookup(page_hashes(asked, page_size, b""))
    for i, page in enumerate(found, start=1):
        assert content[page] == asked[: i * page_size]
    beyond = asked[: (len(found) + 1) * page_size]
    assert len(beyond) < (len(found) + 1) * page_size or beyond not in content.values()
    assert len(index) == len(content)
    index.check()


def test_a_page_whose_hash_is_known_stays_private() -> None:
    index = PrefixIndex()
    assert index.try_insert(3, b"hash")
    assert not index.try_insert(4, b"hash")
    assert index.hash_of(3) == b"hash"
    assert index.hash_of(4) is None
    assert index.lookup([b"hash"]) == [3]
    assert index.try_insert(3, b"hash")  # the page that stands for it already


def test_a_page_with_two_hashes_is_refused() -> None:
    index = PrefixIndex()
    index.try_insert(3, b"hash")
    with pytest.raises(AssertionError, match="page 3 is indexed under another hash"):
        index.try_insert(3, b"other")
    index.check()
    assert index.lookup([b"other"]) == []


def test_a_forgotten_page_ends_every_hit_before_it() -> None:
    index = PrefixIndex()
    hashes = page_hashes(range(6), 2, b"")
    for page, page_hash in enumerate(hashes):
        index.try_insert(page, page_hash)
    index.forget(1)
    index.forget(1)
    assert index.lookup(hashes) == [0]
    assert (len(index), 1 in index, 2 in index) == (2, False, True)
    assert repr(index) == "PrefixIndex(indexed=2)"
    assert index.try_insert(7, hashes[1])
    assert index.lookup(hashes) == [0, 7, 2]
    index.check()


@pytest.mark.parametrize(
    ("num_hit_pages", "num_tokens", "expected"),
    [
        (0, 40, 0),
        (1, 40, 16),
        (2, 40, 32),
        (2, 33, 32),  # whole pages up to n-1: nothing to prefill
        (2, 32, 16),  # the last token is never prefilled, so the page that ends with it is not whole
        (1, 16, 0),
        (1, 17, 16),
        (0, 1, 0),
        (1, 1, 0),
        (9, 40, 32),
    ],
)
def test_the_last_prompt_token_is_never_part_of_a_hit(num_hit_pages: int, num_tokens: int, expected: int) -> None:
    assert hit_tokens(num_hit_pages, num_tokens, 16) == expected


@given(num_hit_pages=st.integers(0, 50), num_tokens=st.integers(1, 300), page_size=st.integers(1, 33))
def test_hit_tokens_is_protocols_formula(num_hit_pages: int, num_tokens: int, page_size: int) -> None:
    hit = num_hit_pages * page_size
    assert hit_tokens(num_hit_pages, num_tokens, page_size) == page_size * (min(hit, num_tokens - 1) // page_size)
    assert num_whole_pages(num_tokens, page_size) * page_size <= num_tokens - 1


def test_hits_of_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="num_tokens: must be at least 1"):
        hit_tokens(0, 0, 16)
    with pytest.raises(InputError, match="num_hit_pages: must be at least 0"):
        hit_tokens(-1, 5, 16)
