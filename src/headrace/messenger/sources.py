"""What a prefiller sets aside for one ticket, and what it posts from there.

Owns the staging slots (the aux slots of our own memory, where the aux write is composed); takes pages from the pool
that the loop shares with the engine. Knows no states: `prefiller` says when a source is taken and when nobody reads it
any more. The page table of a prompt of n tokens:

    [0, p)       hits of our prefix index: pinned, read only
    [p, n-1)     private: filled step by step, indexed when their step is committed
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.fabric.interface import LastWrite, PageWrites
from headrace.kvcache.layout import PoolLayout, num_pages_for
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import hit_tokens, page_hashes
from headrace.messenger.aux import DIGESTS_AT, AuxHeader, aux_bytes
from headrace.messenger.plan import Plans, PromptPages, Side, TransferPlan
from headrace.protocol.messages import Prefill, RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    reason: RefusalReason
    text: str
    retry_after_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Source:
    """What an accepted ticket holds here. `computed` is how far its steps are committed, in tokens from 0."""

    message: Prefill
    destination: Side
    plan: TransferPlan
    prompt: PromptPages
    pages: tuple[int, ...]  # page table from position 0
    hashes: list[bytes]  # of the whole pages of [0, n-1)
    cached_len: int  # p
    staging: int
    computed: int

    @property
    def needs_no_step(self) -> bool:
        return self.cached_len == self.prompt.num_prefilled


class Sources:
    """`memory` is the pool's memory as `[total_bytes] uint8`."""

    def __init__(self, *, layout: PoolLayout, pages: PagePool, memory: NDArray[np.uint8], salt: bytes) -> None:
        self._layout = layout
        self._pages = pages
        self._memory = memory
        self._salt = salt
        self._free_staging = list(range(layout.num_aux_slots))

    def why_not(self, message: Prefill, destination: Side) -> Refusal | None:
        """What is wrong with the message itself, or too long for ever; None: it may be taken when there is room."""
        num_pages = num_pages_for(max(0, len(message.token_ids) - 1), self._layout.kv.page_size)
        if not 1 <= len(message.pages) <= num_pages:
            text = f"pages: must be 1..{num_pages} for this prompt, are {len(message.pages)}"
            return Refusal(reason="malformed", text=text)
        pool, dp = destination.pool, destination.sharding.dp
        if max(message.pages) >= pool.num_pages or message.aux_slot >= pool.num_aux_slots or message.group >= dp:
            return Refusal(reason="malformed", text="group, pages, aux_slot: must lie in the pool that Hello named")
        # Positions in the decoder's hit need no digest: the limit is told for a prompt without one.
        aux_room = min(self._layout.aux_slot_bytes, pool.aux_slot_bytes)
        most_pages = min(self._layout.num_pages, (aux_room - aux_bytes(0)) // 8)
        if num_pages > self._layout.num_pages or aux_bytes(len(message.pages)) > aux_room:
            limit = most_pages * self._layout.kv.page_size + 1
            text = f"token_ids: must be at most {limit}, are {len(message.token_ids)}"
            return Refusal(reason="too_long", text=text)
        return None

    def try_take(self, message: Prefill, plans: Plans) -> Source | None:
        """Pages for the whole prompt and a staging slot, or None when there is no room. Checked by `why_not`."""
        if not self._free_staging:
            return None
        page_size = self._layout.kv.page_size
        num_tokens = len(message.token_ids)
        num_pages = num_pages_for(num_tokens - 1, page_size)
        hashes = page_hashes(message.token_ids[: num_tokens - 1], page_size, self._salt)
        hits = self._pages.prefix.lookup(hashes)
        self._pages.pin(hits)
        private = self._pages.try_allocate(num_pages - len(hits))
        if private is None:
            self._pages.release(hits)
            return None
        cached_len = hit_tokens(len(hits), num_tokens, page_size)
        source = Source(
            message=message,
            destination=plans.dst,
            plan=plans.of(group=message.group, seed=message.seed),
            prompt=PromptPages(
                num_tokens=num_tokens, cached_len=(num_pages - len(message.pages)) * page_size, page_size=page_size
            ),
            pages=(*hits, *private),
            hashes=hashes,
            cached_len=cached_len,
            staging=self._free_staging.pop(),
            computed=cached_len,
        )
        self._write_header(source)
        return source

    def release(self, source: Source) -> None:
        """Nobody reads or writes it any more."""
        self._pages.release(source.pages)
        self._free_staging.append(source.staging)

    def _write_header(self, source: Source) -> None:
        header = AuxHeader(
            ticket=source.message.ticket,
            cached_len=source.cached_len,
            num_messages=source.plan.num_messages(source.prompt.num_sent),
        )
        header.pack_into(self._memory[self._layout.aux_slice(source.staging)])

    def writes(self, source: Source, pages: range) -> list[PageWrites]:
        """The messages of these pages of the prompt (numbered from position 0), one record for each route."""
        if not pages:
            return []
        begin, end = pages.start - source.prompt.first, pages.stop - source.prompt.first
        positions = np.arange(begin, end, dtype=np.int64)
        src_pages = np.array(source.pages[pages.start : pages.stop], dtype=np.int64)
        dst_pages = np.array(source.message.pages[begin:end], dtype=np.int64)
        return [
            route.writes(src_pages=src_pages, dst_pages=dst_pages, positions=positions) for route in source.plan.routes
        ]

    def last_write(self, source: Source) -> LastWrite:
        return LastWrite(
            src_offset=self._layout.aux_offset(source.staging),
            dst_offset=source.destination.pool.aux_offset(source.message.aux_slot),
            length=aux_bytes(source.prompt.num_sent),
            digests_at=DIGESTS_AT,
        )

    def index(self, source: Source, begin: int, end: int) -> None:
        """Tokens [begin, end) are computed: their whole pages may be hit. `hashes` ends before the tail page."""
        page_size = source.prompt.page_size
        for page in range(begin // page_size, min(end // page_size, len(source.hashes))):
            self._pages.try_index(source.pages[page], source.hashes[page])

    def check(self) -> None:
        """Assert that every page is in exactly one state."""
        self._pages.check()

    @property
    def num_staging_taken(self) -> int:
        return self._layout.num_aux_slots - len(self._free_staging)
