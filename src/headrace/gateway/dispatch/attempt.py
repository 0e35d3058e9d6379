"""One attempt to have a request generated: what it holds at prefillers and at its decoder, and what came of it.

Owned by the gateway's loop. Every change happens in a plain call, as its message arrives, so that an attempt can be
given up between any two: `release` then returns exactly what is held. Knows no clock, no table, no line. Its life:

    placing     a Reserve may be out (`reserving`), a lease may be held (`lease`); nothing is at a decoder
    offered     Generate is out, the lease rides with it; NoRoom -> placing, the lease returned
    running     Accepted; tokens arrive. NeedPrefill: a Reserve goes out, and its answer on to the decoder
    over        finished, rejected, or lost: nothing is held, nothing more comes

A resumed request is a new attempt under a new id, so that nothing said about the old one is taken for the new one's.
"""

from collections.abc import Callable
from enum import Enum

import msgspec

from headrace.gateway.dispatch.affinity import Prompt
from headrace.gateway.dispatch.errand import Errand
from headrace.protocol.control import (
    Abort,
    Accepted,
    Finished,
    GatewayMessage,
    Granted,
    NeedPrefill,
    NoRoom,
    Prefilled,
    PrefillFrom,
    Rejected,
    ReturnLease,
    Tokens,
    UsePrefiller,
    Wait,
)
from headrace.protocol.messages import Uuid

Tell = Callable[[Uuid, GatewayMessage], None]
RequestMessage = Granted | Wait | Prefilled | Accepted | NoRoom | Rejected | Tokens | Finished | NeedPrefill


class State(Enum):
    PLACING = "placing"
    OFFERED = "offered"
    RUNNING = "running"
    OVER = "over"


class Arrived(msgspec.Struct, frozen=True):
    """New tokens, and when."""

    at: float
    token_ids: tuple[int, ...]


class Attempt:
    """`tell` sends; it may call back `gone` before it returns. `wake` is called when something has changed."""

    def __init__(self, errand: Errand, *, sender: Uuid, tell: Tell, wake: Callable[[], None]) -> None:
        self.errand = errand
        self.prompt = Prompt(errand.token_ids)
        self.state = State.PLACING
        self.reserving: Uuid | None = None
        self.lease: PrefillFrom | None = None
        self.decoder: Uuid | None = None
        self.offered_to: Uuid | None = None  # the same, kept when it is over
        self.prefiller: Uuid | None = None  # where the prompt was last to be prefilled; None: at the decoder
        self.was_accepted = False
        self.rejected: Rejected | None = None
        self.prefilled: Prefilled | None = None
        self.finished: Finished | None = None
        self.cached_tokens = 0
        self.hit_tokens = 0  # what its decoder's own prefix index had
        self.lost: str | None = None
        self._sender = sender
        self._tell = tell
        self._wake = wake
        self._given: PrefillFrom | None = None  # the lease that was last sent to a decoder
        self._given_is_open = False  # and nobody has said whether it is used
        self._answer_by: float | None = None  # of NeedPrefill, while a Reserve is out for it
        self._arrived: list[Arrived] = []
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """That came of it."""
        return self._num_tokens

    # ---- what the request asks ---------------------------------------------------------------------------------

    def reserve(self, prefiller: Uuid, now: float) -> None:
        """Ask for a lease."""
        assert self.reserving is None and self.lease is None, f"asks twice: {self!r}"
        self.reserving = prefiller
        self._tell(prefiller, self.errand.reserve(self._sender, now))

    def stop_asking(self) -> None:
        """No answer: a lease that is granted after all goes back when it comes."""
        self.reserving = self._answer_by = None

    def offer(self, decoder: Uuid, now: float) -> None:
        """Ask a decoder to run it, with the lease if there is one."""
        assert self.state is State.PLACING and self.reserving is None, f"cannot be offered: {self!r}"
        self.state = State.OFFERED
        self.decoder = self.offered_to = decoder
        self._give_lease()
        self._tell(decoder, self.errand.generate(self._sender, self._given, now))

    def may_replace_prefiller(self, now: float) -> bool:
        """One question at a time, until its answer would come too late."""
        is_asking = self._answer_by is not None and now <= self._answer_by
        return self.state is State.RUNNING and not is_asking

    def replace_prefiller(self, prefiller: Uuid | None, now: float, *, answer_by: float) -> None:
        """The answer to NeedPrefill: this one, if it grants a lease in time. None: nobody is left."""
        self.stop_asking()
        if prefiller is None:
            self._tell_use_prefiller()
        else:
            self._answer_by = answer_by
            self.reserve(prefiller, now)

    def drain_arrived(self) -> list[Arrived]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def lose(self, reason: str) -> None:
        """Nothing more is expected of its decoder, which is told so. Idempotent."""
        if self.state is not State.OVER:
            self.release()
            self.lost = reason
            self._wake()

    def release(self) -> None:
        """Give back whatever is held, anywhere. Idempotent."""
        decoder, self.decoder, self.reserving = self.decoder, None, None
        self.state = State.OVER
        if decoder is not None:
            self._tell(decoder, Abort(sender=self._sender, request_id=self.errand.request_id))
        self._return_given()
        self._return_lease()

    # ---- what is heard -----------------------------------------------------------------------------------------

    def take(self, message: RequestMessage, now: float) -> bool:
        """False when it is no business of this attempt: it came too late, or from somebody else."""
        match message:
            case Granted() | Wait():
                return self._take_answer(message, now)
            case Prefilled():
                if message.sender != self.prefiller:
                    return False
                self.prefilled = message
                return True
        if message.sender != self.decoder:
            return False
        match message:
            case Accepted():
                self._accepted(message)
            case NoRoom() if self.state is State.OFFERED:
                self.state, self.decoder = State.PLACING, None
                self._return_given()
            case Rejected():
                self.rejected, self.decoder = message, None
                self.release()
            case Tokens():
                self._take_tokens(message, now)
            case Finished():
                self._finish(message)
            case _:
                return False
        self._wake()
        return True

    def gone(self, instance: Uuid, reason: str, now: float) -> None:
        """An instance is no more. What it had granted is void, what it ran is lost."""
        if self.reserving == instance:
            self.reserving = None
            self._answer_need(now)
            self._wake()
        if self.lease is not None and self.lease.prefiller == instance:
            self.lease = None
        if self.decoder == instance:
            self.decoder = None
            self.lose(f"its decoder is gone: {reason}")

    def _take_answer(self, message: Granted | Wait, now: float) -> bool:
        if message.sender != self.reserving:
            # A repeated grant of a lease that is in use is no lease to return.
            return isinstance(message, Granted) and _lease_of(message) in (self.lease, self._given)
        self.reserving = None
        if isinstance(message, Granted):
            self.lease = _lease_of(message)
        self._answer_need(now)
        self._wake()
        return True

    def _answer_need(self, now: float) -> None:
        if self._answer_by is None:
            return
        late = now > self._answer_by
        self._answer_by = None
        if late:
            self._return_lease()  # the decoder has gone on by itself
        else:
            self._tell_use_prefiller()

    def _tell_use_prefiller(self) -> None:
        self._give_lease()
        answer = UsePrefiller(sender=self._sender, request_id=self.errand.request_id, prefill=self._given)
        if self.decoder is not None:
            self._tell(self.decoder, answer)

    def _accepted(self, message: Accepted) -> None:
        """Of Generate, or of UsePrefiller."""
        self.hit_tokens = message.cached_tokens
        if self.state is State.OFFERED:
            self.state, self.was_accepted = State.RUNNING, True
        if message.uses_lease:
            self._given_is_open = False
        else:
            self.prefiller = None
            self._return_given()

    def _take_tokens(self, message: Tokens, now: float) -> None:
        new = message.token_ids[max(0, self._num_tokens - message.index) :]
        if self.state is not State.RUNNING:
            self.lose("tokens came before it was accepted")
        elif message.index > self._num_tokens:
            self.lose(f"tokens {self._num_tokens}..{message.index - 1} never came")
        elif self._num_tokens + len(new) > self.errand.max_tokens:
            self.lose(f"more than the {self.errand.max_tokens} tokens that were asked for came")
        elif new:
            self._num_tokens += len(new)
            self.cached_tokens = message.cached_tokens
            self._arrived.append(Arrived(now, new))

    def _finish(self, message: Finished) -> None:
        stop_token = 1 if message.reason == "stop" else 0
        if message.reason in ("stop", "length") and not 0 <= message.num_tokens - self._num_tokens <= stop_token:
            self.lose(f"{message.num_tokens} tokens were announced, {self._num_tokens} came")
            return
        self.finished, self.decoder = message, None
        self.cached_tokens = message.cached_tokens
        self.release()

    # ---- leases ------------------------------------------------------------------------------------------------

    def _give_lease(self) -> None:
        """It rides with the next message to the decoder."""
        self._return_given()
        self._given, self.lease = self.lease, None
        self._given_is_open = self._given is not None
        self.prefiller = None if self._given is None else self._given.prefiller

    def _return_given(self) -> None:
        """The decoder does not use it, or will not: one that it has used already is ended by that."""
        if self._given_is_open and self._given is not None:
            self._given_is_open = False
            self._tell(self._given.prefiller, ReturnLease(sender=self._sender, lease=self._given.lease))

    def _return_lease(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            self._tell(lease.prefiller, ReturnLease(sender=self._sender, lease=lease.lease))

    def __repr__(self) -> str:
        return f"Attempt({self.errand.request_id}, {self.state.value}, decoder={self.decoder}, lease={self.lease})"


def _lease_of(granted: Granted) -> PrefillFrom:
    return PrefillFrom(prefiller=granted.sender, lease=granted.lease)
