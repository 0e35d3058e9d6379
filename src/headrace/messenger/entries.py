"""What a decoder keeps of an open ticket, and what it asks of the prefiller for it. Plain records.

Owns nothing: `decoder` keeps them in its table and alone changes them.
"""

from dataclasses import dataclass

from headrace.fabric.interface import DigestId, Imm
from headrace.messenger.known_prefillers import Prefiller
from headrace.messenger.landings import Landing
from headrace.messenger.life import DecoderState
from headrace.messenger.outcomes import FailureReason
from headrace.messenger.plan import TransferPlan
from headrace.protocol.messages import Cancel, Prefill, RefusalReason, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """`lost_write_s`: from Closed to Reached. `patience_s`: for a CancelAck, and again for the drain after it; a Cancel
    is repeated four times in it. `repeat_s`: until the first repetition of a Prefill, doubled from one to the next."""

    verify_kv: bool = True
    lost_write_s: float = 0.2
    patience_s: float = 2.0
    repeat_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStatistics:
    num_open: int
    num_revoking: int  # of these, answered: only its prefiller's access is still to end
    num_quarantined_pages: int
    num_prefillers_ready: int  # at which a ticket can be opened now
    num_ready: int
    num_failed: dict[str, int]  # by reason
    num_revokes: int
    num_wrong_bytes: int  # tickets whose digests or counts were wrong
    num_surplus: int
    num_strange_messages: int  # malformed, or from somebody we do not know


@dataclass(frozen=True, slots=True)
class Failure:
    reason: FailureReason
    text: str
    retry_after_s: float = 0.0
    refusal: RefusalReason | None = None


@dataclass(slots=True, kw_only=True)
class Entry:
    """One open ticket. Only the effects of `decoder` change it."""

    landing: Landing
    ticket: Ticket
    prefiller: Prefiller
    plan: TransferPlan
    expected: int
    target: int
    deadline: float
    state: DecoderState = DecoderState.NEW
    num_posted: int | None = None  # as far as it is known
    repeat_at: float | None = None
    repeat_after: float
    lost_at: float | None = None
    patience_at: float | None = None
    digest: DigestId | None = None
    cached_len: int = 0  # of the header
    landed_at: float = 0.0  # when the counter reached its target
    failure: Failure = Failure("fault", "")

    @property
    def imm(self) -> Imm:
        return self.landing.imm

    def prefill(self, sender: str, now: float) -> Prefill:
        request = self.landing.request
        return Prefill(
            sender=sender,
            ticket=self.ticket,
            request_id=request.request_id,
            lease=request.lease,
            token_ids=request.token_ids,
            group=request.group,
            pages=request.pages,
            aux_slot=self.landing.slot,
            seed=self.landing.seed,
            remaining_s=max(0.0, self.deadline - now),
        )

    def stop_timers(self) -> None:
        self.deadline = float("inf")
        self.lost_at = self.patience_at = self.repeat_at = None

    def cancel(self, sender: str) -> Cancel:
        return Cancel(sender=sender, ticket=self.ticket)
