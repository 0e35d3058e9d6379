"""Which prefixes each instance should have in its index: pages by their hashes, as the instance itself hashes them.

Owned by the gateway's loop; an estimate. It is told what an instance has computed or received, keeps as many pages as
the instance has, and lets go of those first that were used least recently, ends of prefixes before their beginnings,
as the instance does. What an instance says it did not find is forgotten; one that leaves, altogether.
"""

from collections import OrderedDict
from collections.abc import Sequence

from headrace.kvcache.prefix import num_whole_pages, page_hashes
from headrace.protocol.messages import Uuid

MOST_PAGES = 1 << 16
"""Of one instance, some 10 MB here. The prefixes that many requests share are used, and stay."""


class Prompt:
    """The pages that a prefill of these tokens fills, hashed once for each page size."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._hashes: dict[tuple[int, str], list[bytes]] = {}

    def hashes(self, page_size: int, fingerprint: str) -> list[bytes]:
        """As instances of the model with this fingerprint have them in their index."""
        key = page_size, fingerprint
        if key not in self._hashes:
            num_tokens = num_whole_pages(len(self._token_ids), page_size) * page_size
            self._hashes[key] = page_hashes(self._token_ids[:num_tokens], page_size, fingerprint.encode())
        return self._hashes[key]


class Affinity:
    def __init__(self) -> None:
        self._pages: dict[Uuid, OrderedDict[bytes, None]] = {}  # least recently used first

    def num_found(self, uuid: Uuid, hashes: Sequence[bytes]) -> int:
        """Pages of this prompt that it should have."""
        pages = self._pages.get(uuid, ())
        return next((nth for nth, page_hash in enumerate(hashes) if page_hash not in pages), len(hashes))

    def has(self, uuid: Uuid, hashes: Sequence[bytes], *, num_pages: int) -> None:
        """It has computed, received or used all these; its pool has `num_pages`."""
        pages = self._pages.setdefault(uuid, OrderedDict())
        for page_hash in reversed(hashes):
            pages[page_hash] = None
            pages.move_to_end(page_hash)
        while len(pages) > min(num_pages, MOST_PAGES):
            pages.popitem(last=False)

    def lacks(self, uuid: Uuid, hashes: Sequence[bytes]) -> None:
        """It did not find these."""
        pages = self._pages.get(uuid)
        if pages is not None:
            for page_hash in hashes:
                pages.pop(page_hash, None)

    def forget(self, uuid: Uuid) -> None:
        """It is gone, or comes back with nothing. Idempotent."""
        self._pages.pop(uuid, None)

    def __repr__(self) -> str:
        return f"Affinity({len(self._pages)} instances, {sum(map(len, self._pages.values()))} pages)"
