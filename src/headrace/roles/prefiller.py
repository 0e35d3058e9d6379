"""The prefiller process: prompts come as tickets, their KV leaves layer by layer while it is computed.

Owns the loop on which pages, messenger and queue live; the model runs on its own thread and raises the layer counter
itself, so that a layer's pages leave while Python is busy with the next one. The life of a job:

    Reserve      a lease, or Wait: how much may queue up here
    PrefillJob   the messenger has taken its pages; it queues by tier and arrival
    a step       the messenger hands the fabric what each layer will send; compute; commit (or fail)
    Prefilled    told to the gateways, for their waterfall; the pages stay until their writes have completed
    JobDropped   cancelled, over its deadline or revoked: no further chunk

Once it is told to drain, every Reserve is answered with Wait, and it leaves when no lease is out and no ticket open:
nobody reads its pages any more then. When the process is told to end, what is not computed fails: its decoders hear so
and go elsewhere.
"""

import asyncio
import logging
import time
from contextlib import ExitStack

from headrace.engine.prefill_queue import PrefillQueue, PrefillStep, Prompt, PromptDone
from headrace.errors import InputError
from headrace.fabric.interface import LAYERS_PER_STEP
from headrace.fabric.native import NativeFabric
from headrace.messenger.jobs import Chunk, PrefillerOptions
from headrace.messenger.outcomes import JobDropped, PeerReady, PeerRefused, PrefillerOutcome, PrefillJob
from headrace.messenger.prefiller import PrefillerMessenger
from headrace.messenger.pump import Pump
from headrace.protocol.control import (
    Drain,
    GatewayMessage,
    Granted,
    Prefilled,
    Prefillers,
    Reserve,
    ReturnLease,
    Status,
    Wait,
)
from headrace.protocol.messages import Ticket
from headrace.roles.draining import Drained, Draining
from headrace.roles.instance import Instance, open_instance
from headrace.roles.links import GatewayUuid, Links
from headrace.roles.options import InstanceOptions
from headrace.roles.reached import tell_ready
from headrace.roles.status import prefiller_status
from headrace.roles.step_log import StepLog
from headrace.roles.stopping import LAST_WORDS_S, stoppable
from headrace.roles.turns import keep_turning

LEAVING = "the prefiller is told to end"

_log = logging.getLogger(__name__)


def run_prefiller(options: InstanceOptions) -> Drained | None:
    """A prefiller, until SIGINT or SIGTERM (None), or until it is drained. Raises InputError, FabricError, RankLost."""
    drain = Draining()
    with stoppable() as process, open_instance(options, on_rank_lost=process.fail) as instance:
        process.run(lambda: Prefiller(instance, drain).run())
    return drain.over


class Prefiller:
    def __init__(self, instance: Instance, drain: Draining | None = None) -> None:
        options = instance.options
        self._instance = instance
        self._fabric = NativeFabric(
            instance.memory.fd, instance.memory.length, transports=options.transports, nodes=options.fabric_hosts
        )
        self._messenger = PrefillerMessenger(
            fabric=self._fabric,
            identity=instance.identity,
            pages=instance.pools[0],
            memory=instance.memory.bytes,
            options=PrefillerOptions(
                lease_tokens=2 * options.chunk_tokens,
                reserve_tokens=options.chunk_tokens,
                transfer=options.transfer,
            ),
        )
        self._pump = Pump(self._messenger, self._fabric, self._on_outcome)
        self._queue: PrefillQueue[Ticket] = PrefillQueue(chunk_tokens=options.chunk_tokens)
        self._request_ids: dict[Ticket, str] = {}  # of what is queued
        self._step: PrefillStep[Ticket] | None = None  # that runs
        self._drain = drain or Draining()
        self._step_log = StepLog(_log)
        self._work = asyncio.Event()
        with ExitStack() as exits:
            exits.callback(self._fabric.close)
            self._links = exits.enter_context(
                Links(
                    options.gateways,
                    announce=instance.announce(fabric_address=self._fabric.address),
                    status=self._status,
                    on_message=self._on_message,
                    on_lost=lambda gateway: None,  # its leases run out by themselves
                )
            )
            self._exits = exits.pop_all()

    async def run(self) -> None:
        with self._exits:
            self._instance.log_start()
            beside = [self._links.run(), self._pump.run()]
            await keep_turning(
                self._turn, self._work, beside=beside, until=self._drain.wait(self._is_needed), leave=self._leave
            )

    def _is_needed(self) -> bool:
        """A lease is out, or pages are read."""
        told = self._messenger.statistics()
        return bool(told.num_tickets or told.num_leased_tokens)

    async def _leave(self) -> None:
        """Fail what is not computed, and let the messages about it out. The model thread may still be in a layer of the
        step: its pages are free then, but nobody takes them any more."""
        now = time.monotonic()
        if self._step is not None:
            self._messenger.fail_step(self._step.number, LEAVING, now)
        tickets = list(self._request_ids)
        for ticket in tickets:
            self._messenger.fail_job(ticket, LEAVING, now)
        if tickets:
            await asyncio.sleep(LAST_WORDS_S)

    async def _turn(self) -> bool:
        """One step. -> whether there was one."""
        self._pump.turn()  # first: what was dropped must be in no step
        step = self._queue.next_step(time.monotonic())
        if step is None:
            self._step_log.waits()
            return False
        chunks = [Chunk(ticket=chunk.key, begin=chunk.begin, end=chunk.end) for chunk in step.chunks]
        self._messenger.begin_step(step.number, chunks)
        self._step = step
        try:
            await self._compute(step)
        except (InputError, RuntimeError, MemoryError) as error:
            _log.exception("step %d failed", step.number)
            self._messenger.fail_step(step.number, f"the step failed: {error}", time.monotonic())
            for ticket in self._queue.fail(step):
                self._request_ids.pop(ticket, None)
        else:
            now = time.monotonic()
            self._step_log.tell(step.size, began_at=step.began_at, ended_at=now)
            self._messenger.commit_step(step.number, now)
            for done in self._queue.commit(step, now):
                self._tell_done(done)
        self._step = None  # when it was cancelled, `_leave` fails it
        self._pump.poke()
        return True

    async def _compute(self, step: PrefillStep[Ticket]) -> None:
        """One native call after each layer, on the model thread, and its pages leave."""
        counter = step.number * LAYERS_PER_STEP + 1
        raise_layers = self._fabric.raise_layers
        await self._instance.compute([step.rows], lambda layer: raise_layers(counter + layer))

    def _tell_done(self, done: PromptDone[Ticket]) -> None:
        prefilled = Prefilled(
            sender=self._instance.identity.uuid,
            request_id=self._request_ids.pop(done.key),
            num_computed=done.num_computed,
            queue_s=done.queue_s,
            prefill_s=done.prefill_s,
        )
        self._links.broadcast(prefilled)  # the ticket does not say whose request it is

    # ---- what it is told ---------------------------------------------------------------------------------------

    def _on_outcome(self, outcome: PrefillerOutcome) -> None:
        match outcome:
            case PrefillJob():
                self._request_ids[outcome.ticket] = outcome.request_id
                prompt = Prompt(
                    key=outcome.ticket,
                    tier=outcome.tier,
                    token_ids=outcome.token_ids,
                    pages=outcome.pages,
                    computed=outcome.cached_len,
                )
                self._queue.add(prompt, time.monotonic())
                self._work.set()
            case JobDropped():
                self._queue.drop(outcome.ticket)
                self._request_ids.pop(outcome.ticket, None)
            case PeerReady():
                tell_ready("decoder", outcome, fabric=self._fabric, instance=self._instance)
            case PeerRefused():
                _log.error("a decoder and this prefiller do not fit together: %s", outcome.text)

    def _on_message(self, gateway: GatewayUuid, message: GatewayMessage) -> None:
        match message:
            case Reserve():
                self._links.send(gateway, self._reserve(message))
            case ReturnLease():
                self._messenger.return_lease(message.lease)
            case Prefillers():
                pass  # told to everybody; of use to decoders
            case Drain():
                self._drain.begin(message)
                self._links.broadcast(self._status())
            case _:
                _log.warning("a %s is not for a prefiller", type(message).__name__)
        self._pump.poke()

    def _reserve(self, message: Reserve) -> Granted | Wait:
        if self._drain.has_begun:
            queued = self._messenger.statistics().num_leased_tokens
            return Wait(sender=self._instance.identity.uuid, request_id=message.request_id, num_queued_tokens=queued)
        return self._messenger.reserve(message, time.monotonic())

    def _status(self) -> Status:
        return prefiller_status(
            self._instance,
            self._messenger,
            self._fabric.statistics(),
            num_steps=self._queue.num_steps,
            num_prefill_tokens=self._queue.num_computed_tokens,
            prefill_speed=self._queue.prefill_speed(time.monotonic()),
            is_draining=self._drain.has_begun,
        )
