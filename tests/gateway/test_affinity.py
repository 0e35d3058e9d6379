"""Which prefixes an instance should have: against a pool with an index of its own, and rule by rule."""

import random

from headrace.gateway.dispatch.affinity import Affinity, Prompt
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import PrefixIndex, page_hashes
from headrace.kvcache.reservation import try_reserve

A, B = "a" * 32, "b" * 32
PAGE_SIZE = 4


def hashes(*token_ids: int) -> list[bytes]:
    return Prompt(token_ids).hashes(PAGE_SIZE, "f")


def test_a_prompts_pages_are_those_that_its_prefill_fills_hashed_as_the_instance_does() -> None:
    token_ids = tuple(range(9))
    prompt = Prompt(token_ids)
    assert prompt.hashes(4, "f") == page_hashes(token_ids, 4, b"f") and len(prompt.hashes(4, "f")) == 2
    assert len(Prompt(token_ids[:8]).hashes(4, "f")) == 1  # the last token is the first decode query
    assert prompt.hashes(3, "f") != prompt.hashes(3, "g")
    assert prompt.hashes(4, "f") is prompt.hashes(4, "f")


def test_the_longest_prefix_counts_at_each_instance() -> None:
    affinity = Affinity()
    affinity.has(A, hashes(*range(13)), num_pages=100)
    assert affinity.num_found(A, hashes(*range(13))) == 3
    assert affinity.num_found(A, hashes(*range(9), 0, 0, 0, 0)) == 2
    assert affinity.num_found(A, hashes(1, *range(1, 13))) == 0
    assert affinity.num_found(B, hashes(*range(13))) == 0


def test_what_it_did_not_find_is_forgotten() -> None:
    affinity = Affinity()
    known = hashes(*range(13))
    affinity.has(A, known, num_pages=100)
    affinity.lacks(A, known[1:])
    affinity.lacks(B, known)
    assert affinity.num_found(A, known) == 1


def test_one_that_leaves_has_nothing() -> None:
    affinity = Affinity()
    affinity.has(A, hashes(*range(13)), num_pages=100)
    affinity.forget(A)
    affinity.forget(A)
    assert affinity.num_found(A, hashes(*range(13))) == 0
    assert repr(affinity) == "Affinity(0 instances, 0 pages)"


def test_it_never_knows_of_more_pages_than_there_are() -> None:
    affinity = Affinity()
    affinity.has(A, hashes(*range(41)), num_pages=3)
    assert affinity.num_found(A, hashes(*range(41))) == 3  # the beginning of the prefix


def test_requests_one_after_the_other_are_found_as_their_instance_finds_them() -> None:
    """A pool that has room for one request and what earlier ones left: eviction is the same."""
    rng = random.Random(7)
    num_pages = 24
    pool = PagePool(num_pages, PrefixIndex())
    affinity = Affinity()
    num_hit = 0
    for _ in range(400):
        token_ids = [rng.randrange(2)] * rng.randrange(4, 30) + [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        known = Prompt(token_ids).hashes(PAGE_SIZE, "f")
        expected = affinity.num_found(A, known)
        reservation = try_reserve(pool, known, len(token_ids), 1, PAGE_SIZE)
        assert reservation is not None
        found = reservation.num_hit_pages
        assert found <= expected  # evicted meanwhile for pages that are in no index
        num_hit += found == expected > 0
        affinity.lacks(A, known[found:])
        for page, page_hash in zip(reservation.pages, known, strict=False):
            pool.try_index(page, page_hash)
        pool.release(reservation.pages)
        affinity.has(A, known, num_pages=num_pages)
    assert num_hit > 200
