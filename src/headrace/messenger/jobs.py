"""What a prefiller keeps of a ticket and of a running step, and how the end of a ticket is told. Plain records.

Owns nothing: `prefiller` keeps them in its tables and alone changes them.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from headrace.errors import InputError
from headrace.fabric.interface import TransferId
from headrace.messenger.known_decoders import Decoder, Tombstone
from headrace.messenger.life import PrefillerState
from headrace.messenger.sources import Refusal, Source
from headrace.protocol.messages import CancelAck, Failed, Refused, Ticket, TicketClosed, Tier, clipped

HOLDING = (PrefillerState.SENDING, PrefillerState.DRAINING)
"""The engine is through with the pages and only the decoder's slowness keeps them."""

Transfer = Literal["layers", "whole"]
"""When a prompt's pages travel: "layers" in the step that completes them, each layer as soon as it is computed; "whole"
all at once when the last chunk is computed, as systems do that transfer after the prefill: the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillerOptions:
    """`lease_tokens`: two steps' worth; `reserve_tokens`: a chunk of it for the interactive tier. `held_share`: of the
    pool, what one decoder may keep by not taking it. `retry_after_s`: told with a refusal for want of room."""

    lease_tokens: int = 1024
    reserve_tokens: int = 256
    held_share: float = 1 / 3
    retry_after_s: float = 0.5
    transfer: Transfer = "layers"

    def __post_init__(self) -> None:
        if self.transfer not in get_args(Transfer):
            raise InputError("transfer", f"must be one of {', '.join(get_args(Transfer))}, is {self.transfer!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [begin, end) of a ticket's prompt, computed in one step."""

    ticket: Ticket
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillerStatistics:
    num_tickets: int
    num_held_pages: int  # kept by decoders that have not taken them
    num_leased_tokens: int
    num_interactive_tokens: int  # those of them that are interactive
    num_accepted: int
    num_refused: dict[str, int]  # by reason
    num_closed: int  # everything posted and completed
    num_bytes_sent: tuple[int, ...]  # KV that each rank sent, of lists that were posted whole
    num_strange_messages: int  # malformed, or from somebody we do not know


@dataclass(slots=True, kw_only=True)
class Job:
    """One ticket. Only the effects of `prefiller` change it."""

    ticket: Ticket
    decoder: Decoder
    tier: Tier = "interactive"  # of its lease
    lease: str | None = None  # None: cancelled before it was seen
    state: PrefillerState = PrefillerState.UNSEEN
    accepted: Source | None = None
    write_list: TransferId | None = None
    deadline: float = float("inf")
    in_step: bool = False
    num_posted: int = 0
    num_unknown: int = 0
    reason: str = ""
    refusal: Refusal | None = None
    answer: bytes | None = None  # the last one sent

    def rise_from(self, tombstone: Tombstone) -> None:
        """It is over, and this is how it ended."""
        self.state = PrefillerState.DONE
        self.num_posted, self.num_unknown = tombstone.num_posted, tombstone.num_unknown
        self.answer = tombstone.answer

    @property
    def source(self) -> Source:
        assert self.accepted is not None, f"{self.ticket} was not accepted, or is over"
        return self.accepted

    @property
    def transfer(self) -> TransferId:
        assert self.write_list is not None, f"{self.ticket} has no write list"
        return self.write_list

    def refused(self, sender: str) -> Refused:
        assert self.refusal is not None, f"{self.ticket} is refused without a reason"
        return Refused(
            sender=sender,
            ticket=self.ticket,
            reason=self.refusal.reason,
            text=clipped(self.refusal.text),
            retry_after_s=self.refusal.retry_after_s,
        )

    def failed(self, sender: str) -> Failed:
        return Failed(
            sender=sender,
            ticket=self.ticket,
            num_posted=self.num_posted,
            num_unknown=self.num_unknown,
            reason=clipped(self.reason),
        )

    def cancel_ack(self, sender: str) -> CancelAck:
        return CancelAck(sender=sender, ticket=self.ticket, num_posted=self.num_posted, num_unknown=self.num_unknown)

    def closed(self, sender: str) -> TicketClosed:
        return TicketClosed(sender=sender, ticket=self.ticket, num_posted=self.num_posted)


@dataclass(slots=True)
class Step:
    chunks: tuple[Chunk, ...]
    has_program: bool
    jobs: list[Job] = field(default_factory=list)
