"""Where a ticket's bytes land at the decoder: its pages, its slot, and whether what came is what was sent.

Owns the ticket slots (imm counter and aux slot of the same number); holds the request's pages from the ticket's opening
to its end, and gives them back to the pool of its data-parallel group, which the loop shares with the engine. Knows no
states: `decoder` says when.

    take        the pages are held by the request; a slot is taken
    quarantine  a late write may reach them: neither the request's nor free
    keep        everything has landed and is right: the request's again; whole pages may be hit
    free        nothing can land any more: back to the pool
    give_back   the slot, which returns with its next generation
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.fabric.interface import Digests, Imm, PageReads, PeerId
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import MAX_TOKEN_ID
from headrace.messenger.aux import AuxHeader, aux_bytes, digests_in
from headrace.messenger.plan import PromptPages, TransferPlan
from headrace.messenger.slots import TicketSlots
from headrace.protocol.messages import MAX_NAME, MOST_REMAINING_S, Ticket, is_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketRequest:
    """What to fetch: the KV of positions [cached_len, n-1) of the n token ids, into `pages` of this data-parallel
    `group`, which are held once and in no prefix index. `hashes` are of the prompt's whole pages from position 0, for
    the index when it is ready."""

    request_id: str
    prefiller: PeerId
    lease: str
    token_ids: tuple[int, ...]
    cached_len: int
    group: int
    pages: tuple[int, ...]
    hashes: tuple[bytes, ...]
    remaining_s: float


@dataclass(slots=True, kw_only=True)
class Landing:
    """What one open ticket holds here."""

    request: TicketRequest
    prompt: PromptPages
    slot: int
    imm: Imm
    seed: int
    quarantined: bool = False


class Landings:
    """`pools` are the pages of each data-parallel group, `memory` that of all of them as `[total_bytes] uint8`."""

    def __init__(
        self, *, layout: PoolLayout, pools: Sequence[PagePool], memory: NDArray[np.uint8], rng: random.Random
    ) -> None:
        self._layout = layout
        self._pools = pools
        self._memory = memory
        self._rng = rng
        self._slots = TicketSlots(layout.num_aux_slots, rng)
        self._taken: dict[Imm, Landing] = {}

    def try_take(self, request: TicketRequest) -> Landing | None:
        """None when every slot is in use. Raises InputError when there is nothing to fetch, or into wrong pages: all
        that the wire or a later step would not take is found here, before anything is taken."""
        prompt = self._check(request)
        self._pools[request.group].require_private(request.pages)
        taken = self._slots.try_take()
        if taken is None:
            return None
        slot, imm = taken
        seed = self._rng.getrandbits(32)
        landing = self._taken[imm] = Landing(request=request, prompt=prompt, slot=slot, imm=imm, seed=seed)
        return landing

    def _check(self, request: TicketRequest) -> PromptPages:
        page_size, num_pages = self._layout.kv.page_size, self._layout.num_pages
        prompt = PromptPages(num_tokens=len(request.token_ids), cached_len=request.cached_len, page_size=page_size)
        if request.cached_len % page_size or not 0 <= request.cached_len < prompt.num_prefilled:
            raise InputError(
                "cached_len",
                f"must be whole pages below the last prompt token ({prompt.num_prefilled}), is {request.cached_len}",
            )
        if not 0 <= request.group < len(self._pools):
            raise InputError("group", f"must be in 0..{len(self._pools) - 1}, is {request.group}")
        if len(request.pages) != prompt.num_sent:
            raise InputError("pages", f"must be {prompt.num_sent} for this prompt, are {len(request.pages)}")
        if len(set(request.pages)) < prompt.num_sent or not 0 <= min(request.pages) <= max(request.pages) < num_pages:
            raise InputError("pages", f"must be distinct and in 0..{num_pages - 1}, are {request.pages}")
        if not 0 <= request.remaining_s <= MOST_REMAINING_S:  # NaN is no deadline either
            raise InputError("remaining_s", f"must be in 0..{MOST_REMAINING_S:.0f}, is {request.remaining_s}")
        if not 0 <= min(request.token_ids) <= max(request.token_ids) <= MAX_TOKEN_ID:
            raise InputError("token_ids", f"must be in 0..{MAX_TOKEN_ID}")
        for field, name in (("request_id", request.request_id), ("lease", request.lease)):
            if not is_name(name):
                raise InputError(field, f"must be at most {MAX_NAME} characters of valid Unicode")
        if aux_bytes(prompt.num_sent) > self._layout.aux_slot_bytes:
            raise InputError("token_ids", f"{prompt.num_tokens} are more than an aux slot has digests for")
        return prompt

    def quarantine(self, landing: Landing) -> None:
        self._pool(landing).quarantine(landing.request.pages)
        landing.quarantined = True

    def keep(self, landing: Landing) -> None:
        """The tail page, still to be appended to, is never indexed; a page whose hash is known stays private."""
        prompt = landing.prompt
        hashes = landing.request.hashes[prompt.first : prompt.num_prefilled // prompt.page_size]
        for page, page_hash in zip(landing.request.pages, hashes, strict=False):
            self._pool(landing).try_index(page, page_hash)

    def free(self, landing: Landing) -> None:
        if landing.quarantined:
            self._pool(landing).readmit(landing.request.pages)
            landing.quarantined = False
        else:
            self._pool(landing).release(landing.request.pages)

    def _pool(self, landing: Landing) -> PagePool:
        return self._pools[landing.request.group]

    def give_back(self, landing: Landing) -> None:
        self._slots.give_back(landing.slot)
        del self._taken[landing.imm]

    # ---- what has landed ---------------------------------------------------------------------------------------

    def header_for(self, landing: Landing, *, ticket: Ticket, expected: int) -> AuxHeader | None:
        """The aux header; None when it is not this ticket's or says what cannot be."""
        header = AuxHeader.unpack(self._aux(landing))
        is_right = (
            header.ticket == ticket
            and header.num_messages == expected
            and header.cached_len % landing.prompt.page_size == 0
            and header.cached_len <= landing.prompt.num_prefilled
        )
        return header if is_right else None

    def reads(self, landing: Landing, plan: TransferPlan) -> Sequence[PageReads]:
        """The ticket's messages where they landed."""
        pages = np.array(landing.request.pages, dtype=np.int64)
        positions = np.arange(len(pages), dtype=np.int64)
        return [route.reads(pages, positions) for route in plan.routes]

    def wrong_positions(self, landing: Landing, digests: Digests) -> list[int]:
        """Positions in the ticket whose bytes are not those that were sent."""
        sent = digests_in(self._aux(landing), landing.prompt.num_sent)
        return [int(position) for position in np.flatnonzero(digests != sent)]

    def _aux(self, landing: Landing) -> NDArray[np.uint8]:
        return self._memory[self._layout.aux_slice(landing.slot)]

    # ---- state shows itself ------------------------------------------------------------------------------------

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def num_quarantined_pages(self) -> int:
        return sum(len(landing.request.pages) for landing in self._taken.values() if landing.quarantined)

    def check(self) -> None:
        """Assert that slots and pages agree with what is taken."""
        assert self._slots.num_taken == len(self._taken), f"{self._slots!r}, {len(self._taken)} taken"
        quarantined = sum(pool.statistics().num_quarantined for pool in self._pools)
        assert self.num_quarantined_pages == quarantined, f"{self.num_quarantined_pages} quarantined: {self._pools!r}"
        for pool in self._pools:
            pool.check()

    def __repr__(self) -> str:
        return f"Landings({len(self._taken)} taken, {self.num_quarantined_pages} pages quarantined)"
