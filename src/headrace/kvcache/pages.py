"""Who holds which page: free, held, cached or quarantined, by page id. Knows no bytes, no peers, no clock.

One loop owns a pool and its prefix index; everything is O(1) per page. Cached pages are evicted in the order of their
last release. The life of a page:

    free --try_allocate--> held (refcount 1) --release--> free           not indexed
                             |   ^                  `---> cached         indexed: kept until evicted
                             |   `------pin---------------- cached       refcount 1 again (held: +1)
                             |        try_allocate <------- cached       evicted: forgotten by the index, held anew
                         quarantine
                             v
                         quarantined --readmit--> free                   a late write may still land: neither reused
                                                                         nor counted as capacity

Calls check everything before they change anything. Wrong calls are our own mistakes, hence assertions.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InputError
from headrace.kvcache.prefix import PrefixIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStatistics:
    """Pages by state now, and evictions since the start."""

    num_pages: int
    num_free: int
    num_held: int
    num_cached: int
    num_quarantined: int
    num_indexed: int
    num_evicted: int


class PagePool:
    """All pages of one KV memory; ids are 0 .. num_pages-1."""

    def __init__(self, num_pages: int, prefix: PrefixIndex) -> None:
        if num_pages < 1:
            raise InputError("num_pages", f"must be at least 1, is {num_pages}")
        if len(prefix):
            raise InputError("prefix", f"must be empty, has {len(prefix)} pages of another pool")
        self.prefix = prefix
        self.num_pages = num_pages
        # A stack: the page freed last is the warmest, and one that is reused too early shows at once in a test.
        self._free = list(range(num_pages - 1, -1, -1))
        self._refcounts: dict[int, int] = {}  # held pages only
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._quarantined: set[int] = set()
        self._num_evicted = 0

    def try_allocate(self, num: int) -> list[int] | None:
        """`num` pages with one reference each, or None (nothing changes) when free and cached ones do not suffice."""
        assert num >= 0, f"cannot allocate {num} pages"
        if num > self.num_free_or_cached:
            return None
        pages = [self._free.pop() for _ in range(min(num, len(self._free)))]
        while len(pages) < num:
            page, _ = self._cached.popitem(last=False)
            self.prefix.forget(page)
            self._num_evicted += 1
            pages.append(page)
        self._refcounts.update(dict.fromkeys(pages, 1))
        return pages

    def pin(self, pages: Sequence[int]) -> None:
        """One more reference on each page of a prefix hit."""
        _require_distinct(pages)
        for page in pages:
            assert page in self._refcounts or page in self._cached, f"page {page} is neither held nor cached"
        for page in pages:
            self._cached.pop(page, None)
            self._refcounts[page] = self._refcounts.get(page, 0) + 1

    def try_index(self, page: int, page_hash: bytes) -> bool:
        """Let a held, complete page be hit under `page_hash`; False when another page is: this one stays private."""
        assert page in self._refcounts, f"page {page} is not held"
        return self.prefix.try_insert(page, page_hash)

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page, given in page table order; the last one makes it cached or free."""
        self._require_held(pages)
        # Backwards, so that the end of a prefix is evicted before its beginning: a chain without its head hits nothing.
        for page in reversed(pages):
            refcount = self._refcounts.pop(page) - 1
            if refcount:
                self._refcounts[page] = refcount
            elif page in self.prefix:
                self._cached[page] = None
            else:
                self._free.append(page)

    def quarantine(self, pages: Sequence[int]) -> None:
        """Take out of use pages of a ticket that a late write may still reach: private ones, held once."""
        self.require_private(pages)
        for page in pages:
            del self._refcounts[page]
        self._quarantined.update(pages)

    def require_private(self, pages: Sequence[int]) -> None:
        """Assert that nobody else holds or may hit these pages: they may be written to, and quarantined."""
        self._require_held(pages)
        for page in pages:
            assert self._refcounts[page] == 1, f"page {page} is held {self._refcounts[page]} times"
            assert page not in self.prefix, f"page {page} is indexed"

    def readmit(self, pages: Sequence[int]) -> None:
        """Free quarantined pages: no write can land in them any more."""
        _require_distinct(pages)
        for page in pages:
            assert page in self._quarantined, f"page {page} is not quarantined"
        self._quarantined.difference_update(pages)
        self._free.extend(reversed(pages))

    @property
    def capacity(self) -> int:
        """What admission counts with."""
        return self.num_pages - len(self._quarantined)

    @property
    def num_free_or_cached(self) -> int:
        return len(self._free) + len(self._cached)

    def statistics(self) -> PageStatistics:
        return PageStatistics(
            num_pages=self.num_pages,
            num_free=len(self._free),
            num_held=len(self._refcounts),
            num_cached=len(self._cached),
            num_quarantined=len(self._quarantined),
            num_indexed=len(self.prefix),
            num_evicted=self._num_evicted,
        )

    def check(self) -> None:
        """Assert conservation (every page in exactly one state) and that index and states agree. O(num_pages)."""
        placed = [*self._free, *self._refcounts, *self._cached, *self._quarantined]
        assert sorted(placed) == list(range(self.num_pages)), f"free + held + cached + quarantined != total: {self!r}"
        assert all(refcount >= 1 for refcount in self._refcounts.values()), "a held page has no reference"
        indexed = self.prefix.pages()
        assert self._cached.keys() <= indexed, f"cached but not indexed: {self._cached.keys() - indexed}"
        astray = indexed - self._cached.keys() - self._refcounts.keys()
        assert not astray, f"indexed but neither cached nor held: {astray}"
        self.prefix.check()

    def __repr__(self) -> str:
        return (
            f"PagePool(free={len(self._free)}, held={len(self._refcounts)}, cached={len(self._cached)}, "
            f"quarantined={len(self._quarantined)}, total={self.num_pages})"
        )

    def _require_held(self, pages: Sequence[int]) -> None:
        _require_distinct(pages)
        for page in pages:
            assert page in self._refcounts, f"page {page} is not held"


def _require_distinct(pages: Sequence[int]) -> None:
    assert len(set(pages)) == len(pages), f"a page is named twice: {sorted(pages)}"
