"""Finds a decoder that takes an attempt, and before that a prefiller that grants a lease. Runs in the request's task.

    until it is at the head of its tier        holding nothing
    until a decoder keeps its pace with it     `forecast.kept_by`: background work lets interactive streams be
    choose decoder and prefiller               `route`, without those that have just said no
    Reserve -> Granted | Wait                  Wait: the next prefiller; all of them: until there is news, or 50 ms
    Generate -> Accepted | NoRoom | Rejected   NoRoom: the lease goes back, the next decoder; all: news, or 100 ms

A prefiller that does not answer is not asked again by this request, and a decoder only if there is no other. One that
is late with an answer is asked by nobody until it is heard of again, and those who stand behind go on meanwhile.
"""

from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from headrace.errors import InputError
from headrace.gateway.dispatch.attempt import Attempt, State
from headrace.gateway.dispatch.door import fleet_for
from headrace.gateway.dispatch.exchange import Exchange
from headrace.gateway.dispatch.line import Turn
from headrace.gateway.dispatch.patience import Patience
from headrace.gateway.forecast import Fleet, kept_by, pace_with
from headrace.gateway.generation import Overloaded
from headrace.gateway.route import DecoderView, Price, Route, Wanted, route
from headrace.protocol.messages import Uuid

RETRY_AFTER_S = 2.0
"""Told where no decoder is here: one that is restarted takes some seconds."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What routing expected, and when."""

    at: float
    price: Price
    tpot_s: float | None  # None: its decoder has not measured


class Placing:
    """Of one request, over all its attempts."""

    def __init__(self, exchange: Exchange, patience: Patience, turn: Turn) -> None:
        self._exchange = exchange
        self._patience = patience
        self._turn = turn
        self._shunned: set[Uuid] = set()  # decoders that failed it
        self._mute: set[Uuid] = set()  # prefillers that did not answer
        self._full: set[Uuid] = set()  # said NoRoom in this round
        self._busy: set[Uuid] = set()  # said Wait in this round
        self.predicted: Predicted | None = None  # of the last choice

    def shun(self, decoder: Uuid) -> None:
        """Try others first."""
        self._shunned.add(decoder)

    async def place(self, attempt: Attempt) -> None:
        """Until a decoder runs it, or had it and is gone. Raises InputError when it is rejected, Overloaded (503) or
        GenerationFailed when no decoder is there for too long."""
        self._patience.waiting_for = "its turn"
        with self._exchange.line.standing(self._turn):
            while attempt.state is State.PLACING:
                while not self._exchange.line.may_try(self._turn):
                    await self._patience.pause()
                await self._try(attempt)
        if attempt.rejected is not None:
            field = attempt.rejected.field
            raise InputError(field, attempt.rejected.text.removeprefix(f"{field}: "))

    async def _try(self, attempt: Attempt) -> None:
        timings = self._exchange.timings
        fleet = fleet_for(self._exchange, attempt.prompt, attempt.errand.wanted, self._patience.now())
        if not fleet.decoders:
            await self._await_decoder()
            return
        chosen = self._choose(attempt, fleet)
        if chosen is None:
            self._turn.lacks_room = True
            await self._retry("a decoder that keeps its pace with one more", timings.room_retry_s)
        elif chosen.decoder in self._full:
            self._turn.lacks_room = True
            await self._retry("room at a decoder", timings.room_retry_s)
        elif chosen.decoder in self._exchange.late:
            await self._retry("a decoder that answers", timings.room_retry_s)
        elif chosen.prefiller in self._busy:
            self._turn.lacks_room = self._turn.due < inf
            await self._retry("a lease from a prefiller", timings.lease_retry_s)
        elif chosen.prefiller is None or await self._has_lease(attempt, chosen.prefiller):
            await self._offer(attempt, chosen.decoder)

    def _choose(self, attempt: Attempt, fleet: Fleet) -> Route | None:
        """None: it has to wait for one of them."""
        wanted = attempt.errand.wanted
        late = self._exchange.late
        prefillers = [view for view in fleet.prefillers if view.uuid not in self._mute | late]
        fleet = replace(fleet, prefillers=prefillers)
        # One that has begun goes on at once: it was promised a pace itself, and stands still.
        kept = fleet.decoders if self._is_resumed else kept_by(fleet, wanted, self._exchange.streams.promise)
        decoders = _rather_not(self._full, _rather_not(self._shunned, _rather_not(late, kept)))
        chosen = route(decoders, _rather_not(self._busy, prefillers), wanted, fleet.transfers)
        if chosen is not None:
            self._predict(chosen, next(view for view in decoders if view.uuid == chosen.decoder), wanted)
        return chosen

    def _predict(self, chosen: Route, decoder: DecoderView, wanted: Wanted) -> None:
        tpot_s = pace_with(decoder, wanted.num_tokens)
        self.predicted = Predicted(at=self._patience.now(), price=chosen.price, tpot_s=tpot_s)

    @property
    def _is_resumed(self) -> bool:
        return self._turn.due == -inf

    async def _retry(self, waiting_for: str, retry_s: float) -> None:
        """A new round, at the next news."""
        self._full.clear()
        self._busy.clear()
        self._patience.waiting_for = waiting_for
        await self._patience.pause(self._patience.now() + retry_s)

    async def _has_lease(self, attempt: Attempt, prefiller: Uuid) -> bool:
        attempt.reserve(prefiller, self._patience.now())
        self._patience.waiting_for = "a prefiller's answer"
        await self._until_answered(prefiller, lambda: attempt.reserving is None)
        if attempt.reserving is not None:
            attempt.stop_asking()
            self._mute.add(prefiller)
        elif attempt.lease is None:
            self._busy.add(prefiller)
        return attempt.lease is not None

    async def _offer(self, attempt: Attempt, decoder: Uuid) -> None:
        attempt.offer(decoder, self._patience.now())
        self._patience.waiting_for = "a decoder's answer"
        await self._until_answered(decoder, lambda: attempt.state is not State.OFFERED)
        if attempt.state is State.OFFERED:
            attempt.lose("its decoder does not answer")
        if attempt.state is State.PLACING:
            self._full.add(decoder)

    async def _until_answered(self, instance: Uuid, is_answered: Callable[[], bool]) -> None:
        """Or until nobody waits for it any more. Late, it does not hold up those who stand behind."""
        exchange, asked_at = self._exchange, self._patience.now()
        late_at, answer_by = asked_at + exchange.timings.late_s, asked_at + exchange.timings.answer_s
        try:
            while not is_answered() and self._patience.now() < answer_by:
                if self._patience.now() >= late_at and not self._turn.is_unanswered:
                    self._turn.is_unanswered = True
                    exchange.late.add(instance)
                    exchange.line.wake_heads()
                await self._patience.pause(answer_by if self._turn.is_unanswered else late_at)
        finally:
            self._turn.is_unanswered = False

    async def _await_decoder(self) -> None:
        since, comeback_s = self._exchange.no_decoder_since, self._exchange.timings.comeback_s
        assert since is not None, "there is no decoder, and nobody has noticed"
        if self._patience.now() >= since + comeback_s:
            raise Overloaded(f"no decoder came back within {comeback_s:g} s", status=503, retry_after_s=RETRY_AFTER_S)
        self._patience.waiting_for = "a decoder to come back"
        await self._patience.pause(since + comeback_s)


class _Named(Protocol):
    @property
    def uuid(self) -> Uuid: ...


View = TypeVar("View", bound=_Named)


def _rather_not(those: Collection[Uuid], views: Sequence[View]) -> Sequence[View]:
    """Without them, unless nobody else is left."""
    return [view for view in views if view.uuid not in those] or views
