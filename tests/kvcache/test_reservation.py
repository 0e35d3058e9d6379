"""Reservations: hits first and pinned, growth by PROTOCOL's count, all or nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import PrefixIndex, num_whole_pages, page_hashes
from headrace.kvcache.reservation import Reservation, growth_tokens, num_reserved_pages, try_reserve

PAGE = 4


def reserve(pool: PagePool, token_ids: list[int], growth: int = 1) -> Reservation | None:
    return try_reserve(pool, page_hashes(token_ids, PAGE, b""), len(token_ids), growth, PAGE)


def finish(pool: PagePool, token_ids: list[int], reservation: Reservation) -> None:
    """What a ready ticket and a finished request do: index the whole pages, give everything back."""
    hashes = page_hashes(token_ids, PAGE, b"")
    for page, page_hash in list(zip(reservation.pages, hashes, strict=False))[: num_whole_pages(len(token_ids), PAGE)]:
        pool.try_index(page, page_hash)
    pool.release(reservation.pages)


def stored(pool: PagePool, token_ids: list[int]) -> None:
    reservation = reserve(pool, token_ids)
    assert reservation is not None
    finish(pool, token_ids, reservation)


def test_growth_is_what_the_tier_usually_needs() -> None:
    assert growth_tokens(1000, None) == 64
    assert growth_tokens(10, None) == 10
    assert growth_tokens(1000, 200) == 200
    assert growth_tokens(100, 200) == 100
    assert growth_tokens(100, 0) == 1
    with pytest.raises(InputError, match="max_tokens: must be at least 1"):
        growth_tokens(0, None)


@pytest.mark.parametrize(
    ("num_tokens", "growth", "num_pages"),
    [
        (1, 1, 1),  # nothing to prefill: position 0 is growth
        (4, 1, 2),  # [0, 3) is a tail page, growth is a page behind it
        (5, 1, 2),  # n-1 = 4 begins a page: that page is the growth
        (5, 4, 3),
        (6, 1, 3),
        (6, 7, 4),
        (8, 9, 5),
    ],
)
def test_growth_is_at_least_a_page_and_includes_that_of_the_last_prompt_token(
    num_tokens: int, growth: int, num_pages: int
) -> None:
    assert num_reserved_pages(num_tokens, growth, PAGE, num_pages=100) == num_pages


def test_a_request_that_fits_exactly_is_not_made_to_wait_for_a_page_that_does_not_exist() -> None:
    pool = PagePool(4, PrefixIndex())
    reservation = reserve(pool, list(range(14)), growth=2)
    assert reservation is not None
    assert len(reservation.pages) == 4


@pytest.mark.parametrize(("num_tokens", "growth"), [(14, 3), (17, 1), (1, 16)])
def test_a_request_beyond_the_whole_pool_is_refused_not_queued(num_tokens: int, growth: int) -> None:
    pool = PagePool(4, PrefixIndex())
    with pytest.raises(InputError, match=rf"must be at most 16 \(the pool\), is {num_tokens} \+ {growth}"):
        reserve(pool, list(range(num_tokens)), growth)
    assert pool.num_free_or_cached == 4


@pytest.mark.parametrize(
    ("field", "hashes", "num_tokens", "growth"),
    [("num_tokens", [], 0, 1), ("growth_tokens", [], 1, 0), ("hashes", [b"a", b"b"], 7, 1)],
)
def test_bad_input_is_refused_by_name(field: str, hashes: list[bytes], num_tokens: int, growth: int) -> None:
    with pytest.raises(InputError) as refused:
        try_reserve(PagePool(9, PrefixIndex()), hashes, num_tokens, growth, PAGE)
    assert refused.value.field == field


def test_a_cold_reservation_is_all_private() -> None:
    pool = PagePool(9, PrefixIndex())
    reservation = reserve(pool, list(range(10)))
    assert reservation is not None
    assert (reservation.num_tokens, reservation.cached_len, reservation.num_hit_pages) == (10, 0, 0)
    assert reservation.private_pages == reservation.pages
    assert len(reservation.pages) == 4
    assert pool.statistics().num_held == 4


def test_hits_come_first_in_page_table_order_and_are_shared() -> None:
    pool = PagePool(9, PrefixIndex())
    prompt = list(range(10))
    first = reserve(pool, prompt)
    assert first is not None
    for page, page_hash in zip(first.pages, page_hashes(prompt, PAGE, b""), strict=False):
        pool.try_index(page, page_hash)
    second = reserve(pool, [*prompt, 99])
    assert second is not None
    assert second.pages[:2] == first.pages[:2]
    assert (second.cached_len, second.num_hit_pages) == (8, 2)
    assert not set(second.private_pages) & set(first.pages)
    pool.release(first.pages)
    assert pool.statistics().num_held == len(second.pages)
    pool.check()


def test_a_prompt_that_is_wholly_stored_still_leaves_its_last_token_to_the_decoder() -> None:
    pool = PagePool(9, PrefixIndex())
    stored(pool, list(range(9)))
    assert len(pool.prefix) == 2
    exact = reserve(pool, list(range(8)))  # two whole pages, but position 7 is the first query
    assert exact is not None
    assert (exact.cached_len, exact.num_hit_pages) == (4, 1)
    assert pool.statistics().num_cached == 1
    longer = reserve(pool, list(range(9)))
    assert longer is not None
    assert (longer.cached_len, longer.num_hit_pages) == (8, 2)  # h = n-1: nothing to prefill


def test_a_reservation_never_evicts_its_own_hits() -> None:
    pool = PagePool(4, PrefixIndex())
    stored(pool, list(range(9)))  # two cached pages, the oldest thing in the pool
    reservation = reserve(pool, list(range(9)), growth=7)
    assert reservation is not None
    assert len(set(reservation.pages)) == 4
    assert reservation.num_hit_pages == 2
    assert pool.prefix.lookup(page_hashes(range(9), PAGE, b"")) == list(reservation.pages[:2])


def test_without_room_the_hits_are_given_back() -> None:
    pool = PagePool(5, PrefixIndex())
    stored(pool, list(range(9)))
    other = pool.try_allocate(2)
    before = pool.statistics()
    assert reserve(pool, list(range(9)), growth=7) is None  # two hits and two more; one is free
    assert pool.statistics() == before
    assert other is not None
    pool.release(other)
    assert reserve(pool, list(range(9)), growth=7) is not None


def test_quarantined_pages_make_a_request_wait_but_do_not_refuse_it() -> None:
    pool = PagePool(4, PrefixIndex())
    lost = pool.try_allocate(1)
    assert lost is not None
    pool.quarantine(lost)
    assert reserve(pool, list(range(14)), growth=2) is None
    pool.readmit(lost)
    assert reserve(pool, list(range(14)), growth=2) is not None


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@given(steps=st.lists(st.tuples(prompts, st.integers(1, 9), st.booleans()), max_size=30), num_pages=st.integers(4, 12))
def test_random_reservations_hold_the_right_content_and_lose_no_page(
    steps: list[tuple[list[int], int, bool]], num_pages: int
) -> None:
    pool = PagePool(num_pages, PrefixIndex())
    content: dict[int, list[int]] = {}  # page -> tokens up to its end, written when it was last private
    held: list[tuple[list[int], Reservation]] = []
    for prompt, growth, finish_one in steps:
        if finish_one and held:
            finish(pool, *held.pop(0))
        if len(prompt) + growth > num_pages * PAGE:
            continue
        before = pool.statistics()
        hits = pool.prefix.lookup(page_hashes(prompt, PAGE, b""))[: (len(prompt) - 1) // PAGE]
        cached_hits = [page for page in hits if all(page not in other.pages for _, other in held)]
        num_private = num_reserved_pages(len(prompt), growth, PAGE, num_pages=num_pages) - len(hits)
        has_room = num_private <= pool.num_free_or_cached - len(cached_hits)
        reservation = reserve(pool, prompt, growth)
        assert (reservation is not None) == has_room
        if reservation is None:
            assert pool.statistics() == before
            continue
        assert reservation.cached_len == reservation.num_hit_pages * PAGE <= len(prompt) - 1
        for i, page in enumerate(reservation.pages, start=1):
            if i <= reservation.num_hit_pages:
                assert content[page] == prompt[: i * PAGE]
            else:
                assert all(page not in other.pages for _, other in held)
                content[page] = prompt[: i * PAGE]
        held.append((prompt, reservation))
        pool.check()
    for prompt, reservation in held:
        finish(pool, prompt, reservation)
    pool.check()
    assert pool.num_free_or_cached == num_pages
