"""What the messengers tell their role: plain records, drained in batches. Each accepted ticket gets one answer."""

from dataclasses import dataclass
from typing import Literal

from headrace.fabric.interface import Imm, PeerId
from headrace.messenger.process import ProcessName
from headrace.protocol.messages import RefusalReason, Ticket, Tier

FailureReason = Literal[
    "refused", "failed", "cancelled", "deadline", "lost_write", "corrupt", "peer_lost", "revoked", "fault"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The KV of [h, n-1) is in the request's pages, which are its own again. `landed_at`, on the clock of `now` and
    never after it, is the end of the transfer: digests and the loop's turns lie between it and this answer."""

    request_id: str
    imm: Imm
    cached_len: int  # max(h, p), tokens that nobody computed for this request
    landed_at: float  # when the last byte did


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketFailed:
    """The ticket is over for its request. Its pages stay with the messenger, which frees them when that is safe.
    `refusal` says why the prefiller refused, where reason is "refused": too_long is for ever, no_room is not."""

    request_id: str
    imm: Imm
    reason: FailureReason
    text: str
    retry_after_s: float
    refusal: RefusalReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReady:
    """The handshake of this epoch is complete. On the same host `process` is to be watched for its exit."""

    peer: PeerId
    uuid: str
    process: ProcessName


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused:
    """The two will never exchange pages: `field` differs."""

    peer: PeerId
    field: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSuspected:
    """The peer lost a write, broke the protocol or did not answer in time; it was revoked, and is greeted anew as soon
    as its access has ended: PeerReady follows."""

    peer: PeerId
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSuspected:
    """Bytes of this peer came wrong or not at all, and the ticket was failed. Once is an accident."""

    peer: PeerId
    text: str


DecoderOutcome = Ready | TicketFailed | PeerReady | PeerRefused | PeerSuspected | LinkSuspected


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """A prompt to compute: positions [cached_len, num_tokens - 1), into `pages` (page table from position 0)."""

    ticket: Ticket
    request_id: str
    tier: Tier
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    cached_len: int  # p
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDropped:
    """Compute no further step for this ticket; a step that runs is still to be committed or failed."""

    ticket: Ticket


PrefillerOutcome = PrefillJob | JobDropped | PeerReady | PeerRefused
