"""The decoder's reservation for one request: its hit pages pinned, everything else allocated, or nothing at all.

Owns no state (a reservation is plain data, the pages are `PagePool`'s) and knows neither tickets nor peers; called by
the loop that owns the pool. For n = num_tokens, the page table is

    [0, h)             pages hit: pinned, shared, read only
    [h, n-1)           private: what the prefill fills, page by page; the last may be a tail page
    [n-1, n+growth)    growth: rest of the tail page, or a new page when n-1 is at a page's begin; at least one page
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InputError
from headrace.kvcache.layout import num_pages_for
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import hit_tokens

DEFAULT_GROWTH_TOKENS = 64
"""Reserved before a tier has a p90 of its output lengths (PROTOCOL, "Growth")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Held by its request until `pool.release(reservation.pages)`, or page by page where a ticket quarantines."""

    num_tokens: int  # n, prompt tokens
    cached_len: int  # h, tokens
    pages: tuple[int, ...]  # page table: hits first, then private ones in order of position, growth included
    num_hit_pages: int

    @property
    def private_pages(self) -> tuple[int, ...]:
        return self.pages[self.num_hit_pages :]


def growth_tokens(max_tokens: int, p90: int | None) -> int:
    """Tokens to reserve room for beyond the prompt: what the tier's requests usually need, at least 1."""
    if max_tokens < 1:
        raise InputError("max_tokens", f"must be at least 1, is {max_tokens}")
    return min(max_tokens, max(1, DEFAULT_GROWTH_TOKENS if p90 is None else p90))


def num_reserved_pages(num_tokens: int, growth_tokens: int, page_size: int, *, num_pages: int) -> int:
    """Length of the page table of a reservation in a pool of `num_pages`.

    At least one page of growth behind those of [0, n-1), except where the pool has no such page: then n + growth
    fits exactly, and asking for more would wait for ever. Raises InputError when n + growth never fits.
    """
    if num_tokens < 1:
        raise InputError("num_tokens", f"must be at least 1, is {num_tokens}")
    if growth_tokens < 1:
        raise InputError("growth_tokens", f"must be at least 1, is {growth_tokens}")
    needed = num_pages_for(num_tokens + growth_tokens, page_size)
    if needed > num_pages:
        raise InputError(
            "num_tokens",
            f"num_tokens + growth_tokens must be at most {num_pages * page_size} (the pool), "
            f"is {num_tokens} + {growth_tokens}",
        )
    return min(num_pages, max(needed, num_pages_for(num_tokens - 1, page_size) + 1))


def try_reserve(
    pool: PagePool, hashes: Sequence[bytes], num_tokens: int, growth_tokens: int, page_size: int
) -> Reservation | None:
    """Reserve pages for a prompt of `num_tokens` tokens whose full pages have `hashes`; None when there is no room.

    A request that waits and asks again keeps its prefix warm: its hits count as used. Raises InputError.
    """
    num_pages = num_reserved_pages(num_tokens, growth_tokens, page_size, num_pages=pool.num_pages)
    if len(hashes) > num_tokens // page_size:
        raise InputError(
            "hashes", f"must be of full pages, at most {num_tokens // page_size}, are {len(hashes)} for {num_tokens}"
        )
    hits = pool.prefix.lookup(hashes)
    cached_len = hit_tokens(len(hits), num_tokens, page_size)
    hits = hits[: cached_len // page_size]
    # Pinned before anything is allocated: a cached hit could be evicted to make room for its own request.
    pool.pin(hits)
    private = pool.try_allocate(num_pages - len(hits))
    if private is None:
        pool.release(hits)
        return None
    return Reservation(num_tokens=num_tokens, cached_len=cached_len, pages=(*hits, *private), num_hit_pages=len(hits))
