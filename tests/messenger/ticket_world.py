"""The world that a ticket lives in, small enough to be explored whole: two processes, a network, writes, faults.

Both processes carry out the tables of `headrace.messenger.life`; everything else here is the adversary. Messages
arrive in any order, are sent again and again, and may be lost; each loop carries out one effect after the other while
the rest of the world goes on; a write lands at any later time, whether or not it completed at its writer. What is left
out: bytes, layers and the identity of a page (a ticket's pages share one fate). A `World` is thawed from a hashable
key, changed by one move of `ticket_moves`, and frozen again.

    writes    one code each, sorted because the rules only count them: where it is, then what its writer knows

              f flying (-> h half landed) -> l landed      o outstanding -> c completed
              x lost: it will never land                                 -> e completed in error
              v void: lands in nobody's page; w: and its imm has arrived
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from headrace.messenger import life
from headrace.messenger.life import (
    DecoderEvent,
    DecoderState,
    PrefillerEvent,
    PrefillerState,
)

DecoderTable = Mapping[tuple[DecoderState, DecoderEvent], life.DecoderMove]
PrefillerTable = Mapping[tuple[PrefillerState, PrefillerEvent], life.PrefillerMove]
Key = tuple[Any, ...]
Rules = dict[tuple[str, str], tuple[str, tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which world: its size, its faults, and (to prove that the check can fail) what is broken in it."""

    num_tickets: int = 1
    expected: int = 3  # writes of one ticket, the aux write included
    num_steps: int = 2  # forward steps of one prefill; 0: the prefiller had every page
    num_faults: int = 0  # of any kind in `faults`
    faults: frozenset[str] = frozenset()
    cancelled: frozenset[int] = frozenset({0, 1})  # tickets whose users may abort, or whose deadlines may pass
    leases: bool = True  # False: always granted, and nobody looks whether they end
    timers: bool = True  # False: neither the lost timer nor anybody's patience runs out
    repeats: int = 1  # a message is sent again while fewer copies and fewer answers are on their way; 0: never
    halves: bool = False  # a write lands in two halves; the rules do not see it, only what `revoke` stops
    lingers: bool = False  # access may end later than `revoke` returns: when the prefiller lets go of it, or is gone
    restart: bool = False  # a decoder that died comes back, at the same address
    order_wrapped: bool = False  # the second ticket's generation does not look newer than the first's
    decoder: DecoderTable = field(default_factory=lambda: life.DECODER)
    prefiller: PrefillerTable = field(default_factory=lambda: life.PREFILLER)
    revoke_stops_halves: bool = True  # False: only the registration is closed, the alias stays
    revoke_says_so: bool = True  # False: access that lingers is taken for ended
    fresh_keys: bool = True  # False: a restarted process registers under its predecessor's key
    errors_are_final: bool = True  # False: a write that completed in error is posted once more
    next_generation: bool = True  # False: a slot comes back with the imm that it had
    refused_is_counted: bool = True  # False: Refused gives pages back, whatever has arrived
    tombstones_keep_answers: bool = True  # False: of a ticket that is done they say that nothing was posted
    tombstones_keep_newest: bool = True  # False: an older use of the slot is remembered over a newer one


def rules_of(table: Mapping[Any, Any]) -> Rules:
    """By name: strings hash and compare faster than enum members, and make readable traces."""
    return {
        (state.name, event.name): (move.state.name, tuple(effect.name for effect in move.effects))
        for (state, event), move in table.items()
    }


TICKET_FIELDS = (
    # decoder
    "near",  # DecoderState, or WAITING before the request was accepted
    "process",  # which of the decoder's processes
    "session",  # epochs and restarts, counted as one number; the ticket was opened in this one
    "known",
    "pages",  # none, held, quarantined, kept, free
    "answer",
    "digests",
    "lost_timer",
    "patience",
    "target",  # None: not armed
    "arrivals",
    "reached",  # Reached that were told and not yet taken: the arrivals of each
    "surplus",
    # the wire
    "writes",
    "bad",  # wrong bytes have landed
    # prefiller
    "far",
    "remembered",  # the tombstone of the slot is this ticket's
    "final",  # num_posted as remembered
    "said",  # the last answer: its kind and num_posted
    "list",  # none, open, complete, closed
    "done",  # its TransferDone was taken
    "job",  # none, queued, step, dropping, leaving (out, ENGINE_LEFT not taken), left
    "step",
    "ready",  # writes whose bytes are computed
    "step_failed",  # told and not yet taken
    "runs",
    "source",  # none, held, released
    "lease",  # none, granted, used, ended
)
_ticket_key = attrgetter(*TICKET_FIELDS)
NEW_TICKET: Key = (
    *("WAITING", 0, 0, None, "none", "", False, False, False, None, 0, (), False),
    *((), False),
    *("UNSEEN", False, 0, (), "none", False, "none", 0, 0, False, 0, "none", "none"),
)


class Ticket:
    __slots__ = TICKET_FIELDS

    def __init__(self, key: Key) -> None:
        (
            self.near, self.process, self.session, self.known, self.pages, self.answer, self.digests, self.lost_timer,
            self.patience, self.target, self.arrivals, self.reached, self.surplus, self.writes, self.bad, self.far,
            self.remembered, self.final, self.said, self.list, self.done, self.job, self.step, self.ready,
            self.step_failed, self.runs, self.source, self.lease,
        ) = key  # fmt: skip

    @property
    def is_open(self) -> bool:
        return self.near not in ("WAITING", "CLOSED")

    def forget(self, inert: str, lives: bool) -> None:
        """What can no longer matter; or else every past would make a world of its own."""
        if self.near == "CLOSED" and not lives:
            self.pages, self.answer = "none", ""
        if self.near == "CLOSED" and self.target is None and (self.answer == "failed" or not lives):
            self.known, self.bad = None, False
            self.writes = tuple(sorted("x" + write[1] if write[0] in inert else write for write in self.writes))
        if self.job in ("left", "dropping") and self.list != "open":
            self.step = self.ready = 0
        if self.list == "closed":  # has failed, whatever the writes did
            self.writes = tuple(sorted(write.replace("e", "c") for write in self.writes))
        if self.far in ("UNSEEN", "DONE") and self.done:
            self.writes = tuple(sorted(write[0] + "c" for write in self.writes))

    def move_write(self, old: str, new: str) -> None:
        writes = list(self.writes)
        writes.remove(old)
        writes.append(new)
        self.writes = tuple(sorted(writes))


Message = tuple[str, int, int]  # kind, ticket, num_posted
TO_PREFILLER = ("Prefill", "Cancel")
ANSWERS = {
    "SEND_REFUSED": "Refused",
    "SEND_FAILED": "Failed",
    "SEND_CANCEL_ACK": "CancelAck",
    "SEND_CLOSED": "Closed",
}


class World:
    __slots__ = (
        "settings", "decoder_rules", "prefiller_rules", "exercised", "shared", "broken",
        "tickets", "process", "decoder_alive", "session", "ending", "prefiller", "heard", "noticed", "net",
        "near_effects", "far_effects", "faults_left",
    )  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.decoder_rules = rules_of(settings.decoder)
        self.prefiller_rules = rules_of(settings.prefiller)
        self.shared: dict[Key, Key] = {}  # one copy of every ticket's key: worlds share most of them
        self.exercised: set[tuple[str, str, str]] = set()
        tickets = (NEW_TICKET,) * settings.num_tickets
        self.thaw((tickets, 0, True, 0, False, "alive", (0, -1), -1, (), (), (), settings.num_faults))

    def thaw(self, key: Key) -> None:
        (
            tickets, self.process, self.decoder_alive, self.session, self.ending, self.prefiller, self.heard,
            self.noticed, self.net, self.near_effects, self.far_effects, self.faults_left,
        ) = key  # fmt: skip
        self.tickets = [Ticket(ticket) for ticket in tickets]
        self.broken = ""

    def freeze(self) -> Key:
        inert = "lvw" if self.settings.next_generation else "lw"
        if not self.far_effects:
            self.bury()
        for ticket in self.tickets:
            ticket.forget(inert, self.lives(ticket))
        if self.net:  # the decoder looks tickets up: it drops what comes for a closed one
            tickets = self.tickets
            self.net = tuple([m for m in self.net if m[0] in TO_PREFILLER or tickets[m[1]].near != "CLOSED"])
        return (
            tuple([self.shared.setdefault(key, key) for key in map(_ticket_key, self.tickets)]),
            self.process, self.decoder_alive, self.session, self.ending, self.prefiller, self.heard,
            self.noticed, self.net, self.near_effects, self.far_effects, self.faults_left,
        )  # fmt: skip

    # ---- processes: the tables at work ----

    def decoder_event(self, i: int, event: DecoderEvent) -> None:
        """Effects go in front of what is pending: REVOKED is taken in the middle of another ticket's effects."""
        ticket = self.tickets[i]
        name = event._name_
        self.exercised.add(("decoder", ticket.near, name))
        if event is DecoderEvent.CONTRADICTED and "breach" not in self.settings.faults:
            self.broken = "an honest prefiller is accused of a breach"
        if event is DecoderEvent.REACHED and ticket.near == "OPEN":
            ticket.known = self.settings.expected
        ticket.near, effects = self.decoder_rules[ticket.near, name]
        self.near_effects = tuple([(i, effect) for effect in effects]) + self.near_effects

    def prefiller_event(self, i: int, event: PrefillerEvent) -> None:
        ticket = self.tickets[i]
        name = event._name_
        self.exercised.add(("prefiller", ticket.far, name))
        ticket.far, effects = self.prefiller_rules[ticket.far, name]
        self.far_effects += tuple([(i, effect) for effect in effects])

    def send(self, kind: str, i: int, num_posted: int = 0) -> None:
        to_prefiller = kind in TO_PREFILLER
        if to_prefiller and self.prefiller == "dead":
            return
        if not to_prefiller and not self.lives(self.tickets[i]):
            return
        self.net = tuple(sorted((*self.net, (kind, i, num_posted))))

    def lives(self, ticket: Ticket) -> bool:
        """The decoder process that opened the ticket."""
        return self.decoder_alive and bool(ticket.process == self.process)

    # ---- what the prefiller remembers: of each decoder process and slot one ticket, in the current epoch ----

    def is_current(self, ticket: Ticket) -> bool:
        """Of the newest epoch that its decoder process said Hello with."""
        return bool(ticket.session == self.heard[ticket.process])

    def is_new(self, i: int) -> bool:
        """Of the current epoch, and newer than what is remembered of its slot."""
        seen = self.tombstone(self.tickets[i])
        return self.is_current(self.tickets[i]) and (seen is None or self.is_newer(i, than=seen))

    def is_newer(self, i: int, than: int) -> bool:
        return i < than if self.settings.order_wrapped else i > than

    def tombstone(self, ticket: Ticket) -> int | None:
        same_slot = (j for j, t in enumerate(self.tickets) if t.remembered and t.process == ticket.process)
        return next(same_slot, None)

    def remember(self, i: int) -> None:
        seen = self.tombstone(self.tickets[i])
        if not self.is_current(self.tickets[i]) or seen == i:
            return
        if seen is not None:
            if self.settings.tombstones_keep_newest and self.is_newer(seen, than=i):
                return
            self.tickets[seen].remembered = False
        self.tickets[i].remembered = True

    def bury(self) -> None:
        """A ticket without a job and without a tombstone is as good as unseen."""
        for ticket in self.tickets:
            if ticket.far in ("UNSEEN", "DONE") and not ticket.remembered:
                ticket.far, ticket.final, ticket.said = "UNSEEN", 0, ()

    # ---- the fabric ----

    def arrive(self, i: int) -> None:
        """The imm of one write of ticket i."""
        for j in self.counted_by(i):
            ticket = self.tickets[j]
            ticket.arrivals += 1
            if i != j:
                self.broken = "a foreign counter moved"
            self.count(ticket)

    def counted_by(self, i: int) -> list[int]:
        """The armed counters that an imm of ticket i moves: its own, unless imms are used again."""
        candidates = (i,) if self.settings.next_generation else range(len(self.tickets))
        return [j for j in candidates if self.tickets[j].target is not None and self.lives(self.tickets[j])]

    def count(self, ticket: Ticket) -> None:
        if ticket.arrivals == ticket.target:
            ticket.reached += (ticket.arrivals,)
        elif ticket.arrivals > ticket.target:
            ticket.surplus = True

    def revoke(self, *, lingers: bool = False) -> None:
        """The fabric's revoke: the peer's access has ended, or lingers."""
        if not lingers and not self.ending:
            self.end_access()
            return
        self.ending = True
        event = DecoderEvent.ACCESS_ENDING if self.settings.revoke_says_so else DecoderEvent.REVOKED
        self.tell_open_tickets(event)

    def end_access(self) -> None:
        """No write of the peer that has not landed ever will, and it is greeted under the next epoch."""
        self.ending = False
        self.session += 1
        stopped = "fh" if self.settings.revoke_stops_halves else "f"
        for ticket in self.tickets:
            if self.lives(ticket):
                ticket.writes = tuple(sorted("v" + w[1] if w[0] in stopped else w for w in ticket.writes))
        self.tell_open_tickets(DecoderEvent.REVOKED)

    def tell_open_tickets(self, event: DecoderEvent) -> None:
        for i in reversed(range(len(self.tickets))):
            if self.lives(self.tickets[i]) and self.tickets[i].is_open:
                self.decoder_event(i, event)

    def post(self, ticket: Ticket) -> None:
        if not self.lives(ticket):
            where = "x" if self.settings.fresh_keys else "f"
        else:
            where = "f" if ticket.session == self.session else "v"
        ticket.writes = tuple(sorted((*ticket.writes, where + "o")))
        if len(ticket.writes) == self.settings.expected:
            ticket.list = "complete"

    # ---- effects ----

    def decoder_effect(self, *, lingers: bool = False) -> None:
        (i, effect), *rest = self.near_effects
        self.near_effects = tuple(rest)
        ticket = self.tickets[i]
        match effect:
            case "ARM":
                ticket.target, ticket.arrivals = self.settings.expected, 0
            case "SEND_PREFILL":
                self.send("Prefill", i)
            case "SEND_CANCEL":
                self.send("Cancel", i)
            case "RETARGET":
                ticket.target = ticket.known
                self.count(ticket)
            case "START_DIGESTS":
                ticket.digests = True
            case "START_LOST_TIMER":
                ticket.lost_timer = True
            case "START_PATIENCE":
                ticket.patience = True
            case "STOP_TIMERS":
                ticket.lost_timer = ticket.patience = False
            case "QUARANTINE_PAGES":
                ticket.pages = "quarantined"
            case "KEEP_PAGES":
                ticket.pages = "kept"
            case "FREE_PAGES":
                ticket.pages = "free"
            case "REVOKE_PEER":
                self.revoke(lingers=lingers)
            case "CLOSE":
                ticket.target, ticket.arrivals, ticket.reached, ticket.surplus = None, 0, (), False
                ticket.digests = ticket.lost_timer = ticket.patience = False
            case "ANSWER_READY" | "ANSWER_FAILED":
                if ticket.answer:
                    self.broken = "a request is answered twice"
                ticket.answer = "ready" if effect == "ANSWER_READY" else "failed"
            case "SUSPECT_LINK":
                pass
            case _:
                raise AssertionError(f"the world knows no {effect}")

    def prefiller_effect(self) -> None:
        (i, effect), *rest = self.far_effects
        self.far_effects = tuple(rest)
        ticket = self.tickets[i]
        match effect:
            case "REMEMBER":
                self.remember(i)
            case "OPEN_LIST":
                ticket.list = "open"
            case "START_JOB":
                self.start_job(ticket)
            case "DROP_JOB":
                ticket.job = {"queued": "leaving", "step": "dropping"}.get(ticket.job, ticket.job)
            case "CLOSE_LIST":
                self.close_list(ticket)
            case "END_LEASE":
                ticket.lease = "ended"
            case "RELEASE_SOURCE":
                ticket.source = "released"
            case "SEND_AGAIN":
                if ticket.said:
                    kind, num_posted = ticket.said
                    self.send(kind, i, num_posted if self.knows(ticket) else 0)
            case _:
                self.answer(i, ANSWERS[effect])

    def answer(self, i: int, kind: str) -> None:
        ticket = self.tickets[i]
        if kind == "Refused":
            num_posted = 0
        elif ticket.list == "open":  # asked too early, the number is the one of this moment
            num_posted = len(ticket.writes)
        else:
            num_posted = ticket.final if kind == "Closed" or self.knows(ticket) else 0
        ticket.said = (kind, num_posted)
        self.send(kind, i, num_posted)

    def knows(self, ticket: Ticket) -> bool:
        """How much was posted."""
        return bool(ticket.far != "DONE" or self.settings.tombstones_keep_answers)

    def start_job(self, ticket: Ticket) -> None:
        ticket.runs += 1
        ticket.source = "held"
        if ticket.runs > 1:
            self.broken = "a ticket runs twice"
        ticket.job = "queued" if self.settings.num_steps else "leaving"
        ticket.ready = 0 if self.settings.num_steps else self.settings.expected

    def close_list(self, ticket: Ticket) -> None:
        if ticket.done:
            self.broken = "close_transfer after its TransferDone was taken"
        if ticket.list == "open":
            ticket.list = "closed"
        ticket.final = len(ticket.writes)
