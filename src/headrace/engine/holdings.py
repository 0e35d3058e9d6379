"""The pages of the engine's requests: taken for them, grown, indexed, lent, given back. Knows no states, no steps.

Owns nothing of its own: pages are the pool's, page tables the entries'. All that the engine does to the pool is here;
the pool is shared with a messenger on the same loop, which takes what is lent and gives it back or keeps it.
"""

from collections.abc import Sequence

from headrace.engine.entries import Entry
from headrace.engine.growth import OutputLengths
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import page_hashes
from headrace.kvcache.reservation import num_reserved_pages, try_reserve


class Holdings:
    def __init__(self, pages: PagePool, *, page_size: int, salt: bytes, lengths: OutputLengths) -> None:
        self._pages = pages
        self._page_size = page_size
        self._salt = salt
        self._lengths = lengths

    @property
    def num_available(self) -> int:
        return self._pages.num_free_or_cached

    @property
    def num_pool_tokens(self) -> int:
        return self._pages.num_pages * self._page_size

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Of the full pages."""
        return page_hashes(token_ids, self._page_size, self._salt)

    def num_missing(self, entry: Entry, held: set[int]) -> int:
        """Pages that `reserve` takes from those that are free or cached: the prefix that somebody holds costs none."""
        num_pages = num_reserved_pages(
            len(entry.token_ids), self._growth(entry), self._page_size, num_pages=self._pages.num_pages
        )
        return num_pages - sum(page in held for page in self._pages.prefix.lookup(entry.hashes))

    def reserve(self, entry: Entry) -> None:
        """Pages for all its known tokens and growth. Asserts that there are as many as `num_missing` said."""
        reservation = try_reserve(self._pages, entry.hashes, len(entry.token_ids), self._growth(entry), self._page_size)
        assert reservation is not None, f"no room for {entry.request.request_id!r}: {self._pages!r}"
        entry.hold(reservation)

    def _growth(self, entry: Entry) -> int:
        return self._lengths.growth(entry.request.tier, entry.num_remaining)

    def grow(self, entries: Sequence[Entry]) -> None:
        """One more page for each."""
        pages = self._pages.try_allocate(len(entries))
        assert pages is not None, f"no {len(entries)} pages to grow: {self._pages!r}"
        for entry, page in zip(entries, pages, strict=True):
            entry.pages += (page,)

    def index(self, entry: Entry, begin: int, end: int) -> None:
        """Let the whole pages of the computed positions [begin, end) be hit; those with a known hash stay private."""
        first, last = begin // self._page_size, end // self._page_size
        if last > len(entry.hashes):
            entry.hashes = self.hashes(entry.token_ids[:end])
        for page, page_hash in zip(entry.pages[first:last], entry.hashes[first:last], strict=True):
            self._pages.try_index(page, page_hash)

    def release(self, entry: Entry) -> None:
        """Everything. What is indexed stays cached until it is evicted."""
        self._pages.release(entry.let_go())

    def part(self, entry: Entry) -> tuple[int, ...]:
        """Everything but what is lent -> the lent pages, which are the ticket's to give back, or the caller's."""
        lent = entry.pages[entry.lent(self._page_size)]
        self._pages.release(self.own_pages(entry))
        entry.let_go()
        return lent

    def own_pages(self, entry: Entry) -> tuple[int, ...]:
        """Those that are nobody's to take back: all, or while it is being fetched all but the lent ones."""
        if not entry.is_fetching:
            return entry.pages
        lent = entry.lent(self._page_size)
        return entry.pages[: lent.start] + entry.pages[lent.stop :]

    def release_lent(self, pages: Sequence[int]) -> None:
        """Lent pages came back for a request that has ended."""
        self._pages.release(pages)

    def check(self, own: set[int], lent: set[int]) -> None:
        """Assert that the pool's held pages are these. A lent page may be quarantined, or free again, before the
        engine is told that its fetch failed."""
        num_held = self._pages.statistics().num_held
        assert len(own) <= num_held <= len(own | lent), f"{len(own)} own, {len(lent)} lent: {self._pages!r}"
        self._pages.check()

    def __repr__(self) -> str:
        return repr(self._pages)
