"""The prefiller's half of the KV messenger: from a decoder's Prefill to the reuse of the source pages.

Owns leases, running tickets and the handshakes with decoders; shares the page pool with the loop it runs on. Knows no
model and no clock: every call takes `now`, and nothing here waits. The life of a ticket is the table `life.PREFILLER`;
this file turns messages, fabric results, steps and timers into its events and carries out its effects.

    handle          a Prefill arrived: refused, or its source pages are taken, its list is open  -> PrefillJob
                    pages that the prefix index had already are posted at once
    begin_step      the writes of a step's chunks, before the model runs it; it raises the layer counter itself
    commit_step     the step is computed: its whole pages may be hit from now on
    fail_step       it is not: nothing of it is posted any more
    JobDropped      cancelled, failed or revoked: plan no further chunk (drain outcomes before planning a step)

With `transfer` "whole" a ticket's list stays empty until the commit of its last chunk, which posts all of it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FabricError, InputError, ProtocolFault
from headrace.fabric.interface import (
    Event,
    Fabric,
    Imm,
    LastWrite,
    MessageReceived,
    PageWrites,
    PeerHeard,
    PeerId,
    PeerLost,
    PeerSilent,
    TransferDone,
    TransferId,
)
from headrace.kvcache.pages import PagePool
from headrace.messenger import life
from headrace.messenger.hello import Identity
from headrace.messenger.jobs import HOLDING, Chunk, Job, PrefillerOptions, PrefillerStatistics, Step
from headrace.messenger.known_decoders import Decoder, KnownDecoders
from headrace.messenger.leases import Leases
from headrace.messenger.life import PREFILLER, PrefillerEffect, PrefillerEvent, PrefillerState
from headrace.messenger.outcomes import JobDropped, PeerReady, PeerRefused, PrefillerOutcome, PrefillJob
from headrace.messenger.sources import Refusal, Sources
from headrace.protocol.control import Granted, Reserve, Wait
from headrace.protocol.messages import (
    AnyMessage,
    Cancel,
    Hello,
    HelloHead,
    Prefill,
    Ticket,
    decode,
    encode,
    hello_of_another_version,
)


class PrefillerMessenger:
    """`pages` are the same on all ranks; `memory` is that of all ranks as `[total_bytes] uint8`, the same that `fabric`
    serves."""

    def __init__(
        self,
        *,
        fabric: Fabric,
        identity: Identity,
        pages: PagePool,
        memory: NDArray[np.uint8],
        options: PrefillerOptions = PrefillerOptions(),
    ) -> None:
        self._fabric = fabric
        self._identity = identity
        self._layout = identity.pool
        self._options = options
        self._sources = Sources(layout=identity.pool, pages=pages, memory=memory, salt=identity.fingerprint.encode())
        self._leases = Leases(capacity_tokens=options.lease_tokens, reserve_tokens=options.reserve_tokens)
        self._decoders = KnownDecoders(fabric, identity)
        self._jobs: dict[Ticket, Job] = {}
        self._of_transfer: dict[TransferId, Job] = {}
        self._steps: dict[int, Step] = {}
        self._last_step = -1
        self._outcomes: list[PrefillerOutcome] = []
        self._now = 0.0
        self._counts: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._bytes_of: Counter[int] = Counter()  # by rank

    # ---- what the role asks ------------------------------------------------------------------------------------

    def reserve(self, message: Reserve, now: float) -> Granted | Wait:
        """A gateway asks for a lease."""
        self._leases.expire(now)
        lease = self._leases.try_grant(message.request_id, num_tokens=message.num_tokens, tier=message.tier, now=now)
        if lease is None:
            return Wait(
                sender=self._identity.uuid,
                request_id=message.request_id,
                num_queued_tokens=self._leases.outstanding_tokens,
            )
        return Granted(sender=self._identity.uuid, request_id=message.request_id, lease=lease)

    def return_lease(self, lease: str) -> None:
        """The gateway does not use it (the decoder had no room). Idempotent."""
        self._leases.end(lease)

    def begin_step(self, step: int, chunks: Sequence[Chunk]) -> None:
        """Hand the fabric what each layer of this step is to send, before the model runs it. Steps rise.

        Raises InputError for a chunk that does not continue its prompt or whose ticket was dropped.
        """
        jobs = [self._check_chunk(chunk) for chunk in chunks]
        if len({chunk.ticket for chunk in chunks}) < len(chunks):
            raise InputError("chunk", "must be one for each ticket of a step")
        if step <= self._last_step:
            raise InputError("step", f"must rise, is {step} after {self._last_step}")
        has_program = self._options.transfer == "layers" and self._submit_program(step, jobs, chunks)
        self._last_step = step
        self._steps[step] = Step(tuple(chunks), has_program, jobs)
        for job in jobs:
            job.in_step = True

    def _submit_program(self, step: int, jobs: Sequence[Job], chunks: Sequence[Chunk]) -> bool:
        """-> whether this step sends anything."""
        writes: list[tuple[TransferId, PageWrites]] = []
        last: list[tuple[TransferId, int, LastWrite]] = []
        for job, chunk in zip(jobs, chunks, strict=True):
            prompt = job.source.prompt
            completed = prompt.completed_by(chunk.begin, chunk.end)
            writes += [(job.transfer, write) for write in self._sources.writes(job.source, completed)]
            if chunk.end == prompt.num_prefilled:
                last.append((job.transfer, self._layout.num_layers, self._sources.last_write(job.source)))
        if writes or last:
            self._fabric.submit_program(step, writes, last)
        return bool(writes or last)

    def _check_chunk(self, chunk: Chunk) -> Job:
        job = self._jobs.get(chunk.ticket)
        if job is None or job.state is not PrefillerState.OPEN or job.in_step:
            raise InputError("chunk", f"ticket {chunk.ticket} is not waiting for a step")
        if chunk.begin != job.source.computed or not chunk.begin < chunk.end <= job.source.prompt.num_prefilled:
            raise InputError(
                "chunk",
                f"must continue at {job.source.computed} and end by {job.source.prompt.num_prefilled}, "
                f"is [{chunk.begin}, {chunk.end})",
            )
        return job

    def commit_step(self, step: int, now: float) -> None:
        """Every layer of the step is computed and the counter stands at its end."""
        self._now = now
        ended = self._end_step(step)
        for job, chunk in zip(ended.jobs, ended.chunks, strict=True):
            job.in_step = False
            job.source.computed = chunk.end
            self._sources.index(job.source, chunk.begin, chunk.end)
            self._leases.computed(job.source.message.lease, chunk.end - chunk.begin)
            is_open, is_last = job.state is PrefillerState.OPEN, chunk.end == job.source.prompt.num_prefilled
            if is_open and is_last and self._options.transfer == "whole":
                self._post_whole(job)
            if is_last or not is_open:
                self._apply(job, PrefillerEvent.ENGINE_LEFT)

    def fail_step(self, step: int, reason: str, now: float) -> None:
        """The step failed in the middle: what its layers had not computed is never sent. Called before the layer
        counter moves on."""
        self._now = now
        ended = self._end_step(step)
        if ended.has_program:
            self._fabric.fail_step(step)
        for job in ended.jobs:
            job.in_step = False
            job.reason = reason
            was_open = job.state is PrefillerState.OPEN
            self._apply(job, PrefillerEvent.STEP_FAILED)
            if not was_open:
                self._apply(job, PrefillerEvent.ENGINE_LEFT)

    def _end_step(self, step: int) -> Step:
        if step not in self._steps:
            raise InputError("step", f"{step} is not running")
        return self._steps.pop(step)

    def fail_job(self, ticket: Ticket, reason: str, now: float) -> None:
        """The engine will not compute this prompt (it drains, or cannot). A ticket that is over is left alone.

        Raises InputError while a step runs with it: that step is failed instead.
        """
        job = self._jobs.get(ticket)
        if job is None:
            return
        if job.in_step:
            raise InputError("ticket", f"{ticket} is in a running step: fail the step")
        self._now = now
        job.reason = reason
        self._apply(job, PrefillerEvent.STEP_FAILED)

    def peer_exited(self, peer: PeerId, now: float) -> None:
        """The decoder's process is gone for good: nothing reads the source pages for it. Idempotent."""
        self._now = now
        decoder = self._decoders.of_peer(peer)
        if decoder is not None:
            self._forget(decoder)

    def _forget(self, decoder: Decoder) -> None:
        self._decoders.forget(decoder)
        for job in [j for j in self._jobs.values() if j.decoder is decoder]:
            self._apply(job, PrefillerEvent.TARGET_EXITED)

    # ---- what happens ------------------------------------------------------------------------------------------

    def handle(self, events: Sequence[Event], now: float) -> None:
        """Everything that the fabric told since the last call. Results first: a list that is done cannot be closed
        any more, and a Cancel drained beside its result must find it. No ticket ends by PeerLost: lists to that
        decoder end, and their results tell it; nor by PeerSilent: it may go on, and read what was posted."""
        self._now = now
        for event in events:
            if isinstance(event, TransferDone):
                self._on_transfer_done(event)
        for event in events:
            match event:
                case MessageReceived():
                    self._on_message(event.message)
                case PeerLost() | PeerSilent():
                    self._decoders.absent(event.peer, now)
                case PeerHeard():
                    self._decoders.present(self._decoders.of_peer(event.peer))

    def advance(self, now: float) -> None:
        """Carry out what is due."""
        self._now = now
        self._leases.expire(now)
        self._decoders.forget_refused(now)
        for decoder in self._decoders.long_absent(now):
            if not any(job.decoder is decoder for job in self._jobs.values()):
                self._decoders.forget(decoder)
        for job in [j for j in self._jobs.values() if j.deadline <= now]:
            job.deadline = float("inf")
            job.reason = "the deadline of the ticket passed"
            self._apply(job, PrefillerEvent.DEADLINE)

    def next_due(self) -> float | None:
        """When `advance` has something to do next."""
        due = [self._leases.next_expiry(), self._decoders.next_forget(), *(j.deadline for j in self._jobs.values())]
        return min((at for at in due if at is not None and at != float("inf")), default=None)

    def drain_outcomes(self) -> list[PrefillerOutcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _on_transfer_done(self, event: TransferDone) -> None:
        job = self._of_transfer.pop(event.transfer, None)
        if job is None:
            return  # its decoder has exited
        job.num_posted = event.num_posted
        job.num_unknown = event.num_failed
        job.reason = job.reason or event.text
        if event.complete:
            self._bytes_of += job.source.plan.bytes_of(job.source.prompt.num_sent)
        self._apply(job, life.list_done(complete=event.complete, num_failed=event.num_failed))

    def _on_message(self, wire: bytes) -> None:
        message: AnyMessage | HelloHead | None
        try:
            message = decode(wire)
        except ProtocolFault:
            message = hello_of_another_version(wire)
        match message:
            case Hello() | HelloHead():
                self._on_hello(message)
            case Prefill() | Cancel():
                decoder = self._decoders.get(message.sender)
                self._decoders.present(decoder)
                if decoder is None or message.ticket.decoder != message.sender:
                    self._counts["strange"] += 1
                elif isinstance(message, Prefill):
                    self._on_prefill(decoder, message)
                else:
                    self._on_cancel(decoder, message.ticket)
            case _:
                self._counts["strange"] += 1

    def _on_hello(self, message: Hello | HelloHead) -> None:
        try:
            if isinstance(message, Hello):
                replaced = self._decoders.replaced_by(message)
                if replaced is not None:
                    self._forget(replaced)
                outcome = self._decoders.on_hello(message, self._now)
            else:
                outcome = self._decoders.refuse_version(message, self._now)
        except (InputError, FabricError):  # its address is none, or somebody else's: there is nobody to answer
            self._counts["strange"] += 1
            return
        match outcome:
            case (Decoder() as decoder, PeerReady() as ready):
                for job in [j for j in self._jobs.values() if j.decoder is decoder]:
                    self._apply(job, PrefillerEvent.NEWER_EPOCH)
                self._outcomes.append(ready)
            case PeerRefused() as refused:
                self._outcomes.append(refused)

    def _on_prefill(self, decoder: Decoder, message: Prefill) -> None:
        job = self._jobs.get(message.ticket)
        if job is not None:
            self._apply(job, PrefillerEvent.PREFILL_STALE)
            return
        # Another request's lease (names begin anew with every prefiller) is neither used nor ended by this one.
        is_its_own = self._leases.is_unused(message.lease, message.request_id)
        job = Job(ticket=message.ticket, decoder=decoder, lease=message.lease if is_its_own else None)
        tombstone = decoder.remembered(message.ticket)
        is_new = decoder.is_new(message.ticket)
        if tombstone is not None:
            job.rise_from(tombstone)
        elif is_new:
            self._admit(job, message)
        else:
            text = "the epoch is over, or the slot has had a newer ticket"
            job.refusal = Refusal(reason="stale", text=text)
        self._apply(job, life.prefill(is_new=is_new, may_run=job.accepted is not None))

    def _on_cancel(self, decoder: Decoder, ticket: Ticket) -> None:
        job = self._jobs.get(ticket)
        if job is None:
            job = Job(ticket=ticket, decoder=decoder)
            tombstone = decoder.remembered(ticket)
            if tombstone is not None:
                job.rise_from(tombstone)
            elif not decoder.is_new(ticket):
                return  # of an older epoch or an older use of the slot: over at the decoder
        self._apply(job, PrefillerEvent.CANCEL)

    # ---- admission ---------------------------------------------------------------------------------------------

    def _admit(self, job: Job, message: Prefill) -> None:
        """Take lease and source, or say why not in `job.refusal`: the lease ends with that."""
        plans = job.decoder.plans
        job.refusal = self._sources.why_not(message, plans.dst) or self._over_the_cap(job.decoder)
        if job.refusal is not None:
            return
        # First, though it ends with a refusal too: taking a source evicts what others may hit.
        tier = self._leases.use(message.lease, message.request_id, num_tokens=len(message.token_ids) - 1)
        if tier is None:
            text = "lease: must be the request's own, unused, not over, and of as many tokens as the prompt"
            job.refusal = Refusal(reason="no_lease", text=text)
            return
        source = self._sources.try_take(message, plans)
        if source is None:
            text = "pages or aux slots of the prefiller are all in use"
            job.refusal = Refusal(reason="no_room", text=text, retry_after_s=self._options.retry_after_s)
            return
        job.accepted = source
        job.tier = tier
        job.deadline = self._now + message.remaining_s

    def _over_the_cap(self, decoder: Decoder) -> Refusal | None:
        """Pages that only this decoder's slowness keeps. What its running tickets hold is bounded by their leases."""
        held = self._num_held_pages(job for job in self._jobs.values() if job.decoder is decoder)
        if held <= self._options.held_share * self._layout.num_pages:
            return None
        text = f"this decoder has not taken {held} pages of earlier tickets"
        return Refusal(reason="held_cap", text=text, retry_after_s=self._options.retry_after_s)

    @staticmethod
    def _num_held_pages(jobs: Iterable[Job]) -> int:
        """Each page once: tickets share those of a common prefix."""
        return len({page for job in jobs if job.state in HOLDING for page in job.source.pages})

    # ---- effects -----------------------------------------------------------------------------------------------

    def _apply(self, job: Job, event: PrefillerEvent) -> None:
        move = PREFILLER[job.state, event]
        job.state = move.state
        for effect in move.effects:
            self._carry_out(job, effect)

    def _carry_out(self, job: Job, effect: PrefillerEffect) -> None:
        match effect:
            case PrefillerEffect.REMEMBER:
                self._remember(job)
            case PrefillerEffect.OPEN_LIST:
                self._open_list(job)
            case PrefillerEffect.START_JOB:
                self._start_job(job)
            case PrefillerEffect.DROP_JOB:
                self._drop_job(job)
            case PrefillerEffect.CLOSE_LIST:
                job.num_posted = self._fabric.close_transfer(job.transfer)
            case PrefillerEffect.END_LEASE:
                if job.lease is not None:
                    self._leases.end(job.lease)
            case PrefillerEffect.RELEASE_SOURCE:
                self._release_source(job)
            case PrefillerEffect.SEND_REFUSED:
                message = job.refused(self._identity.uuid)
                self._refusals[message.reason] += 1
                self._answer(job, message)
            case PrefillerEffect.SEND_FAILED:
                self._answer(job, job.failed(self._identity.uuid))
            case PrefillerEffect.SEND_CANCEL_ACK:
                self._answer(job, job.cancel_ack(self._identity.uuid))
            case PrefillerEffect.SEND_CLOSED:
                self._counts["closed"] += 1
                self._answer(job, job.closed(self._identity.uuid))
            case PrefillerEffect.SEND_AGAIN:
                if job.answer is not None:
                    self._fabric.send(job.decoder.peer, job.answer)

    def _answer(self, job: Job, message: AnyMessage) -> None:
        """Say how the ticket ended, and keep it for a decoder that asks again."""
        job.answer = encode(message)
        self._fabric.send(job.decoder.peer, job.answer)
        if job.state is PrefillerState.DONE:
            self._remember(job)

    def _remember(self, job: Job) -> None:
        job.decoder.remember(job.ticket, num_posted=job.num_posted, num_unknown=job.num_unknown, answer=job.answer)

    def _open_list(self, job: Job) -> None:
        """The write list, and on it what waits for no step: the pages that the prefix index had."""
        source = job.source
        self._counts["accepted"] += 1
        self._jobs[job.ticket] = job
        job.write_list = self._fabric.open_transfer(
            job.decoder.peer, Imm(job.ticket.imm), num_pages=source.prompt.num_sent
        )
        self._of_transfer[job.write_list] = job
        if source.needs_no_step:
            self._post_whole(job)
        elif self._options.transfer == "layers":
            self._post(job, source.prompt.present(source.cached_len))

    def _post_whole(self, job: Job) -> None:
        """Everything of the ticket: all of it is computed, and nothing was posted before."""
        self._post(job, job.source.prompt.sent)
        self._fabric.submit_last(job.transfer, self._sources.last_write(job.source))

    def _post(self, job: Job, pages: range) -> None:
        for writes in self._sources.writes(job.source, pages):
            self._fabric.submit_pages(job.transfer, writes)

    def _start_job(self, job: Job) -> None:
        source = job.source
        self._leases.computed(source.message.lease, source.cached_len)
        if source.needs_no_step:
            self._apply(job, PrefillerEvent.ENGINE_LEFT)
            return
        self._outcomes.append(
            PrefillJob(
                ticket=job.ticket,
                request_id=source.message.request_id,
                tier=job.tier,
                token_ids=source.message.token_ids,
                pages=source.pages,
                cached_len=source.cached_len,
                remaining_s=source.message.remaining_s,
            )
        )

    def _drop_job(self, job: Job) -> None:
        self._outcomes.append(JobDropped(ticket=job.ticket))
        if not job.in_step:
            self._apply(job, PrefillerEvent.ENGINE_LEFT)

    def _release_source(self, job: Job) -> None:
        self._sources.release(job.source)
        self._remember(job)
        del self._jobs[job.ticket]
        # Still there when the target has exited: then the result tells nobody anything.
        self._of_transfer.pop(job.transfer, None)
        job.accepted = None

    # ---- state shows itself ------------------------------------------------------------------------------------

    def statistics(self) -> PrefillerStatistics:
        return PrefillerStatistics(
            num_tickets=len(self._jobs),
            num_held_pages=self._num_held_pages(self._jobs.values()),
            num_leased_tokens=self._leases.outstanding_tokens,
            num_interactive_tokens=self._leases.outstanding_of("interactive"),
            num_accepted=self._counts["accepted"],
            num_refused=dict(self._refusals),
            num_closed=self._counts["closed"],
            num_bytes_sent=tuple(self._bytes_of[rank] for rank in range(self._layout.num_ranks)),
            num_strange_messages=self._counts["strange"],
        )

    def check(self) -> None:
        """Assert that staging slots, transfers, pages and tickets agree."""
        assert self._sources.num_staging_taken == len(self._jobs), f"staging slots leak: {self!r}"
        assert all(job.accepted is not None for job in self._jobs.values()), "an open ticket without a source"
        assert set(self._of_transfer) <= {job.transfer for job in self._jobs.values()}, f"transfers leak: {self!r}"
        self._sources.check()

    def __repr__(self) -> str:
        states = Counter(job.state.name for job in self._jobs.values())
        return f"PrefillerMessenger({dict(states)}, {self._decoders!r}, {self._leases!r})"
