"""An instance's KV pages as counts, and which prefixes are in them: `kvcache.pages` and `.prefix` without page ids.

Pages come and go by the hundred here, so what always goes together is one entry: the pages of a block of a prompt, or
those that a request alone has. The rules are the pool's: a hit is pinned, what is released stays cached if it was
indexed, and what was released first is evicted first, ends of prefixes before their beginnings.

    free + held + cached == total        asserted at each change
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from headrace.bench.workload import Arrival
from headrace.kvcache.prefix import hit_tokens, num_whole_pages

Name = tuple[str, int]
"""Of an entry: of a block, with all that came before it in its prompt, or of what one request alone has."""

Held = dict[Name, int]
"""What a request holds by name, in order of position: pages of each, which are others' too. Not to be changed."""


def chained(blocks: Sequence[int]) -> tuple[int, ...]:
    """Equal where whole prefixes are equal."""
    return tuple(accumulate(blocks, lambda before, block: hash((before, block)), initial=0))[1:]


class Prefix:
    """What of one prompt others may have, and what only it has: names and pages of each, in order of position."""

    __slots__ = ("names", "page_ends")

    def __init__(self, arrival: Arrival, *, own: int, block_tokens: int, num_tokens: int, page_size: int) -> None:
        """Whole pages of the first `num_tokens` - 1 tokens, of which the prompt is the beginning; what no whole block
        of that covers is the request's `own`, by its number."""
        num_blocks = min(len(arrival.blocks), (arrival.prompt_tokens - 1) // block_tokens)
        ends = [(nth + 1) * block_tokens // page_size for nth in range(num_blocks)]
        names: list[Name] = [("block", link) for link in chained(arrival.blocks[:num_blocks])]
        num_whole = num_whole_pages(num_tokens, page_size)
        if not ends or num_whole > ends[-1]:
            names.append(("own", own))
            ends.append(num_whole)
        self.names = names
        self.page_ends = ends

    def parts(self) -> Iterator[tuple[Name, int]]:
        """With the pages of each."""
        begin = 0
        for name, end in zip(self.names, self.page_ends, strict=True):
            yield name, end - begin
            begin = end


class _Entry:
    __slots__ = ("num_holders", "num_pages")

    def __init__(self, num_pages: int, num_holders: int) -> None:
        self.num_pages = num_pages
        self.num_holders = num_holders


class Pages:
    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self.num_free = total
        self.num_held = 0
        self.num_cached = 0
        self.num_evicted = 0
        self._entries: dict[Name, _Entry] = {}
        self._cached: OrderedDict[Name, None] = OrderedDict()  # least recently released first

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached

    # ---- prefixes ----------------------------------------------------------------------------------------------

    def hit_tokens(self, prefix: Prefix, num_tokens: int) -> int:
        """h, or p: of a prompt of so many tokens."""
        num_pages = sum(entry.num_pages for _, entry in self._hits(prefix))
        return hit_tokens(num_pages, num_tokens, self.page_size) if num_pages else 0

    def num_held_of(self, prefix: Prefix) -> int:
        """Pages of its hits that somebody holds: they cost nothing."""
        return sum(entry.num_pages for _, entry in self._hits(prefix) if entry.num_holders)

    def _hits(self, prefix: Prefix) -> Iterator[tuple[Name, _Entry]]:
        """The longest leading ones; behind one that was evicted in part there is none."""
        for name, num_pages in prefix.parts():
            entry = self._entries.get(name)
            if entry is None:
                return
            yield name, entry
            if entry.num_pages < num_pages:
                return

    def pin(self, prefix: Prefix) -> Held:
        pinned = list(self._hits(prefix))
        for name, entry in pinned:
            if not entry.num_holders:
                del self._cached[name]
                self.num_cached -= entry.num_pages
                self.num_held += entry.num_pages
            entry.num_holders += 1
        self.check()
        return {name: entry.num_pages for name, entry in pinned}

    def index(self, prefix: Prefix, held: Held) -> Held:
        """All of it is computed, into pages that its holder has. What others have indexed meanwhile stays as it is.
        -> what it holds by name now."""
        held = dict(held)
        for name, num_pages in prefix.parts():
            entry = self._entries.get(name)
            if entry is None and num_pages:
                self._entries[name] = _Entry(num_pages, 1)
                held[name] = num_pages
            elif entry is not None and held.get(name) == entry.num_pages < num_pages:
                held[name] = entry.num_pages = num_pages  # its end had been evicted, or is new
        return held

    # ---- pages -------------------------------------------------------------------------------------------------

    def take(self, num: int) -> None:
        """Private ones; asserts that there are as many."""
        assert 0 <= num <= self.num_available, f"no {num} pages: {self!r}"
        from_free = min(num, self.num_free)
        self.num_free -= from_free
        self._evict(num - from_free)
        self.num_held += num
        self.check()

    def _evict(self, num: int) -> None:
        self.num_cached -= num
        self.num_evicted += num
        while num:
            name = next(iter(self._cached))
            entry = self._entries[name]
            taken = min(num, entry.num_pages)
            entry.num_pages -= taken
            num -= taken
            if not entry.num_pages:
                del self._cached[name], self._entries[name]

    def release(self, held: Held, num_private: int) -> None:
        """What it holds by name, and so many more."""
        self.num_held -= num_private
        self.num_free += num_private
        for name in reversed(held):
            entry = self._entries[name]
            entry.num_holders -= 1
            if not entry.num_holders:
                self._cached[name] = None
                self.num_held -= entry.num_pages
                self.num_cached += entry.num_pages
        self.check()

    def clear(self) -> None:
        """All is lost."""
        self.num_free, self.num_held, self.num_cached = self.total, 0, 0
        self._entries.clear()
        self._cached.clear()

    def check(self) -> None:
        assert self.num_free >= 0 and self.num_held >= 0 and self.num_cached >= 0, repr(self)
        assert self.num_free + self.num_held + self.num_cached == self.total, repr(self)

    def __repr__(self) -> str:
        return f"Pages(free={self.num_free}, held={self.num_held}, cached={self.num_cached}, total={self.total})"
