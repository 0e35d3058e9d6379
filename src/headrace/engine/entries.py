"""What the engine keeps of a request. Plain records; `Engine` keeps them in its table and alone changes them.

Of a request with n known tokens (prompt and generated), the page table is, with the KV of [0, computed) in it:

    [0, hit_len)          hit in the prefix index when the pages were reserved: pinned, shared, never written
    [hit_len, n-1)        filled here, or lent to a ticket: whole pages, the last one may be a tail page
    [n-1, ..)             growth: what is left of the tail page, and pages of its own
"""

from dataclasses import dataclass
from enum import Enum

from headrace.engine.requests import Admission, DoneReason, EngineRequest, RequestDone
from headrace.engine.schedule import Decoding, Prefilling, rank
from headrace.engine.step import Draw, StepRow
from headrace.kvcache.layout import num_pages_for
from headrace.kvcache.reservation import Reservation
from headrace.model.batch import Row


class State(Enum):
    ADMITTED = "admitted"  # holds pages, and nobody fills them yet
    FETCHING = "fetching"  # a part of its pages is lent
    PREFILLING = "prefilling"
    DECODING = "decoding"  # all known tokens but the last are computed
    PARKED = "parked"  # holds nothing: its fetch failed, and what to do next is not decided
    WAITING = "waiting"  # holds nothing: preempted, or parked before; comes back when there are pages
    ENDED = "ended"


HOLDING = (State.ADMITTED, State.FETCHING, State.PREFILLING, State.DECODING)
"""The states in which a request holds pages."""


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    request: EngineRequest
    order: int  # of arrival
    token_ids: list[int]  # all that are known
    hashes: list[bytes]  # of the whole pages of [0, n-1)
    state: State = State.WAITING
    pages: tuple[int, ...] = ()
    hit_len: int = 0  # h
    computed: int = 0
    cached_len: int | None = None  # tokens of the prompt that nobody computed for it; None before it was started
    num_preemptions: int = 0
    in_step: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        return rank(self.request.tier, self.order)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.token_ids)

    @property
    def num_remaining(self) -> int:
        return self.request.max_tokens - self.num_generated

    @property
    def num_before_decode(self) -> int:
        """n-1, the positions that are computed before it decodes: the last known token is the query."""
        return len(self.token_ids) - 1

    @property
    def is_fetching(self) -> bool:
        return self.state is State.FETCHING

    # ---- pages -------------------------------------------------------------------------------------------------

    def hold(self, reservation: Reservation) -> None:
        self.pages = reservation.pages
        self.hit_len = self.computed = reservation.cached_len

    def let_go(self) -> tuple[int, ...]:
        """The pages, which are no longer its own."""
        pages, self.pages = self.pages, ()
        self.hit_len = self.computed = 0
        return pages

    def lent(self, page_size: int) -> slice:
        """Where in the page table those of [h, n-1) are; the page of n-1 is one of them when it is the tail page."""
        return slice(self.hit_len // page_size, num_pages_for(self.num_before_decode, page_size))

    # ---- records made of it ------------------------------------------------------------------------------------

    def admission(self) -> Admission:
        return Admission(
            request_id=self.request.request_id,
            token_ids=self.request.token_ids,
            cached_len=self.hit_len,
            pages=self.pages,
            hashes=tuple(self.hashes),
        )

    def done(self, reason: DoneReason, text: str) -> RequestDone:
        return RequestDone(
            request_id=self.request.request_id,
            reason=reason,
            text=text,
            num_tokens=self.num_generated,
            cached_len=self.cached_len or 0,
            num_preemptions=self.num_preemptions,
        )

    def as_decoding(self) -> Decoding["Entry"]:
        return Decoding(key=self, tier=self.request.tier, order=self.order, kv_len=self.computed, pages=self.pages)

    def as_prefilling(self, *, samples: bool) -> Prefilling["Entry"]:
        """`samples`: the last known token is part of its last chunk."""
        end = len(self.token_ids) if samples else self.num_before_decode
        return Prefilling(key=self, tier=self.request.tier, order=self.order, computed=self.computed, end=end)

    def row(self, begin: int, end: int) -> StepRow:
        """Positions [begin, end). Behind the last known token the next one is drawn."""
        draws = end == len(self.token_ids)
        return StepRow(
            row=Row(token_ids=self.token_ids[begin:end], begin=begin, page_table=self.pages, wants_logits=draws),
            draw=Draw(sampling=self.request.sampling, position=end) if draws else None,
        )
