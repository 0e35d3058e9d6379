"""The prefix index: which page holds which prefix, by a hash chain over full pages. Pure; PROTOCOL's rules for h and p.

Owns the two maps between hashes and pages, not the pages: whether a page is held, cached or evicted is `PagePool`'s,
which alone forgets entries. One loop owns an index. A hash covers its page's tokens and, through the chain, everything
before them, so equal hashes mean equal prefixes:

    root = H(salt) -> H(root, tokens[0:P]) -> H(previous, tokens[P:2P]) -> ..       P = page_size, full pages only
"""

import hashlib
import struct
from collections.abc import Sequence

from headrace.errors import InputError

HASH_BYTES = 16
"""128 bits: two different prefixes are never meant to meet, since a hit is not compared token by token."""

MAX_TOKEN_ID = 2**31 - 1


def page_hashes(token_ids: Sequence[int], page_size: int, salt: bytes) -> list[bytes]:
    """The chained hash of each full page. Prefixes with different `salt` (model fingerprint, tenant) never match.

    Token ids are hashed as little-endian int32, so that all hosts agree. Raises InputError.
    """
    _require_page_size(page_size)
    num_pages = len(token_ids) // page_size
    try:
        wire = struct.pack(f"<{num_pages * page_size}i", *token_ids[: num_pages * page_size])
    except struct.error as error:
        raise InputError("token_ids", f"must be integers in 0..{MAX_TOKEN_ID} ({error})") from error
    if num_pages and min(token_ids) < 0:
        raise InputError("token_ids", f"must be integers in 0..{MAX_TOKEN_ID}, one is {min(token_ids)}")
    hashes = []
    previous = hashlib.blake2b(salt, digest_size=HASH_BYTES).digest()
    page_bytes = 4 * page_size
    for begin in range(0, len(wire), page_bytes):
        previous = hashlib.blake2b(previous + wire[begin : begin + page_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(previous)
    return hashes


def num_whole_pages(num_tokens: int, page_size: int) -> int:
    """Pages that the prefill of a prompt fills: the most it can hit, and the ones that it may index.

    The last prompt token is never prefilled (it is the first decode query), so these are the full pages of [0, n-1);
    the tail page behind them, still to be appended to, is never indexed by a prefill.
    """
    if num_tokens < 1:
        raise InputError("num_tokens", f"must be at least 1, is {num_tokens}")
    _require_page_size(page_size)
    return (num_tokens - 1) // page_size


def hit_tokens(num_hit_pages: int, num_tokens: int, page_size: int) -> int:
    """h or p of PROTOCOL "Prefix hits": page_size * floor(min(hit, n-1) / page_size)."""
    if num_hit_pages < 0:
        raise InputError("num_hit_pages", f"must be at least 0, is {num_hit_pages}")
    return page_size * min(num_hit_pages, num_whole_pages(num_tokens, page_size))


class PrefixIndex:
    """hash -> page and page -> hash, one to one."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest indexed prefix of `hashes`. Pin them before anything else is allocated."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def try_insert(self, page: int, page_hash: bytes) -> bool:
        """Whether `page` now stands for `page_hash`; False when another page does: `page` then stays private.

        The page must be held (`PagePool.try_index` asserts it), its content complete and no longer written to.
        """
        known = self._page_of.get(page_hash)
        if known is not None:
            return known == page
        assert page not in self._hash_of, f"page {page} is indexed under another hash already"
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        return True

    def forget(self, page: int) -> None:
        """Drop the entry of `page`. Idempotent."""
        page_hash = self._hash_of.pop(page, None)
        if page_hash is not None:
            del self._page_of[page_hash]

    def hash_of(self, page: int) -> bytes | None:
        """None when the page is not indexed."""
        return self._hash_of.get(page)

    def pages(self) -> frozenset[int]:
        """All indexed pages (a copy, for checks)."""
        return frozenset(self._hash_of)

    def check(self) -> None:
        """Assert that the two maps are each other's inverse."""
        assert self._page_of == {page_hash: page for page, page_hash in self._hash_of.items()}, "maps disagree"

    def __len__(self) -> int:
        return len(self._hash_of)

    def __contains__(self, page: int) -> bool:
        return page in self._hash_of

    def __repr__(self) -> str:
        return f"PrefixIndex(indexed={len(self)})"


def _require_page_size(page_size: int) -> None:
    if page_size < 1:
        raise InputError("page_size", f"must be at least 1, is {page_size}")
