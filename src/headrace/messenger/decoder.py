"""The decoder's half of the KV messenger: tickets from their opening until no byte of theirs can land any more.

Owns the open tickets, their slots and the handshakes with prefillers; shares the page pools with the loop it runs on.
Knows no model, no scheduler and no clock: every call takes `now`, and nothing here waits. The life of a ticket is the
table `life.DECODER`; this file turns fabric events, messages and timers into its events and carries out its effects.

    open_ticket     slot taken, counter armed, Prefill sent; the pages are the messenger's from here on
    handle          what the fabric told                    -> outcomes: Ready or TicketFailed, once per ticket
    advance         deadlines and patience that are over
    cancel          the client left
"""

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError, ProtocolFault
from headrace.fabric.interface import (
    DigestId,
    DigestsReady,
    Event,
    Fabric,
    Imm,
    MessageReceived,
    PeerId,
    PeerLost,
    PeerSilent,
    Reached,
    Revoked,
    SendFailed,
    Surplus,
)
from headrace.kvcache.pages import PagePool
from headrace.messenger import life
from headrace.messenger.entries import DecoderOptions, DecoderStatistics, Entry, Failure
from headrace.messenger.hello import Identity
from headrace.messenger.known_prefillers import KnownPrefillers, Prefiller
from headrace.messenger.landings import Landings, TicketRequest
from headrace.messenger.life import DECODER, DecoderEffect, DecoderEvent, DecoderState
from headrace.messenger.outcomes import DecoderOutcome, FailureReason, LinkSuspected, PeerSuspected, Ready, TicketFailed
from headrace.protocol.messages import (
    CancelAck,
    Failed,
    Hello,
    HelloRefused,
    Refused,
    Ticket,
    TicketClosed,
    decode,
    encode,
)


class DecoderMessenger:
    """`pools` are the pages of each data-parallel group, `memory` that of all ranks as `[total_bytes] uint8`, the same
    that `fabric` serves. Raises InputError when they are not as many as the groups."""

    def __init__(
        self,
        *,
        fabric: Fabric,
        identity: Identity,
        pools: Sequence[PagePool],
        memory: NDArray[np.uint8],
        rng: random.Random,
        options: DecoderOptions = DecoderOptions(),
    ) -> None:
        if len(pools) != identity.sharding.dp:
            raise InputError("pools", f"must be one for each of {identity.sharding.dp} groups, are {len(pools)}")
        self._fabric = fabric
        self._identity = identity
        self._options = options
        self._landings = Landings(layout=identity.pool, pools=pools, memory=memory, rng=rng)
        self._prefillers = KnownPrefillers(fabric, identity)
        self._entries: dict[Imm, Entry] = {}
        self._digests: dict[DigestId, Entry] = {}
        self._outcomes: list[DecoderOutcome] = []
        self._now = 0.0
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    # ---- what the role asks ------------------------------------------------------------------------------------

    def greet(self, address: bytes, now: float) -> PeerId:
        """Begin the handshake with the prefiller at this fabric address -> PeerReady or PeerRefused. Idempotent.
        Whoever was there before has exited. Raises InputError when it is no address, FabricError."""
        replaced = self._prefillers.replaced_at(address)
        if replaced is not None:
            self.peer_exited(replaced.peer, now)
        return self._prefillers.greet(address, now)

    def knows(self, peer: PeerId) -> bool:
        """Not one that was forgotten, since it has exited, or does not answer."""
        return self._prefillers.get(peer) is not None

    def is_ready(self, peer: PeerId) -> bool:
        prefiller = self._prefillers.get(peer)
        return prefiller is not None and prefiller.state == "ready"

    def try_open_ticket(self, request: TicketRequest, now: float) -> Imm | None:
        """Ask the prefiller for the KV. None, and the pages stay the caller's, when it is not ready or every slot is
        in use. Raises InputError when there is nothing to fetch or the pages are not those of the prompt."""
        prefiller = self._prefillers.get(request.prefiller)
        if prefiller is None or prefiller.state != "ready" or prefiller.plans is None:
            return None
        landing = self._landings.try_take(request)
        if landing is None:
            return None
        plan = prefiller.plans.of(group=request.group, seed=landing.seed)
        expected = plan.num_messages(landing.prompt.num_sent)
        entry = Entry(
            landing=landing,
            ticket=Ticket(decoder=self._identity.uuid, epoch=prefiller.epoch, imm=landing.imm),
            prefiller=prefiller,
            plan=plan,
            expected=expected,
            target=expected,
            deadline=now + request.remaining_s,
            repeat_after=self._options.repeat_s,
        )
        self._entries[landing.imm] = entry
        self._now = now
        self._apply(entry, DecoderEvent.OPENED)
        return landing.imm

    def cancel(self, imm: Imm, now: float) -> None:
        """The request is over (answered TicketFailed "cancelled" now); its pages come back when that is safe.
        A ticket that has its answer already is left alone."""
        entry = self._entries.get(imm)
        if entry is not None:
            self._now = now
            self._fail(entry, DecoderEvent.CANCEL, "cancelled", "the request was cancelled")

    def peer_exited(self, peer: PeerId, now: float) -> None:
        """The prefiller's process is gone for good. Idempotent."""
        prefiller = self._prefillers.get(peer)
        if prefiller is not None:
            self._now = now
            self._forget(prefiller, "the prefiller has exited")  # its access has ended: at once, or with its process

    def _forget(self, prefiller: Prefiller, text: str) -> None:
        self._prefillers.forget(prefiller)
        self._fail_all(prefiller, DecoderEvent.REVOKED, "peer_lost", text)

    def peer_hung(self, peer: PeerId, now: float) -> None:
        """The prefiller does not answer: revoke it, and greet it again until it does. The fabric may tell the same, as
        PeerLost or PeerSilent, before or after; whoever comes first does it."""
        self._now = now
        self._give_up(peer, "the prefiller does not answer")

    # ---- what happens ------------------------------------------------------------------------------------------

    def handle(self, events: Sequence[Event], now: float) -> None:
        """Everything that the fabric told since the last call. Surplus first: a Reached beside it would close the
        ticket, and nobody would know any more whose write was one too many."""
        self._now = now
        for event in events:
            if isinstance(event, Surplus):
                self._on_surplus(event)
        for event in events:
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case MessageReceived():
                self._on_message(event.message)
            case Reached():
                self._on_reached(event)
            case DigestsReady():
                self._on_digests(event)
            case SendFailed():
                self._on_send_failed(event.peer)
            case Revoked():
                self._on_revoked(event.peer)
            case PeerLost():
                self._give_up(event.peer, f"the prefiller is gone: {event.text}")
            case PeerSilent():
                self._give_up(event.peer, "the prefiller does not answer: it is silent")
            case _:
                pass  # surplus was seen to; a decoder opens no transfers; one that is heard again answers its Hello

    def _on_send_failed(self, peer: PeerId) -> None:
        """Messages to this peer were lost: what waits for an answer is repeated soon, not when its time comes. Soon is
        a tenth of the next interval, which doubles: a Prefill carries a whole prompt, and every send may be failing."""
        self._prefillers.send_failed(peer, self._now)
        for entry in self._entries.values():
            if entry.prefiller.peer == peer and entry.repeat_at is not None:
                entry.repeat_at = min(entry.repeat_at, self._now + entry.repeat_after / 10)

    def _on_revoked(self, peer: PeerId) -> None:
        """Access that was ending has ended: the pages first, then a new beginning."""
        prefiller = self._prefillers.get(peer)
        if prefiller is not None and prefiller.is_ending:
            for entry in self._of(prefiller):
                self._apply(entry, DecoderEvent.REVOKED)
            self._prefillers.access_ended(prefiller, self._now)

    def advance(self, now: float) -> None:
        """Carry out what is due."""
        self._now = now
        self._prefillers.repeat_hellos(now)
        for prefiller in self._prefillers.unheard(now):
            self._forget(prefiller, "the prefiller does not answer")
        for entry in list(self._entries.values()):
            self._advance(entry, now)

    def _advance(self, entry: Entry, now: float) -> None:
        """In this order, since each may end what the next one is about."""
        if entry.lost_at is not None and entry.lost_at <= now:
            entry.lost_at = None
            text = f"not all of {entry.expected} writes arrived"
            self._fail(entry, DecoderEvent.LOST_TIMER, "lost_write", text)
        if entry.patience_at is not None and entry.patience_at <= now:
            entry.patience_at = None
            entry.failure = Failure("revoked", f"the prefiller did not account for {entry.ticket} in time")
            self._apply(entry, DecoderEvent.PATIENCE)
        if entry.deadline <= now:
            entry.deadline = float("inf")
            self._fail(entry, DecoderEvent.CANCEL, "deadline", "the deadline of the request passed")
        if entry.repeat_at is not None and entry.repeat_at <= now:
            entry.repeat_at = None
            self._apply(entry, DecoderEvent.REPEAT_TIMER)

    def next_due(self) -> float | None:
        """When `advance` has something to do next."""
        due = [self._prefillers.next_due()]
        for entry in self._entries.values():
            due += [entry.deadline, entry.lost_at, entry.patience_at, entry.repeat_at]
        return min((at for at in due if at is not None and at != float("inf")), default=None)

    def drain_outcomes(self) -> list[DecoderOutcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _on_message(self, wire: bytes) -> None:
        try:
            message = decode(wire)
        except ProtocolFault:
            self._counts["strange"] += 1
            return
        match message:
            case Hello():
                self._tell(self._prefillers.answered(message))
            case HelloRefused():
                self._tell(self._prefillers.refused(message))
            case Refused() | Failed() | CancelAck() | TicketClosed():
                self._on_ticket_message(message)
            case _:
                self._counts["strange"] += 1

    def _tell(self, outcome: DecoderOutcome | None) -> None:
        if outcome is not None:
            self._outcomes.append(outcome)

    def _on_ticket_message(self, message: Refused | Failed | CancelAck | TicketClosed) -> None:
        entry = self._entries.get(Imm(message.ticket.imm))
        if entry is None or entry.ticket != message.ticket:
            return  # about a ticket that is over: acknowledged, otherwise ignored
        if entry.prefiller.uuid != message.sender:
            self._counts["strange"] += 1
            return
        match message:
            case Refused():
                failure = Failure("refused", message.text, message.retry_after_s, message.reason)
                self._on_told(entry, 0, failure)
            case Failed():
                posted = f"({message.num_posted} of {entry.expected} writes were posted)"
                self._on_told(entry, message.num_posted, Failure("failed", f"{message.reason} {posted}"))
            case CancelAck():
                self._on_told(entry, message.num_posted, Failure("failed", "the prefiller took it for cancelled"))
            case TicketClosed():
                event = life.closed(num_posted=message.num_posted, known=entry.num_posted, expected=entry.expected)
                if event is DecoderEvent.CLOSED_TOLD and entry.num_posted is None:
                    entry.num_posted = entry.expected
                self._fail(entry, event, "fault", f"closed after {message.num_posted} of {entry.expected} writes")

    def _on_told(self, entry: Entry, num_posted: int, failure: Failure) -> None:
        event = life.told(num_posted=num_posted, known=entry.num_posted, expected=entry.expected)
        if event is DecoderEvent.TOLD:
            entry.num_posted = num_posted
        if event is DecoderEvent.CONTRADICTED:
            known = "unknown" if entry.num_posted is None else entry.num_posted
            failure = Failure("fault", f"{num_posted} of {entry.expected} writes posted, known before: {known}")
        self._fail_with(entry, event, failure)

    def _on_surplus(self, event: Surplus) -> None:
        self._counts["surplus"] += 1
        entry = self._entries.get(event.imm)
        if event.armed and entry is not None:
            self._fail(entry, DecoderEvent.CONTRADICTED, "fault", "more writes arrived than were posted")

    def _on_reached(self, event: Reached) -> None:
        entry = self._entries.get(event.imm)
        if entry is None:
            return
        happened = life.reached(arrivals=event.arrivals, target=entry.target)
        if happened is DecoderEvent.REACHED:
            entry.num_posted = event.arrivals
            entry.landed_at = min(event.at_ns / 1e9, self._now)  # the fabric's clock is that of `now`, but rounded
        self._fail(entry, happened, "fault", f"{event.arrivals} writes arrived, {entry.target} were posted")

    def _on_digests(self, event: DigestsReady) -> None:
        entry = self._digests.pop(event.digest, None)
        if entry is None:
            return  # its ticket closed meanwhile
        wrong = self._landings.wrong_positions(entry.landing, event.digests)
        if not wrong:
            self._apply(entry, DecoderEvent.DIGESTS_EQUAL)
        else:
            text = f"the digests of {len(wrong)} pages differ, the first is position {wrong[0]}"
            self._fail(entry, DecoderEvent.DIGESTS_DIFFER, "corrupt", text)

    # ---- effects -----------------------------------------------------------------------------------------------

    def _fail(self, entry: Entry, event: DecoderEvent, reason: FailureReason, text: str) -> None:
        self._fail_with(entry, event, Failure(reason, text))

    def _fail_with(self, entry: Entry, event: DecoderEvent, failure: Failure) -> None:
        """Apply an event; if it is the one that ends the request, this is why."""
        if event is DecoderEvent.CONTRADICTED:
            entry.failure = Failure("fault", f"the prefiller contradicts itself: {failure.text}")
        elif entry.state in (DecoderState.NEW, DecoderState.OPEN, DecoderState.VERIFYING):
            entry.failure = failure
        self._apply(entry, event)

    def _apply(self, entry: Entry, event: DecoderEvent) -> None:
        move = DECODER[entry.state, event]
        if move.state is not entry.state:
            entry.repeat_at = None  # answered, or something else is asked now
        entry.state = move.state
        for effect in move.effects:
            self._carry_out(entry, effect)

    def _carry_out(self, entry: Entry, effect: DecoderEffect) -> None:
        match effect:
            case DecoderEffect.ARM:
                self._fabric.arm(entry.imm, entry.expected)
            case DecoderEffect.SEND_PREFILL:
                self._fabric.send(entry.prefiller.peer, encode(entry.prefill(self._identity.uuid, self._now)))
                entry.repeat_at = self._now + entry.repeat_after
                entry.repeat_after *= 2
            case DecoderEffect.SEND_CANCEL:
                self._fabric.send(entry.prefiller.peer, encode(entry.cancel(self._identity.uuid)))
                entry.repeat_at = self._now + self._options.patience_s / 4
            case DecoderEffect.RETARGET:
                assert entry.num_posted is not None, "retarget without num_posted"
                entry.target = entry.num_posted
                self._fabric.retarget(entry.imm, entry.target)
            case DecoderEffect.START_DIGESTS:
                self._start_digests(entry)
            case DecoderEffect.START_LOST_TIMER:
                entry.lost_at = self._now + self._options.lost_write_s if entry.lost_at is None else entry.lost_at
            case DecoderEffect.START_PATIENCE:
                entry.patience_at = self._now + self._options.patience_s
            case DecoderEffect.STOP_TIMERS:
                entry.stop_timers()
            case DecoderEffect.SUSPECT_LINK:
                self._counts["wrong_bytes"] += 1
                self._tell(LinkSuspected(peer=entry.prefiller.peer, text=entry.failure.text))
            case DecoderEffect.QUARANTINE_PAGES:
                self._landings.quarantine(entry.landing)
            case DecoderEffect.KEEP_PAGES:
                self._landings.keep(entry.landing)
            case DecoderEffect.FREE_PAGES:
                self._landings.free(entry.landing)
            case DecoderEffect.REVOKE_PEER:
                self._revoke(entry.prefiller, "revoked", "another ticket of this prefiller went wrong", cause=entry)
            case DecoderEffect.CLOSE:
                self._close(entry)
            case DecoderEffect.ANSWER_READY:
                self._answer_ready(entry)
            case DecoderEffect.ANSWER_FAILED:
                self._answer_failed(entry)

    def _start_digests(self, entry: Entry) -> None:
        """Everything has landed; is it what was sent?"""
        header = self._landings.header_for(entry.landing, ticket=entry.ticket, expected=entry.expected)
        if header is None:
            self._fail(entry, DecoderEvent.DIGESTS_DIFFER, "corrupt", "the aux header is not this ticket's")
            return
        entry.cached_len = header.cached_len
        if not self._options.verify_kv:
            self._apply(entry, DecoderEvent.DIGESTS_EQUAL)
            return
        reads = self._landings.reads(entry.landing, entry.plan)
        entry.digest = self._fabric.submit_digest(reads, entry.landing.prompt.num_sent)
        self._digests[entry.digest] = entry

    def _close(self, entry: Entry) -> None:
        self._fabric.disarm(entry.imm)
        self._landings.give_back(entry.landing)
        if entry.digest is not None:
            self._digests.pop(entry.digest, None)
        del self._entries[entry.imm]

    def _answer_ready(self, entry: Entry) -> None:
        self._counts["ready"] += 1
        request = entry.landing.request
        self._outcomes.append(
            Ready(
                request_id=request.request_id,
                imm=entry.imm,
                cached_len=max(request.cached_len, entry.cached_len),
                landed_at=entry.landed_at,
            )
        )

    def _answer_failed(self, entry: Entry) -> None:
        failure = entry.failure
        self._failures[failure.reason] += 1
        self._outcomes.append(
            TicketFailed(
                request_id=entry.landing.request.request_id,
                imm=entry.imm,
                reason=failure.reason,
                text=failure.text,
                retry_after_s=failure.retry_after_s,
                refusal=failure.refusal,
            )
        )

    def _revoke(self, prefiller: Prefiller, reason: FailureReason, text: str, cause: Entry | None = None) -> None:
        has_ended = self._prefillers.revoke(prefiller, self._now)
        event = DecoderEvent.REVOKED if has_ended else DecoderEvent.ACCESS_ENDING
        self._counts["revokes"] += 1
        self._outcomes.append(PeerSuspected(peer=prefiller.peer, text=cause.failure.text if cause else text))
        if cause is not None:
            self._apply(cause, event)  # its own reason stands
        self._fail_all(prefiller, event, reason, text)

    def _give_up(self, peer: PeerId, text: str) -> None:
        """One that is being greeted, or whose access is ending, was given up before."""
        prefiller = self._prefillers.get(peer)
        if prefiller is not None and prefiller.state == "ready":
            self._revoke(prefiller, "peer_lost", text)

    def _fail_all(self, prefiller: Prefiller, event: DecoderEvent, reason: FailureReason, text: str) -> None:
        for entry in self._of(prefiller):
            self._fail(entry, event, reason, text)

    def _of(self, prefiller: Prefiller) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.prefiller is prefiller]

    # ---- state shows itself ------------------------------------------------------------------------------------

    def statistics(self) -> DecoderStatistics:
        return DecoderStatistics(
            num_open=len(self._entries),
            num_revoking=sum(entry.state is DecoderState.REVOKING for entry in self._entries.values()),
            num_quarantined_pages=self._landings.num_quarantined_pages,
            num_prefillers_ready=self._prefillers.num_ready,
            num_ready=self._counts["ready"],
            num_failed=dict(self._failures),
            num_revokes=self._counts["revokes"],
            num_wrong_bytes=self._counts["wrong_bytes"],
            num_surplus=self._counts["surplus"],
            num_strange_messages=self._counts["strange"],
        )

    def check(self) -> None:
        """Assert that slots, pages and tickets agree."""
        assert self._landings.num_taken == len(self._entries), f"{self._landings!r}, {len(self._entries)} tickets"
        for entry in self._entries.values():
            is_revoking = entry.state is DecoderState.REVOKING
            assert is_revoking == entry.prefiller.is_ending, f"{entry.ticket} is {entry.state}: {entry.prefiller}"
            assert not is_revoking or entry.landing.quarantined, f"{entry.ticket} is revoking, its pages are in use"
        self._landings.check()

    def __repr__(self) -> str:
        states = Counter(entry.state.name for entry in self._entries.values())
        return f"DecoderMessenger({dict(states)}, {self._prefillers!r})"
