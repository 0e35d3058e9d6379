"""The instances that a gateway knows: who they are, how they stand, when they were last heard. A table, no sockets.

Owned by the gateway's loop; every call takes `now`, and tells what changed. The life of an entry, by uuid:

    Announce        alive, or refused where it differs from the others (kept, and looked at again: they may leave)
    any message     heard; one that was taken for gone is alive again
    a Status        may tell that it drains: then it is alive until it leaves, and takes nothing new
    silence         absent: its requests are over; what it said of itself is kept for a while
    Goodbye         forgotten at once
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from headrace.gateway.admit import longest_sequence
from headrace.gateway.budgets import TIERS
from headrace.gateway.options import Timings
from headrace.gateway.route import DecoderView, PrefillerView
from headrace.protocol.control import (
    CONTROL_VERSION,
    Announce,
    Decoding,
    Goodbye,
    InstanceMessage,
    Limits,
    Role,
    Status,
)
from headrace.protocol.messages import Tier, Uuid


@dataclass(slots=True, kw_only=True)
class Instance:
    """`placed_*` and `given_tokens`: what this gateway gave it to do since its last Status, less what ended."""

    announce: Announce
    heard_at: float
    is_alive: bool = False
    refusal: str | None = None
    status: Status | None = None
    placed_requests: int = 0
    placed_pages: int = 0
    given_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))  # to prefill

    @property
    def uuid(self) -> Uuid:
        return self.announce.sender

    @property
    def decodes(self) -> bool:
        return self.announce.role != "prefiller"

    @property
    def is_draining(self) -> bool:
        return self.status is not None and self.status.is_draining

    @property
    def is_open(self) -> bool:
        """New work may be given to it."""
        return self.is_alive and not self.is_draining

    @property
    def described(self) -> str:
        """For people: what it serves, and how much it holds."""
        limits, told = self.announce.limits, self.announce
        num_pages = limits.pool_tokens // limits.page_size
        pages = f"{num_pages:,} pages of {limits.page_size} tokens = {limits.pool_tokens:,} tokens"
        return f"model {told.model}, KV {pages}, pid {told.pid}"

    def stands(self, status: Status | None) -> None:
        """As it says, or (None) as it stands at its start."""
        self.status = status
        self.placed_requests = self.placed_pages = 0
        self.given_tokens = dict.fromkeys(TIERS, 0)

    def __str__(self) -> str:
        told = self.announce
        return f"{told.role} {told.name}" if told.name else f"{told.role} {told.sender[:8]}"


@dataclass(frozen=True, slots=True)
class Came:
    instance: Instance


@dataclass(frozen=True, slots=True)
class Left:
    instance: Instance
    reason: str


@dataclass(frozen=True, slots=True)
class Drains:
    """It takes nothing new from now on, and leaves when what it has is done."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """It differs from what is served here. Told once for each reason."""

    instance: Instance
    reason: str


@dataclass(frozen=True, slots=True)
class Stranger:
    """It knows another gateway, before this one, at this endpoint: a Beat makes it announce itself."""

    uuid: Uuid


Change = Came | Left | Drains | TurnedAway | Stranger


class Instances:
    """`model` is the name that all of them must serve."""

    def __init__(self, model: str, timings: Timings) -> None:
        self._model = model
        self._timings = timings
        self._known: dict[Uuid, Instance] = {}
        self._looked_at: float | None = None
        self._open: list[Instance] | None = None  # decoders that take requests, until somebody comes or goes

    # ---- what is heard -----------------------------------------------------------------------------------------

    def take(self, message: InstanceMessage, now: float) -> list[Change]:
        """Of any message of an instance."""
        match message:
            case Goodbye():
                return self.leave(message.sender, "it said goodbye", forget=True)
            case Announce():
                return self._announced(message, now)
        instance = self._known.get(message.sender)
        if instance is None:
            return [Stranger(message.sender)] if isinstance(message, Status) else []
        instance.heard_at = now
        was_open = instance.is_open
        if isinstance(message, Status):
            instance.stands(message)
            self._open = None  # it may drain, or drain no more
        changes = self._let_in(instance)
        return [*changes, Drains(instance)] if was_open and instance.is_draining else changes

    def _announced(self, announce: Announce, now: float) -> list[Change]:
        changes: list[Change] = []
        instance = self._known.get(announce.sender)
        if instance is None or instance.announce != announce:
            changes += self.leave(announce.sender, "it announces itself anew", forget=True)
            instance = self._known[announce.sender] = Instance(announce=announce, heard_at=now)
        instance.heard_at = now
        return changes + self._let_in(instance)

    def _let_in(self, instance: Instance) -> list[Change]:
        if instance.is_alive:
            return []
        former, instance.refusal = instance.refusal, self._difference(instance.announce)
        if instance.refusal is None:
            instance.is_alive = True
            self._open = None
            return [Came(instance)]
        return [] if instance.refusal == former else [TurnedAway(instance, instance.refusal)]

    def _difference(self, announce: Announce) -> str | None:
        fingerprint = next((known.announce.fingerprint for known in self.alive()), announce.fingerprint)
        compared = (
            ("control version", CONTROL_VERSION, announce.version),
            ("model", self._model, announce.model),
            ("model fingerprint", fingerprint, announce.fingerprint),
        )
        for what, ours, theirs in compared:
            if ours != theirs:
                return f"{what} differs: ours {ours!r}, theirs {theirs!r}"
        return None

    def leave(self, uuid: Uuid, reason: str, *, forget: bool = False) -> list[Change]:
        """It is gone, or nobody can be reached there. Idempotent."""
        instance = self._known.get(uuid)
        if instance is None:
            return []
        if forget:
            del self._known[uuid]
        if not instance.is_alive:
            return []
        # How it stood says nothing about how it comes back: it will have aborted everything.
        instance.is_alive = False
        instance.stands(None)
        self._open = None
        return [Left(instance, reason)]

    def expire(self, now: float) -> list[Change]:
        """Who has been silent for too long. After a pause of our own nobody is blamed: what they said meanwhile is
        still to be read."""
        timings = self._timings
        pause = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if pause > timings.silence_s / 2:
            for instance in self._known.values():
                instance.heard_at += pause
        silent = [known for known in self._known.values() if now - known.heard_at > timings.silence_s]
        for instance in [known for known in silent if now - known.heard_at > timings.forget_s]:
            self.leave(instance.uuid, "forgotten", forget=True)
        left = (self.leave(known.uuid, f"silent for {timings.silence_s:g} s") for known in silent)
        return list(chain.from_iterable(left))

    # ---- what was given to them --------------------------------------------------------------------------------

    def placed(self, uuid: Uuid, num_pages: int) -> None:
        """A decoder took a request of ours."""
        if (instance := self.get(uuid)) is not None:
            instance.placed_requests += 1
            instance.placed_pages += num_pages

    def ended(self, uuid: Uuid, num_pages: int) -> None:
        """One that `placed` told of is over."""
        if (instance := self.get(uuid)) is not None:
            instance.placed_requests -= 1
            instance.placed_pages -= num_pages

    def given(self, uuid: Uuid, num_tokens: int, tier: Tier) -> None:
        """A prefiller, or a decoder by itself, is to compute so much of a prompt; less than 0 of one that it has."""
        if (instance := self.get(uuid)) is not None:
            instance.given_tokens[tier] += num_tokens

    # ---- who is there ------------------------------------------------------------------------------------------

    def get(self, uuid: Uuid) -> Instance | None:
        """Only if it is alive."""
        instance = self._known.get(uuid)
        return instance if instance is not None and instance.is_alive else None

    def name(self, uuid: Uuid | None) -> str:
        """For people."""
        instance = None if uuid is None else self.get(uuid)
        return "-" if instance is None else instance.announce.name or instance.uuid[:8]

    def alive(self) -> Iterator[Instance]:
        """In the order in which they were first heard of."""
        return (instance for instance in self._known.values() if instance.is_alive)

    def known(self) -> Iterator[Instance]:
        """Those that are absent or refused too, in the same order."""
        return iter(self._known.values())

    def of_role(self, *roles: Role) -> list[Instance]:
        return [instance for instance in self.alive() if instance.announce.role in roles]

    def open_decoders(self) -> Sequence[Instance]:
        """Those that take new requests, as the next one's. Looked for when somebody has come or gone: limits alone are
        asked for three times a request."""
        if self._open is None:
            self._open = [instance for instance in self.alive() if instance.decodes and instance.is_open]
        return self._open

    def open_prefillers(self) -> list[Instance]:
        return [instance for instance in self.of_role("prefiller") if instance.is_open]

    def limits(self) -> Limits | None:
        """Of the decoder that holds the shortest sequences; None while there is none."""
        limits = (instance.announce.limits for instance in self.open_decoders())
        return min(limits, key=longest_sequence, default=None)

    def __repr__(self) -> str:
        alive = sum(1 for _ in self.alive())
        return f"Instances({alive} alive, {len(self._known) - alive} absent or refused)"


def decoder_view(instance: Instance, *, cached_tokens: int = 0, hand_over_s: float = 0.0) -> DecoderView:
    """Of a prompt of which it has so many tokens."""
    limits, status = instance.announce.limits, instance.status
    num_pages = limits.pool_tokens // limits.page_size
    free = num_pages if status is None else status.num_free_pages
    running = 0 if status is None else status.num_running
    return DecoderView(
        uuid=instance.uuid,
        is_colocated=instance.announce.role == "colocated",
        num_free_pages=min(num_pages, max(0, free - instance.placed_pages)),
        page_size=limits.page_size,
        num_running=max(0, running + instance.placed_requests),
        max_running=limits.max_running,
        num_queued_tokens=_num_queued_tokens(instance, *TIERS),
        num_background_tokens=_num_queued_tokens(instance, "flex"),
        cached_tokens=cached_tokens,
        prefilling=None if status is None else status.prefilling,
        decoding=_decoding(instance),
        hand_over_s=hand_over_s,
    )


def prefiller_view(instance: Instance, *, cached_tokens: int = 0) -> PrefillerView:
    """The same."""
    return PrefillerView(
        uuid=instance.uuid,
        num_queued_tokens=_num_queued_tokens(instance, *TIERS),
        num_background_tokens=_num_queued_tokens(instance, "flex"),
        max_tokens=longest_sequence(instance.announce.limits),
        cached_tokens=cached_tokens,
        prefilling=None if instance.status is None else instance.status.prefilling,
    )


def _num_queued_tokens(instance: Instance, *tiers: Tier) -> int:
    status = instance.status
    urgent = 0 if status is None else status.num_interactive_tokens
    queued: dict[Tier, int] = {
        "interactive": urgent,
        "flex": 0 if status is None else max(0, status.num_queued_tokens - urgent),
    }
    return sum(max(0, queued[tier] + instance.given_tokens[tier]) for tier in tiers)


def _decoding(instance: Instance) -> Decoding | None:
    """With what was placed there since: its pages are full, as far as is known here."""
    told = None if instance.status is None else instance.status.decoding
    if told is None or not instance.placed_requests:
        return told
    num_keys = told.num_keys + instance.placed_pages * instance.announce.limits.page_size
    return msgspec.structs.replace(
        told, num_rows=max(0, told.num_rows + instance.placed_requests), num_keys=max(0, num_keys)
    )
