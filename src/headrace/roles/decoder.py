"""The decoder and colocated processes: where requests, engine and KV messenger meet.

Owns the table of requests of all gateways, and the loop on which pages, engines and messenger live; the model runs on
its own thread. The life of a request here:

    Generate      pages reserved, or NoRoom; with a prefiller and a hit h < n-1 a ticket is opened, else prefilled here
    Ready         its KV has landed: it decodes
    TicketFailed  it holds nothing; NeedPrefill -> another ticket, or (answered so, or not in 200 ms) prefilled here
    RequestDone   Finished, the one last word; also after Abort, its deadline, or the loss of its gateway

Once it is told to drain, every Generate is answered with NoRoom, and with the last request's end it leaves.
A colocated process is the same without messenger and fabric.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack

from headrace.engine.requests import (
    Admission,
    EngineOptions,
    EngineRequest,
    FirstStep,
    NewToken,
    RequestDone,
    SamplingParams,
)
from headrace.errors import InputError
from headrace.messenger.outcomes import (
    DecoderOutcome,
    FailureReason,
    LinkSuspected,
    PeerReady,
    PeerRefused,
    PeerSuspected,
    Ready,
    TicketFailed,
)
from headrace.protocol.control import (
    Abort,
    Accepted,
    Drain,
    Finished,
    FinishReason,
    GatewayMessage,
    Generate,
    NeedPrefill,
    NoRoom,
    Prefillers,
    PrefillFrom,
    Rejected,
    Status,
    Tokens,
    UsePrefiller,
)
from headrace.protocol.messages import MOST_REMAINING_S, clipped
from headrace.roles.calibration import calibrate, has_budget
from headrace.roles.draining import Drained, Draining
from headrace.roles.groups import Groups
from headrace.roles.instance import Instance, open_instance
from headrace.roles.links import GatewayUuid, Links
from headrace.roles.options import InstanceOptions
from headrace.roles.remote_prefill import PrefillerUuid, RemotePrefill
from headrace.roles.served import MAX_TICKETS, Served
from headrace.roles.status import decoder_status
from headrace.roles.step_log import StepLog
from headrace.roles.stopping import LAST_WORDS_S, stoppable
from headrace.roles.turns import keep_turning

NEED_PREFILL_PATIENCE_S = 0.2

FAULTS: frozenset[FailureReason] = frozenset({"failed", "lost_write", "corrupt", "peer_lost", "fault"})
"""Ways for a ticket to end that speak against its prefiller or the link: neither a refusal nor our own doing, nor what
another ticket did."""

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "aborted": "abort", "failed": "error"}

_log = logging.getLogger(__name__)


def run_decoder(options: InstanceOptions) -> Drained | None:
    """A decoder, or with role "colocated" both phases in one, until SIGINT or SIGTERM (None), or until it is drained.
    Raises InputError, FabricError, RankLost."""
    drain = Draining()
    with stoppable() as process, open_instance(options, on_rank_lost=process.fail) as instance:
        process.run(lambda: Decoder(instance, drain).run())
    return drain.over


class Decoder:
    def __init__(self, instance: Instance, drain: Draining | None = None) -> None:
        options = instance.options
        self._instance = instance
        self._uuid = instance.identity.uuid
        self._is_colocated = options.role == "colocated"
        self._loop = asyncio.get_running_loop()
        self._groups = Groups(
            instance.pools,
            options=EngineOptions(
                page_size=options.page_size,
                chunk_tokens=options.chunk_tokens,
                max_running=options.max_running,
                max_model_len=instance.max_model_len,
                sample_from_prefill=self._is_colocated,
                tpot_s=options.tpot_s,
                max_stall_s=options.max_stall_s,
            ),
            salt=instance.salt,
            vocab_size=instance.shape.vocab_size,
        )
        self._drain = drain or Draining()
        self._step_log = StepLog(_log)
        self._served: dict[str, Served] = {}
        self._work = asyncio.Event()
        with ExitStack() as exits:
            self._remote: RemotePrefill | None = None
            if not self._is_colocated:
                self._remote = RemotePrefill(instance, on_outcome=self._on_outcome, on_room=self._work.set)
                exits.callback(self._remote.close)
            self._links = exits.enter_context(
                Links(
                    options.gateways,
                    announce=instance.announce(fabric_address=b""),
                    status=self._status,
                    on_message=self._on_message,
                    on_lost=self._on_gateway_lost,
                )
            )
            self._exits = exits.pop_all()

    async def run(self) -> None:
        self._instance.log_start()
        with self._exits:
            # Before it announces itself: a budget is kept from the first request on.
            if has_budget(self._instance.options):
                await calibrate(self._instance, self._groups.costs)
            beside = [self._links.run()] if self._remote is None else [self._links.run(), self._remote.run()]
            await keep_turning(
                self._turn,
                self._work,
                beside=beside,
                until=self._drain.wait(lambda: bool(self._served)),
                leave=self._leave,
            )

    async def _leave(self) -> None:
        """The process is told to end: no prefiller, on whichever host, is to go on for it."""
        imms = [served.imm for served in self._served.values() if served.imm is not None]
        if self._remote is not None and imms:
            for imm in imms:
                self._remote.cancel(imm)
            await asyncio.sleep(LAST_WORDS_S)

    async def _turn(self) -> bool:
        """One step of all groups. -> whether there was one."""
        if self._remote is not None:
            self._remote.turn()
        step = self._groups.begin_step(time.monotonic())
        self._tell_outputs()
        if step is None:
            self._step_log.waits()
            return False
        try:
            tokens = await self._instance.compute(step.rows)
        except (InputError, RuntimeError, MemoryError) as error:
            _log.exception("a step failed")
            self._groups.fail_step(step, f"the step failed: {error}")
        else:
            now = time.monotonic()
            self._groups.commit_step(step, tokens, now)
            self._step_log.tell(step.size, began_at=step.began_at, ended_at=now)
        self._tell_outputs()
        return True

    # ---- what gateways ask -------------------------------------------------------------------------------------

    def _on_message(self, gateway: GatewayUuid, message: GatewayMessage) -> None:
        match message:
            case Generate():
                self._on_generate(gateway, message)
            case Abort():
                self._end(message.request_id, gateway, "abort", "")
            case UsePrefiller():
                self._on_use_prefiller(gateway, message)
            case Prefillers():
                self._on_prefillers(gateway, message)
            case Drain():
                self._drain.begin(message)
                self._links.broadcast(self._status())
            case _:
                _log.warning("a %s is not for a decoder", type(message).__name__)
        self._work.set()

    def _on_generate(self, gateway: GatewayUuid, generate: Generate) -> None:
        known = self._served.get(generate.request_id)
        if known is not None and known.gateway == gateway:
            return  # repeated
        if self._drain.has_begun:
            self._refuse(gateway, generate, num_free_pages=0)
            return
        try:
            # Raises for an id that is in use, too: another gateway's, or that of a ticket which is not over yet.
            admission = self._groups.try_admit(_engine_request(generate))
        except InputError as error:
            rejected = Rejected(
                sender=self._uuid, request_id=generate.request_id, field=error.field, text=clipped(str(error))
            )
            self._links.send(gateway, rejected)
            return
        if admission is None:
            self._refuse(gateway, generate, num_free_pages=self._groups.most_free_pages)
            return
        served = self._serve(gateway, generate)
        uses_lease = self._place(served, admission, generate.prefill)
        self._accept(served, uses_lease=uses_lease)

    def _refuse(self, gateway: GatewayUuid, generate: Generate, *, num_free_pages: int) -> None:
        no_room = NoRoom(sender=self._uuid, request_id=generate.request_id, num_free_pages=num_free_pages)
        self._links.send(gateway, no_room)

    def _serve(self, gateway: GatewayUuid, generate: Generate) -> Served:
        served = Served(
            gateway=gateway,
            generate=generate,
            deadline=time.monotonic() + generate.remaining_s,
            deadline_timer=self._loop.call_later(generate.remaining_s, self._on_deadline, generate.request_id),
        )
        self._served[generate.request_id] = served
        return served

    def _place(self, served: Served, admission: Admission, prefill: PrefillFrom | None) -> bool:
        """Have it prefilled there or here. -> whether there."""
        served.unpark()
        served.hit_len = admission.cached_len
        engine = self._groups.engine_of(served.request_id)
        if prefill is not None and self._remote is not None and served.num_tickets < MAX_TICKETS:
            now = time.monotonic()
            imm = self._remote.try_fetch(
                admission,
                group=self._groups.group_of(served.request_id),
                pages=engine.pages_to_fetch(served.request_id),
                prefiller=PrefillerUuid(prefill.prefiller),
                lease=prefill.lease,
                remaining_s=min(max(0.0, served.deadline - now), MOST_REMAINING_S),
            )
            if imm is not None:
                served.imm, served.prefiller, served.asked_at = imm, prefill.prefiller, now
                served.num_tickets += 1
                engine.fetch(served.request_id)
                return True
        served.started_at = time.monotonic()
        engine.start(served.request_id)
        return False

    def _on_use_prefiller(self, gateway: GatewayUuid, message: UsePrefiller) -> None:
        served = self._served.get(message.request_id)
        if served is None or served.gateway != gateway:
            return  # over
        uses_lease = False  # nor where the answer came too late
        if served.is_parked:
            engine = self._groups.engine_of(message.request_id)
            admission = None if message.prefill is None else engine.try_readmit(message.request_id)
            if admission is None:
                self._prefill_here(served)
            else:
                uses_lease = self._place(served, admission, message.prefill)
        if message.prefill is not None:
            self._accept(served, uses_lease=uses_lease)

    def _prefill_here(self, served: Served) -> None:
        """When there is room: it waits in its tier, holding nothing."""
        served.unpark()
        served.started_at = time.monotonic()
        self._groups.engine_of(served.request_id).wait_for_room(served.request_id)
        self._work.set()

    def _on_prefillers(self, gateway: GatewayUuid, message: Prefillers) -> None:
        if self._remote is not None:
            self._remote.name(
                gateway, {PrefillerUuid(prefiller.uuid): prefiller.fabric_address for prefiller in message.prefillers}
            )

    def _on_gateway_lost(self, gateway: GatewayUuid) -> None:
        for served in [served for served in self._served.values() if served.gateway == gateway]:
            self._end(served.request_id, gateway, "abort", "")
        if self._remote is not None:
            self._remote.gateway_lost(gateway)
        self._work.set()

    def _on_deadline(self, request_id: str) -> None:
        self._end(request_id, self._served[request_id].gateway, "error", "the deadline of the request passed")
        self._work.set()

    def _end(self, request_id: str, gateway: GatewayUuid, reason: FinishReason, text: str) -> None:
        """Give it up, wherever it is. Idempotent."""
        served = self._served.get(request_id)
        if served is None or served.gateway != gateway:
            return
        served.failure = (reason, text)
        if served.imm is not None and self._remote is not None:
            self._remote.cancel(served.imm)
        self._groups.abort(request_id)
        self._tell_outputs()

    # ---- what the messenger tells ------------------------------------------------------------------------------

    def _on_outcome(self, outcome: DecoderOutcome) -> None:
        match outcome:
            case Ready():
                # Told to the engine for a request that has ended meanwhile too: it knows whose the pages are.
                self._groups.engine_of(outcome.request_id).fetched(outcome.request_id, outcome.cached_len)
                if (served := self._of_ticket(outcome)) is not None:
                    served.imm, served.landed_at = None, outcome.landed_at
            case TicketFailed():
                self._groups.engine_of(outcome.request_id).fetch_failed(outcome.request_id)
                if (served := self._of_ticket(outcome)) is not None:
                    self._on_ticket_failed(served, outcome)
            case PeerReady():
                if self._remote is not None:
                    self._remote.tell_ready(outcome)
            case PeerRefused():
                _log.error("a prefiller and this decoder do not fit together: %s", outcome.text)
            case PeerSuspected() | LinkSuspected():
                _log.warning("prefiller suspected: %s", outcome.text)
        self._work.set()

    def _of_ticket(self, outcome: Ready | TicketFailed) -> Served | None:
        """None where the request has ended."""
        served = self._served.get(outcome.request_id)
        return served if served is not None and served.imm == outcome.imm else None

    def _on_ticket_failed(self, served: Served, failed: TicketFailed) -> None:
        _log.info("%s: ticket failed (%s): %s", served.request_id, failed.reason, failed.text)
        served.imm = served.asked_at = None
        served.is_parked = True
        if served.num_tickets >= MAX_TICKETS or failed.refusal == "too_long":
            self._prefill_here(served)
            return
        need = NeedPrefill(
            sender=self._uuid,
            request_id=served.request_id,
            prefiller=served.prefiller,
            reason=clipped(f"{failed.reason}: {failed.text}"),
            is_fault=failed.reason in FAULTS,
        )
        self._links.send(served.gateway, need)
        served.patience_timer = self._loop.call_later(NEED_PREFILL_PATIENCE_S, self._prefill_here, served)

    # ---- what the engine tells ---------------------------------------------------------------------------------

    def _tell_outputs(self) -> None:
        tokens: dict[str, list[NewToken]] = {}
        for output in self._groups.drain_outputs():
            match output:
                case NewToken():
                    tokens.setdefault(output.request_id, []).append(output)
                case FirstStep():
                    served = self._served[output.request_id]
                    served.first_step_at, served.first_step_s = output.began_at, output.step_s
                    served.cached_len = output.cached_len
                case RequestDone():
                    self._tell_tokens(tokens.pop(output.request_id, []))
                    self._tell_done(output)
        for of_request in tokens.values():
            self._tell_tokens(of_request)

    def _tell_tokens(self, tokens: list[NewToken]) -> None:
        if tokens:
            served = self._served[tokens[0].request_id]
            token_ids = tuple(token.token_id for token in tokens)
            said = Tokens(
                sender=self._uuid,
                request_id=served.request_id,
                index=tokens[0].index,
                token_ids=token_ids,
                cached_tokens=served.cached_len,
            )
            self._links.send(served.gateway, said)

    def _tell_done(self, done: RequestDone) -> None:
        served = self._served.pop(done.request_id)
        served.cancel_timers()
        reason, text = served.failure or (FINISH_REASONS[done.reason], done.text)
        finished = Finished(
            sender=self._uuid,
            request_id=served.request_id,
            reason=reason,
            text=clipped(text),
            num_tokens=done.num_tokens,
            cached_tokens=done.cached_len,
            waterfall=served.waterfall(),
        )
        self._links.send(served.gateway, finished)

    # ---- small things ------------------------------------------------------------------------------------------

    def _accept(self, served: Served, *, uses_lease: bool) -> None:
        accepted = Accepted(
            sender=self._uuid, request_id=served.request_id, uses_lease=uses_lease, cached_tokens=served.hit_len
        )
        self._links.send(served.gateway, accepted)

    def _status(self) -> Status:
        return decoder_status(self._instance, self._groups, self._remote, is_draining=self._drain.has_begun)


def _engine_request(generate: Generate) -> EngineRequest:
    sampling = generate.sampling
    return EngineRequest(
        request_id=generate.request_id,
        token_ids=generate.token_ids,
        max_tokens=generate.max_tokens,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            choice=sampling.choice,
        ),
        stop_token_ids=frozenset(generate.stop_token_ids),
        tier=generate.tier,
    )
