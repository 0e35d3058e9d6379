"""One request at the gateway, from its admission to its last token. Runs in the task of whoever asked.

    admitted     its lengths fit, not too many wait already, and its first token can come in time
    placing      in line, then with a lease at a decoder that has room
    running      tokens come; the exchange answers what its decoder asks meanwhile
    lost         its decoder is gone or contradicts itself: placed again, in front, with what came so far as prompt
    over         finished, failed, or closed by whoever asked: nothing is held anywhere

It is suspended in `Patience.pause` and at its `yield` only. What it holds elsewhere is its attempt's business, which
gives it back without waiting: so it may be closed or cancelled at any moment.
"""

import logging
import re
from collections.abc import AsyncGenerator
from math import inf

from headrace.errors import HeadraceError, InputError, ProtocolFault
from headrace.gateway.admit import Queue, admit
from headrace.gateway.dispatch.attempt import Attempt, State
from headrace.gateway.dispatch.door import let_in
from headrace.gateway.dispatch.errand import Errand
from headrace.gateway.dispatch.exchange import Exchange
from headrace.gateway.dispatch.figures import Figures
from headrace.gateway.dispatch.line import Turn
from headrace.gateway.dispatch.metrics import GatewayMetrics, Outcome
from headrace.gateway.dispatch.patience import Patience
from headrace.gateway.dispatch.placing import RETRY_AFTER_S, Placing
from headrace.gateway.generation import FinishReason, Generation, GenerationFailed, Overloaded, Progress
from headrace.protocol.control import Generate, decode_from_gateway, encode_control
from headrace.protocol.messages import MOST_REMAINING_S

_log = logging.getLogger(__name__)


async def live(
    generation: Generation, *, exchange: Exchange, metrics: GatewayMetrics, max_queued: int
) -> AsyncGenerator[Progress, None]:
    """All of a request's life. Raises what `Dispatch.generate` promises."""
    life = Life(generation, exchange, metrics)
    try:
        life.begin(max_queued)
        while True:
            progress = await life.next_progress()
            yield progress
            if progress.finish_reason is not None:
                return
    except HeadraceError as error:
        if isinstance(error, Overloaded) and error.status == 429:
            metrics.turned_away(generation.tier, error)
        life.end(_outcome_of(error))
        raise
    finally:
        life.end("closed")


class Life:
    """`begin`, then `next_progress` until it tells a finish reason or raises; `end` in any case."""

    def __init__(self, generation: Generation, exchange: Exchange, metrics: GatewayMetrics) -> None:
        self._generation = generation
        self._exchange = exchange
        self._patience = Patience(exchange, min(generation.deadline_s, MOST_REMAINING_S))
        self._figures = Figures(metrics=metrics, generation=generation, admitted_at=self._patience.now())
        ttft_s = generation.budget.ttft_s
        self._turn = Turn(
            due=inf if ttft_s is None else self._patience.now() + ttft_s,
            arrival=exchange.next_arrival(),
            tier=generation.tier,
            wake=self._patience.wake,
        )
        self._placing = Placing(exchange, self._patience, self._turn)
        self._received: list[int] = []
        self._max_tokens = 0
        self._attempt: Attempt | None = None
        self._num_lost = 0
        self._has_begun = False
        self._is_over = False

    def begin(self, max_queued: int) -> None:
        """Raises InputError, Overloaded."""
        exchange, generation = self._exchange, self._generation
        if exchange.stopped is not None:
            raise Overloaded(exchange.stopped, status=503, retry_after_s=RETRY_AFTER_S)
        limits = exchange.instances.limits()
        if limits is None:
            raise Overloaded("no decoder is here", status=503, retry_after_s=RETRY_AFTER_S)
        num_queued = exchange.line.num_waiting(generation.tier)
        queue = Queue(num_queued=num_queued, max_queued=max_queued, placed_at=exchange.placed_at)
        now = self._patience.now()
        self._max_tokens = admit(generation.token_ids, generation.max_tokens, limits, queue, now)
        self._figures.expected = let_in(exchange, generation, self._turn, max_tokens=self._max_tokens, now=now)
        _require_sendable(generation, self._wire_id(exchange.timings.max_resumes))
        exchange.enter(generation.request_id, self._patience.wake)
        self._has_begun = True

    async def next_progress(self) -> Progress:
        while True:
            self._patience.require_running()
            if self._attempt is None:
                # Kept before it is placed: a request that is closed while it waits gives back what it holds then.
                self._attempt = self._open_attempt()
                await self._place(self._attempt)
            progress = await self._progress_of(self._attempt)
            if progress is None:
                self._begin_again(self._attempt)
                continue
            if progress.finish_reason is not None:
                self.end(progress.finish_reason)  # nothing is held any more while the last word is passed on
            return progress

    def end(self, outcome: Outcome) -> None:
        """Idempotent: the first outcome stands."""
        if self._is_over:
            return
        self._is_over = True
        self._figures.over(outcome, self._attempt)
        if self._attempt is not None:
            self._exchange.close(self._attempt)
            self._exchange.observed.wrote(self._attempt, (*self._generation.token_ids, *self._received))
        if self._has_begun:
            self._exchange.leave(self._generation.request_id)

    # ---- one attempt -------------------------------------------------------------------------------------------

    def _open_attempt(self) -> Attempt:
        errand = Errand(
            request_id=self._wire_id(self._num_lost),
            generation=self._generation,
            token_ids=(*self._generation.token_ids, *self._received),
            max_tokens=self._max_tokens - len(self._received),
            deadline=self._patience.deadline,
        )
        exchange = self._exchange
        attempt = Attempt(errand, sender=exchange.uuid, tell=exchange.tell, wake=self._patience.wake)
        exchange.open(attempt)
        return attempt

    def _wire_id(self, num_lost: int) -> str:
        """A label that no message about an earlier attempt carries."""
        return self._generation.request_id if num_lost == 0 else f"{self._generation.request_id}~{num_lost}"

    async def _place(self, attempt: Attempt) -> None:
        try:
            await self._placing.place(attempt)
        except (InputError, Overloaded) as error:
            if self._received:  # too late for either: the client has its 200
                raise GenerationFailed(str(error)) from error
            raise
        if attempt.was_accepted:  # and may be over by now: all of its messages came at once
            self._exchange.placed()
            self._figures.placed(
                self._patience.now(),
                decoder=self._exchange.instances.name(attempt.offered_to),
                prefiller=self._exchange.instances.name(attempt.prefiller),
                predicted=self._placing.predicted,
            )
        self._patience.waiting_for = "its tokens"

    async def _progress_of(self, attempt: Attempt) -> Progress | None:
        """The next tokens, or its end; None when it is lost."""
        while True:
            token_ids = self._drain(attempt)
            if attempt.state is State.OVER:
                last = self._end_of(attempt, token_ids)
                return self._progress(attempt, token_ids) if last is None and token_ids else last
            if token_ids:
                return self._progress(attempt, token_ids)
            await self._patience.pause()

    def _drain(self, attempt: Attempt) -> tuple[int, ...]:
        before = len(self._received)
        for arrived in attempt.drain_arrived():
            self._figures.arrived(arrived)
            self._received += arrived.token_ids
        return tuple(self._received[before:])

    def _end_of(self, attempt: Attempt, token_ids: tuple[int, ...]) -> Progress | None:
        """None: it came to no end. Raises GenerationFailed, after the last tokens."""
        finished = attempt.finished
        if finished is not None and (finished.reason == "stop" or finished.reason == "length"):
            sent_before = len(attempt.errand.token_ids) - len(self._generation.token_ids)
            num_tokens = sent_before + finished.num_tokens
            return self._progress(attempt, token_ids, finish_reason=finished.reason, num_tokens=num_tokens)
        if finished is not None and finished.reason == "error" and not token_ids:
            raise GenerationFailed(finished.text or "its decoder failed")
        is_cut_off = finished is None or finished.reason == "abort"
        if is_cut_off and len(self._received) == self._max_tokens:  # all but the last word came
            return self._progress(attempt, token_ids, finish_reason="length", num_tokens=self._max_tokens)
        return None

    def _progress(
        self,
        attempt: Attempt,
        token_ids: tuple[int, ...],
        *,
        finish_reason: FinishReason | None = None,
        num_tokens: int = 0,
    ) -> Progress:
        return Progress(
            token_ids=token_ids,
            finish_reason=finish_reason,
            num_tokens=num_tokens,
            cached_tokens=min(attempt.cached_tokens, len(self._generation.token_ids)),
        )

    def _begin_again(self, attempt: Attempt) -> None:
        """On another decoder, or on the same one restarted. Raises GenerationFailed the third time."""
        reason = attempt.lost or "its decoder has ended it"
        self._num_lost += 1
        self._exchange.events["lost"] += 1
        self._exchange.close(attempt)
        if self._num_lost > self._exchange.timings.max_resumes:
            raise GenerationFailed(f"given up after {self._num_lost} attempts: {reason}")
        if attempt.offered_to is not None:
            self._placing.shun(attempt.offered_to)
        self._attempt = None
        if attempt.was_accepted:
            self._turn.due = -inf
        _log.debug(
            "%s: %s; it goes on elsewhere after %d tokens", self._generation.request_id, reason, len(self._received)
        )


def _require_sendable(generation: Generation, request_id: str) -> None:
    """Raises InputError naming what an instance would refuse to read. The prompt was looked at before."""
    sample = Generate(
        sender="0" * 32,
        request_id=request_id,
        token_ids=(0,),
        num_prompt_tokens=1,
        max_tokens=1,
        sampling=generation.sampling,
        stop_token_ids=generation.stop_token_ids,
        prefill=None,
        tier=generation.tier,
        remaining_s=0.0,
    )
    try:
        decode_from_gateway(encode_control(sample))
    except (ProtocolFault, OverflowError, UnicodeEncodeError) as fault:
        field = re.search(r"`\$\.(?:sampling\.)?(\w+)", str(fault))
        raise InputError("request" if field is None else field[1], str(fault)) from fault


def _outcome_of(error: HeadraceError) -> Outcome:
    match error:
        case InputError():
            return "refused"
        case Overloaded():
            return "overloaded" if error.status == 429 else "unavailable"
        case GenerationFailed(status=504):
            return "deadline"
        case _:
            return "failed"
