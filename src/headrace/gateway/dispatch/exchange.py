"""Where messages of instances and attempts of requests meet: who is there, who waits, what is under way. No sockets.

Owned by the gateway's loop; plain calls that take `now`. What it does with a message:

    of an instance     the table of instances follows; who comes or leaves is told to decoders, attempts and the log
    of an attempt      handed to it; where that is over, what the message holds open is closed (late grants, late work)
    the same           observed, for what routing is to expect of the instances
    any news           lets the heads of the line try again
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.errors import InputError
from headrace.gateway.budgets import NO_TIERS, Tiers
from headrace.gateway.dispatch.attempt import Attempt, RequestMessage
from headrace.gateway.dispatch.control import Fault
from headrace.gateway.dispatch.instances import Came, Change, Drains, Instance, Instances, Left, Stranger, TurnedAway
from headrace.gateway.dispatch.line import Line
from headrace.gateway.dispatch.observed import Observed
from headrace.gateway.dispatch.streams import Streams
from headrace.gateway.options import LocalPrefill, Timings
from headrace.gateway.route import choose_prefiller, num_pages_wanted
from headrace.protocol.control import (
    Abort,
    Accepted,
    Announce,
    Beat,
    Finished,
    GatewayMessage,
    Goodbye,
    Granted,
    InstanceMessage,
    NeedPrefill,
    NoRoom,
    Prefilled,
    PrefillerAddress,
    Prefillers,
    ReturnLease,
    Status,
    Tokens,
    Wait,
)
from headrace.protocol.messages import Tier, Uuid

Event = Literal["granted", "wait", "no_room", "need_prefill", "late", "lost"]
EVENTS: Mapping[type, Event] = {
    Granted: "granted",
    Wait: "wait",
    NoRoom: "no_room",
    NeedPrefill: "need_prefill",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchStatistics:
    """Requests now, and events since the start."""

    num_queued: Mapping[Tier, int]
    num_running: int
    num_events: Mapping[Event, int]
    num_dropped: Mapping[Fault, int]  # messages, by what was wrong with them


class Exchange:
    """`send` tells whether the instance could be reached."""

    def __init__(
        self,
        *,
        uuid: Uuid,
        model: str,
        timings: Timings,
        send: Callable[[Uuid, GatewayMessage], bool],
        now: float,
        tiers: Tiers = NO_TIERS,
        local_prefill: LocalPrefill = "cheaper",
    ) -> None:
        self.uuid = uuid
        self.timings = timings
        self.instances = Instances(model, timings)
        self.observed = Observed(self.instances, local_prefill)
        self.streams = Streams(tiers)
        self.line = Line()
        self.late: set[Uuid] = set()  # owe somebody an answer, and have said nothing since that was due
        self.no_decoder_since: float | None = now
        self.stopped: str | None = None
        self.placed_at: deque[float] = deque(maxlen=64)
        self.events: Counter[Event] = Counter()
        self._send = send
        self._now = now
        self._requests: dict[str, Callable[[], None]] = {}
        self._attempts: dict[str, Attempt] = {}
        self._placed: dict[str, tuple[Uuid, int]] = {}  # by attempt: its decoder, and pages
        self._given: dict[str, tuple[Uuid, int, Tier]] = {}  # by attempt: who computes its prompt, how much of it
        self._num_arrived = 0

    # ---- the loop's calls --------------------------------------------------------------------------------------

    def take(self, message: InstanceMessage, now: float) -> None:
        """A message came."""
        self._now = now
        self.late.discard(message.sender)
        changes = self.instances.take(message, now)
        for change in changes:
            self._changed(change)
        match message:
            case Announce():
                instance = self.instances.get(message.sender)
                if instance is not None and not changes:
                    self._greet(instance)  # it asks again: it had not heard us
            case Status():
                self.line.wake_heads()
            case Goodbye():
                pass
            case _:
                self._deliver(message)

    def beat(self, now: float) -> None:
        """Twice a second: who is silent leaves, everybody else hears that we are here."""
        self._now = now
        for change in self.instances.expire(now):
            self._changed(change)
        for instance in list(self.instances.alive()):
            self.tell(instance.uuid, Beat(sender=self.uuid))

    def stop(self, text: str) -> None:
        """Every request that is under way ends with `text`, and no other begins. Idempotent."""
        for attempt in list(self._attempts.values()):
            attempt.release()  # now, while its decoder can still be told
        self.stopped = text
        for wake in self._requests.values():
            wake()

    # ---- what requests need ------------------------------------------------------------------------------------

    def enter(self, request_id: str, wake: Callable[[], None]) -> None:
        """A request begins. `wake` is called when it should look about. Raises InputError when its id is in use."""
        if request_id in self._requests:
            raise InputError("request_id", f"must be new, {request_id} is under way")
        self._requests[request_id] = wake

    def leave(self, request_id: str) -> None:
        del self._requests[request_id]

    def next_arrival(self) -> int:
        self._num_arrived += 1
        return self._num_arrived

    def open(self, attempt: Attempt) -> None:
        """Its messages reach it from now on."""
        assert attempt.errand.request_id not in self._attempts, f"{attempt!r} is under way already"
        self._attempts[attempt.errand.request_id] = attempt

    def placed(self) -> None:
        """A request has left the line."""
        if not self.line:
            self.placed_at.clear()  # the pace of a time in which nobody waits says nothing about waiting
        self.placed_at.append(self._now)

    def close(self, attempt: Attempt) -> None:
        """It is given up where it still runs; what is said about it from now on comes too late. Idempotent."""
        attempt.release()
        self._attempts.pop(attempt.errand.request_id, None)
        placed = self._placed.pop(attempt.errand.request_id, None)
        if placed is not None:
            self.instances.ended(*placed)
            self.streams.ended(attempt.errand.request_id, self._now)
        self._prefilled(attempt.errand.request_id)

    def tell(self, to: Uuid, message: GatewayMessage) -> None:
        """Whoever cannot be reached is gone: before this returns, its attempts know."""
        if self.stopped is None and not self._send(to, message):
            for change in self.instances.leave(to, "its connection is gone"):
                self._changed(change)

    # ---- who comes and goes ------------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        match change:
            case Came(instance):
                _log.info("%s is here: %s", instance, instance.described)
                self._came(instance)
            case Left(instance, reason):
                _log.info("%s has left: %s", instance, reason)
                self._left(instance, reason)
            case Drains(instance):
                _log.info("%s drains: it takes nothing new", instance)
                self._look_for_decoders()
            case TurnedAway(instance, reason):
                _log.warning("%s is turned away: %s", instance, reason)
            case Stranger(uuid):
                self.tell(uuid, Beat(sender=self.uuid))
        self.line.wake_heads()

    def _came(self, instance: Instance) -> None:
        self._look_for_decoders()
        self._greet(instance)
        if instance.announce.role == "prefiller":
            self._tell_prefillers(*self.instances.of_role("decoder"))

    def _left(self, instance: Instance, reason: str) -> None:
        self.observed.left(instance.uuid)
        self._look_for_decoders()
        self.late.discard(instance.uuid)
        for attempt in list(self._attempts.values()):
            attempt.gone(instance.uuid, reason, self._now)
        if instance.announce.role == "prefiller":
            self._tell_prefillers(*self.instances.of_role("decoder"))

    def _look_for_decoders(self) -> None:
        if self.instances.open_decoders():
            self.no_decoder_since = None
        elif self.no_decoder_since is None:
            self.no_decoder_since = self._now

    def _greet(self, instance: Instance) -> None:
        self.tell(instance.uuid, Beat(sender=self.uuid))
        if instance.announce.role == "decoder":
            self._tell_prefillers(instance)

    def _tell_prefillers(self, *decoders: Instance) -> None:
        addresses = tuple(
            PrefillerAddress(uuid=instance.uuid, fabric_address=instance.announce.fabric_address)
            for instance in self.instances.of_role("prefiller")
        )
        for decoder in decoders:
            self.tell(decoder.uuid, Prefillers(sender=self.uuid, prefillers=addresses))

    # ---- what is said about attempts ---------------------------------------------------------------------------

    def _deliver(self, message: RequestMessage) -> None:
        if (event := EVENTS.get(type(message))) is not None:
            self.events[event] += 1
        attempt = self._attempts.get(message.request_id)
        if isinstance(message, NeedPrefill) and attempt is not None and attempt.decoder == message.sender:
            self._need_prefill(attempt, message)
        elif attempt is None or not attempt.take(message, self._now):
            self._late(message)
        else:
            self.observed.take(attempt, message, self._now)
            match message:
                case Accepted():
                    self._accepted(attempt)
                case Prefilled() | Tokens():
                    self._prefilled(message.request_id)
        if isinstance(message, Prefilled | Finished):
            self.line.wake_heads()  # a lease has ended, or pages are free

    def _accepted(self, attempt: Attempt) -> None:
        """Its pages and its prompt count where they are, until the next Status counts them. Done as the message comes:
        a Status that comes after it has them."""
        request_id, wanted = attempt.errand.request_id, attempt.errand.wanted
        decoder = None if attempt.decoder is None else self.instances.get(attempt.decoder)
        if decoder is None:
            return
        if request_id not in self._placed:
            num_pages = num_pages_wanted(wanted, decoder.announce.limits.page_size)
            self._placed[request_id] = (decoder.uuid, num_pages)
            self.instances.placed(decoder.uuid, num_pages)
            self.streams.began(request_id, decoder.uuid, attempt.errand.generation, self._now)
        self._prefilled(request_id)  # elsewhere, where a ticket failed
        computing = attempt.prefiller or decoder.uuid
        num_missing = max(0, wanted.num_prefilled - self.observed.cached_tokens(computing, attempt.prompt))
        self._given[request_id] = (computing, num_missing, wanted.tier)
        self.instances.given(computing, num_missing, wanted.tier)

    def _prefilled(self, request_id: str) -> None:
        """Nobody computes its prompt any more. Idempotent."""
        given = self._given.pop(request_id, None)
        if given is not None:
            computing, num_tokens, tier = given
            self.instances.given(computing, -num_tokens, tier)

    def _need_prefill(self, attempt: Attempt, message: NeedPrefill) -> None:
        """Another prefiller than the one that failed."""
        if message.is_fault:
            self._failed(message)
        if not attempt.may_replace_prefiller(self._now):
            return
        observed, prompt = self.observed, attempt.prompt
        others = [view for view in observed.prefillers(prompt) if view.uuid != message.prefiller]
        decoder = self.instances.get(message.sender)
        if decoder is None:
            return
        prefiller = choose_prefiller(
            observed.decoder(decoder, prompt), others, attempt.errand.wanted, observed.transfers(self._now)
        )
        attempt.replace_prefiller(prefiller, self._now, answer_by=self._now + self.timings.need_prefill_s)

    def _failed(self, message: NeedPrefill) -> None:
        """Once is an accident."""
        suspected_s = self.observed.failed(message.prefiller, message.sender, self._now)
        if suspected_s:
            names = self.instances.name(message.prefiller), self.instances.name(message.sender)
            _log.warning("%s to %s is suspected for %g s: %s", *names, suspected_s, message.reason)

    def _late(self, message: RequestMessage) -> None:
        """Nobody waits for it any more. What it opens is closed."""
        self.events["late"] += 1
        match message:
            case Granted():
                self.tell(message.sender, ReturnLease(sender=self.uuid, lease=message.lease))
            case Accepted() | Tokens() | NeedPrefill():
                self.tell(message.sender, Abort(sender=self.uuid, request_id=message.request_id))

    # ---- state shows itself ------------------------------------------------------------------------------------

    def attempts(self) -> Collection[Attempt]:
        """Of all requests that are under way, in the order in which they began."""
        return self._attempts.values()

    @property
    def num_running(self) -> int:
        """Requests that have left the line."""
        return len(self._requests) - len(self.line)

    def __repr__(self) -> str:
        return f"Exchange({self.instances!r}, {self.line!r}, requests={len(self._requests)})"
