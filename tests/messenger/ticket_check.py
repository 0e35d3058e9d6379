"""Explores a world whole, breadth first: what must hold in every state, and that every state leads to an end.

`explore` stops at the first state that breaks an invariant and gives the shortest way there. When none does, it walks
backwards over the fair moves from all states at rest: a state that is not met can wait for ever.
"""

import gc
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ticket_moves import Label, enabled
from ticket_world import Key, Settings, Ticket, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    num_states: int
    num_moves: int
    num_at_rest: int
    seconds: float
    answers: frozenset[tuple[str, ...]]  # of the requests, at rest
    exercised: frozenset[tuple[str, str, str]]
    broken: str  # empty: everything holds
    trace: tuple[Label, ...]

    def __str__(self) -> str:
        head = f"{self.num_states} states, {self.num_moves} moves, {self.num_at_rest} at rest, {self.seconds:.1f} s"
        if not self.broken:
            return head
        steps = "\n".join(f"  {n:2} {' '.join(map(str, label))}" for n, label in enumerate(self.trace, 1))
        return f"{head}\n{self.broken}:\n{steps}"


def explore(settings: Settings, max_states: int = 2_000_000) -> Report:
    """Without the cycle collector: there are no cycles, and it would walk over all states again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return _explore(settings, max_states)
    finally:
        if collects:
            gc.enable()


def _explore(settings: Settings, max_states: int) -> Report:
    began = time.perf_counter()
    w = World(settings)
    keys: list[Key] = [w.freeze()]
    index: dict[Key, int] = {keys[0]: 0}
    parents: list[tuple[int, Label]] = [(0, ())]
    fair_from: list[int] = []
    fair_to: list[int] = []
    at_rest: list[int] = []
    answers: set[tuple[str, ...]] = set()
    num_moves = 0

    def report(broken: str, last: int) -> Report:
        return Report(
            num_states=len(keys),
            num_moves=num_moves,
            num_at_rest=len(at_rest),
            seconds=time.perf_counter() - began,
            answers=frozenset(answers),
            exercised=frozenset(w.exercised),
            broken=broken,
            trace=way_to(parents, last),
        )

    here = 0
    while here < len(keys):
        key = keys[here]
        w.thaw(key)
        if is_at_rest(w):
            at_rest.append(here)
            answers.add(tuple(ticket.answer for ticket in w.tickets))
        moves = list(enabled(w))
        for nth, (label, fair, act) in enumerate(moves):
            if nth:  # thawed already, for the first
                w.thaw(key)
            act(w)
            num_moves += 1
            there = index.setdefault(after := w.freeze(), len(keys))
            if there == len(keys):
                keys.append(after)
                parents.append((here, label))
                if broken := w.broken or violation(w):
                    return report(broken, there)
            elif w.broken:
                parents.append((here, label))
                return report(w.broken, len(parents) - 1)
            if fair and there != here:
                fair_from.append(here)
                fair_to.append(there)
        here += 1
        assert here < max_states, f"the world is larger than {max_states} states: lower its budgets"
    stuck = first_without_end(len(keys), np.array(fair_from), np.array(fair_to), at_rest)
    if stuck is None:
        return report("", 0)
    w.thaw(keys[stuck])
    return report(f"waits for ever ({unfinished(w)})", stuck)


def way_to(parents: list[tuple[int, Label]], last: int) -> tuple[Label, ...]:
    way: list[Label] = []
    while last:
        last, label = parents[last]
        way.append(label)
    return tuple(reversed(way))


def first_without_end(
    num_states: int, fair_from: NDArray[np.int64], fair_to: NDArray[np.int64], at_rest: list[int]
) -> int | None:
    """The first state from which no state at rest is reached by fair moves."""
    order = np.argsort(fair_to, kind="stable")
    sources = fair_from[order]
    begins = np.searchsorted(fair_to[order], np.arange(num_states + 1))
    ends = np.zeros(num_states, dtype=bool)
    ends[at_rest] = True
    todo = list(at_rest)
    while todo:
        state = todo.pop()
        for source in sources[begins[state] : begins[state + 1]]:
            if not ends[source]:
                ends[source] = True
                todo.append(int(source))
    without = np.flatnonzero(~ends)
    return int(without[0]) if len(without) else None


# ---- what must hold --------------------------------------------------------------------------------------------


def violation(w: World) -> str:
    """-> the invariant that this state breaks, or nothing."""
    for i, ticket in enumerate(w.tickets):
        if broken := decoder_violation(w, ticket) or prefiller_violation(w, ticket):
            return f"{broken} (ticket {i})"
    return ""


def decoder_violation(w: World, ticket: Ticket) -> str:
    if not w.lives(ticket):
        return ""
    may_land = any(write[0] in "fh" for write in ticket.writes)
    if ticket.pages == "free" and may_land:
        return "a free page may still be written"
    if ticket.pages == "kept" and may_land:
        return "a page of a ready request may still be written"
    if ticket.near == "CLOSED" and ticket.target is None and may_land:
        return "an aux slot that was given back may still be written"
    if ticket.answer == "ready":
        if ticket.pages != "kept":
            return "a ready request does not own its pages"
        if ticket.bad or sum(write[0] == "l" for write in ticket.writes) != w.settings.expected:
            return "a request is ready without all of its bytes"
    if ticket.answer == "failed" and ticket.pages not in ("free", "quarantined"):
        return "a failed request holds pages"
    return ""


def prefiller_violation(w: World, ticket: Ticket) -> str:
    if len(ticket.writes) > w.settings.expected:
        return "a write is posted twice"
    if ticket.source == "released":
        if ticket.job in ("queued", "step", "dropping"):
            return "a released source page is written by the engine"
        if w.lives(ticket) and any(write[1] == "o" for write in ticket.writes):
            return "a released source page is still read"
    return ""


def unfinished(w: World) -> str:
    """-> what is not at its end, or nothing."""
    for i, ticket in enumerate(w.tickets):
        if ticket.near == "WAITING":
            if w.prefiller == "alive" and (w.decoder_alive or w.settings.restart):
                return f"request {i} is not accepted"
            continue
        if w.ending and w.prefiller == "hung" and ticket.near == "REVOKING" and ticket.answer:
            continue  # its pages are out of use until it wakes or exits, which it need not
        if w.lives(ticket):
            if ticket.near != "CLOSED" or ticket.target is not None:
                return f"ticket {i} is open at the decoder"
            if not ticket.answer:
                return f"request {i} is not answered"
            if ticket.pages not in ("free", "kept"):
                return f"pages of ticket {i} are {ticket.pages}"
        if w.prefiller == "alive":
            if ticket.far not in ("UNSEEN", "DONE") or ticket.source == "held" or ticket.list == "open":
                return f"ticket {i} is open at the prefiller"
            if w.settings.leases and ticket.lease != "ended":
                return f"lease {i} is {ticket.lease}"
    return ""


def is_at_rest(w: World) -> bool:
    return not w.near_effects and not (w.far_effects and w.prefiller == "alive") and not unfinished(w)
