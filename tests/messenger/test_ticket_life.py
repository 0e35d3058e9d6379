"""The life of a ticket: its tables are whole, they hold in every small world, and the check notices what breaks them.

`WORLDS` are explored to the last state. `BROKEN` has a line for every way to get it wrong that somebody might try:
each must be found, with the way there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from ticket_check import Report, explore
from ticket_world import Settings

from headrace.messenger import life
from headrace.messenger.life import (
    DECODER,
    PREFILLER,
    DecoderEffect,
    DecoderEvent,
    DecoderState,
    Move,
    PrefillerEffect,
    PrefillerEvent,
    PrefillerState,
)

D, DE, DF = DecoderState, DecoderEvent, DecoderEffect
P, PE, PF = PrefillerState, PrefillerEvent, PrefillerEffect

WRITE_FAULTS = frozenset({"write lost", "wrong bytes", "error", "error and lost"})
PREFILLER_FAULTS = frozenset({"no room", "failed step", "hang", "death"})
LOST = frozenset({"message lost"})
MESSAGE_FAULTS = LOST | {"message doubled"}
FAULTS = WRITE_FAULTS | PREFILLER_FAULTS | MESSAGE_FAULTS | {"revoke", "decoder death"}
NOBODY: frozenset[int] = frozenset()
FIRST = frozenset({0})

WORLDS = {
    "one fault in a prefill of two steps": Settings(num_faults=1, faults=FAULTS),
    "two faults in a prefill of one step": Settings(expected=2, num_steps=1, num_faults=2, faults=FAULTS),
    "three faults where every page was a hit": Settings(
        expected=1, num_steps=0, num_faults=3, faults=FAULTS, halves=True
    ),
    "two faults, and no deadline that would end it": Settings(
        expected=2, num_steps=1, num_faults=2, faults=FAULTS, cancelled=NOBODY
    ),
    "everything sent again while it is still on its way": Settings(
        expected=2, num_steps=1, num_faults=1, faults=FAULTS, repeats=2
    ),
    "a prefiller that breaks the rules of counting": Settings(
        expected=2, num_steps=1, num_faults=1, faults=FAULTS | {"breach"}
    ),
    "a second ticket in the slot and pages of the first": Settings(
        num_tickets=2,
        expected=1,
        num_steps=0,
        num_faults=1,
        faults=FAULTS,
        cancelled=FIRST,
        leases=False,
    ),
    "a slot whose generations seem to run backwards": Settings(
        num_tickets=2,
        expected=1,
        num_steps=0,
        num_faults=1,
        faults=FAULTS,
        cancelled=FIRST,
        leases=False,
        order_wrapped=True,
    ),
    "a decoder that comes back at its old address": Settings(
        num_tickets=2,
        expected=1,
        num_steps=0,
        num_faults=2,
        faults=MESSAGE_FAULTS | {"decoder death", "revoke"},
        cancelled=NOBODY,
        leases=False,
        restart=True,
    ),
    "access that may linger after a revoke": Settings(
        expected=2, num_steps=0, num_faults=1, faults=FAULTS | {"breach"}, halves=True, lingers=True
    ),
    "access that may linger, and a second ticket in the slot and pages of the first": Settings(
        num_tickets=2,
        expected=1,
        num_steps=0,
        num_faults=1,
        faults=frozenset({"hang", "death", "decoder death", "revoke", "write lost"}),
        cancelled=NOBODY,
        leases=False,
        halves=True,
        restart=True,
        lingers=True,
    ),
}


@cache
def explored(name: str) -> Report:
    return explore(WORLDS[name])


@pytest.mark.parametrize("name", WORLDS)
def test_every_state_of_a_world_is_sound_and_leads_to_an_end(name: str) -> None:
    report = explored(name)
    print(f"{name}: {report}")
    assert not report.broken, str(report)
    assert any("ready" in answers for answers in report.answers)
    assert any("failed" in answers for answers in report.answers)


def test_without_faults_and_cancels_every_request_becomes_ready() -> None:
    report = explore(Settings(cancelled=NOBODY, timers=False, leases=False))
    assert not report.broken, str(report)
    assert report.answers == {("ready",)}


def test_a_cancelled_ticket_gives_its_pages_back_without_anybodys_patience_running_out() -> None:
    report = explore(Settings(timers=False))
    assert not report.broken, str(report)
    assert report.answers == {("ready",), ("failed",)}


def test_lost_messages_cost_no_request_its_prefill() -> None:
    report = explore(replace(UNATTENDED, num_faults=3, faults=LOST, leases=False))
    assert not report.broken, str(report)
    assert report.answers == {("ready",)}


def test_lost_messages_are_made_good_without_a_deadline_or_anybodys_patience() -> None:
    faults = MESSAGE_FAULTS | {"no room", "failed step", "error"}
    report = explore(replace(UNATTENDED, num_faults=3, faults=faults))
    assert not report.broken, str(report)
    assert report.answers == {("ready",), ("failed",)}


def test_the_pages_of_a_cancelled_ticket_come_back_although_messages_are_lost() -> None:
    faults = MESSAGE_FAULTS | {"no room", "failed step", "error"}
    report = explore(replace(NO_PATIENCE, num_faults=2, faults=faults))
    assert not report.broken, str(report)
    assert report.answers == {("ready",), ("failed",)}


def test_a_lost_write_needs_no_deadline_to_be_noticed() -> None:
    settings = Settings(num_faults=1, faults=frozenset({"write lost"}), cancelled=NOBODY, leases=False)
    report = explore(settings)
    assert not report.broken, str(report)
    assert report.answers == {("ready",), ("failed",)}


def test_a_prefiller_that_hangs_with_access_costs_no_request_its_answer_and_nothing_but_pages() -> None:
    report = explore(HUNG_WITH_ACCESS)
    assert not report.broken, str(report)
    assert report.answers == {("ready",), ("failed",), ("",)}  # not accepted: it hangs already


# ---- the tables ------------------------------------------------------------------------------------------------


def test_the_tables_hold_every_state_with_every_event() -> None:
    assert set(DECODER) == {(state, event) for state in DecoderState for event in DecoderEvent}
    assert set(PREFILLER) == {(state, event) for state in PrefillerState for event in PrefillerEvent}


def test_a_closed_ticket_does_nothing_any_more() -> None:
    assert all(DECODER[D.CLOSED, event] == Move(D.CLOSED, ()) for event in DecoderEvent)


def test_a_done_ticket_only_repeats_itself() -> None:
    answers = {event: PREFILLER[P.DONE, event].effects for event in PrefillerEvent if PREFILLER[P.DONE, event].effects}
    assert answers == {PE.CANCEL: (PF.SEND_CANCEL_ACK,), PE.PREFILL_STALE: (PF.END_LEASE, PF.SEND_AGAIN)}
    assert all(PREFILLER[P.DONE, event].state is P.DONE for event in PrefillerEvent)


def test_every_move_that_changes_something_was_made_in_one_of_the_worlds() -> None:
    names = (
        "a prefiller that breaks the rules of counting",
        "a decoder that comes back at its old address",
        "access that may linger after a revoke",
    )
    exercised = {move for name in names for move in explored(name).exercised}
    moves = {("decoder", s.name, e.name) for (s, e), move in DECODER.items() if move != Move(s, ())}
    moves |= {("prefiller", s.name, e.name) for (s, e), move in PREFILLER.items() if move != Move(s, ())}
    assert moves - exercised == set()


# ---- guards ----------------------------------------------------------------------------------------------------


def test_reached_counts_only_at_the_newest_target() -> None:
    assert life.reached(arrivals=3, target=3) is DE.REACHED
    assert life.reached(arrivals=3, target=2) is DE.CONTRADICTED


@pytest.mark.parametrize(
    ("num_posted", "known", "event"),
    [
        (0, None, DE.TOLD),
        (3, None, DE.TOLD),
        (2, 2, DE.TOLD_AGAIN),
        (0, 0, DE.TOLD_AGAIN),
        (2, 3, DE.CONTRADICTED),
        (2, 0, DE.CONTRADICTED),
        (4, None, DE.CONTRADICTED),
        (4, 4, DE.CONTRADICTED),
    ],
)
def test_num_posted_is_believed_once(num_posted: int, known: int | None, event: DecoderEvent) -> None:
    assert life.told(num_posted=num_posted, known=known, expected=3) is event


@pytest.mark.parametrize(
    ("num_posted", "known", "event"),
    [(3, None, DE.CLOSED_TOLD), (3, 3, DE.CLOSED_TOLD), (2, None, DE.CONTRADICTED), (3, 2, DE.CONTRADICTED)],
)
def test_closed_means_that_all_was_posted(num_posted: int, known: int | None, event: DecoderEvent) -> None:
    assert life.closed(num_posted=num_posted, known=known, expected=3) is event


def test_a_second_copy_of_a_prefill_is_stale_before_it_is_refused() -> None:
    assert life.prefill(is_new=False, may_run=False) is PE.PREFILL_STALE
    assert life.prefill(is_new=False, may_run=True) is PE.PREFILL_STALE
    assert life.prefill(is_new=True, may_run=False) is PE.REFUSE
    assert life.prefill(is_new=True, may_run=True) is PE.PREFILL


@pytest.mark.parametrize(
    ("complete", "num_failed", "event"),
    [(True, 0, PE.LIST_DONE), (True, 1, PE.LIST_FAILED), (False, 0, PE.LIST_FAILED), (False, 2, PE.LIST_FAILED)],
)
def test_a_list_is_done_when_all_of_it_completed(complete: bool, num_failed: int, event: PrefillerEvent) -> None:
    assert life.list_done(complete=complete, num_failed=num_failed) is event


# ---- what the check must find ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broken:
    """A change for the worse, the world that shows it, and what the check must say."""

    says: str
    decoder: Mapping[Any, Any] | None = None
    prefiller: Mapping[Any, Any] | None = None
    world: Settings = Settings(expected=2, num_steps=1)  # noqa: RUF009, frozen


ONE_FAULT = Settings(expected=2, num_steps=1, num_faults=1)
DOUBLED_MESSAGE = replace(ONE_FAULT, faults=frozenset({"message doubled"}))
LOST_WRITE = replace(ONE_FAULT, faults=frozenset({"write lost"}))
WRONG_BYTES = replace(ONE_FAULT, faults=frozenset({"wrong bytes"}))
FAILED_STEP = replace(ONE_FAULT, faults=frozenset({"failed step"}))
ERROR = replace(ONE_FAULT, faults=frozenset({"error"}))
NO_ROOM = replace(ONE_FAULT, num_faults=2, faults=frozenset({"no room", "message doubled"}), cancelled=NOBODY)
DEATH = replace(ONE_FAULT, faults=frozenset({"death"}), cancelled=NOBODY)
DECODER_DEATH = replace(ONE_FAULT, faults=frozenset({"decoder death"}))
REVOKE = replace(ONE_FAULT, faults=frozenset({"revoke"}))
HALVES = replace(REVOKE, halves=True)
LINGERING = replace(REVOKE, lingers=True)
HUNG_WITH_ACCESS = replace(ONE_FAULT, faults=frozenset({"hang"}), cancelled=NOBODY, lingers=True)
BREACH = replace(ONE_FAULT, faults=frozenset({"breach"}))
NO_PATIENCE = Settings(expected=2, num_steps=1, timers=False)
UNATTENDED = Settings(expected=2, num_steps=1, timers=False, cancelled=NOBODY)
TWO_TICKETS = Settings(num_tickets=2, expected=1, num_steps=0, num_faults=1, cancelled=FIRST, leases=False)
# Nobody knows a ticket that looks old, so its Cancel is not answered.
LOST_AND_WRAPPED = replace(TWO_TICKETS, faults=LOST, cancelled=frozenset({1}), order_wrapped=True)

PAGE = "a free page may still be written"
SOURCE_READ = "a released source page is still read"
SOURCE_WRITTEN = "a released source page is written by the engine"
ACCUSED = "an honest prefiller is accused of a breach"
FOR_EVER = "waits for ever"

BROKEN = {
    # the decoder's pages
    "pages freed on cancel": Broken(
        PAGE, {(D.OPEN, DE.CANCEL): Move(D.CLOSED, (DF.FREE_PAGES, DF.SEND_CANCEL, DF.CLOSE, DF.ANSWER_FAILED))}
    ),
    "pages freed on CancelAck": Broken(PAGE, {(D.CANCELLING, DE.TOLD): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE))}),
    "pages freed on Failed": Broken(
        PAGE, {(D.OPEN, DE.TOLD): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE, DF.ANSWER_FAILED))}, world=FAILED_STEP
    ),
    "pages freed when patience ends": Broken(
        PAGE, {(D.CANCELLING, DE.PATIENCE): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE))}
    ),
    "pages freed before the revoke": Broken(
        PAGE, {(D.CANCELLING, DE.PATIENCE): Move(D.CANCELLING, (DF.FREE_PAGES, DF.REVOKE_PEER))}
    ),
    "pages freed when a write is taken for lost": Broken(
        PAGE, {(D.OPEN, DE.LOST_TIMER): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE, DF.ANSWER_FAILED))}
    ),
    "aux slot given back on cancel": Broken(
        "an aux slot that was given back may still be written",
        {(D.OPEN, DE.CANCEL): Move(D.CLOSED, (DF.QUARANTINE_PAGES, DF.SEND_CANCEL, DF.CLOSE, DF.ANSWER_FAILED))},
    ),
    "cancelled without a quarantine": Broken(
        "a failed request holds pages",
        {(D.OPEN, DE.CANCEL): Move(D.CANCELLING, (DF.SEND_CANCEL, DF.START_PATIENCE, DF.ANSWER_FAILED))},
    ),
    "Closed trusted for readiness": Broken(
        "a page of a ready request may still be written",
        {(D.OPEN, DE.CLOSED_TOLD): Move(D.CLOSED, (DF.KEEP_PAGES, DF.CLOSE, DF.ANSWER_READY))},
    ),
    "digests skipped": Broken(
        "a request is ready without all of its bytes",
        {(D.OPEN, DE.REACHED): Move(D.CLOSED, (DF.KEEP_PAGES, DF.CLOSE, DF.ANSWER_READY))},
        world=WRONG_BYTES,
    ),
    "retarget forgotten": Broken(
        FOR_EVER, {(D.CANCELLING, DE.TOLD): Move(D.DRAINING, (DF.START_PATIENCE,))}, world=NO_PATIENCE
    ),
    "armed after Prefill was sent": Broken(
        FOR_EVER, {(D.NEW, DE.OPENED): Move(D.OPEN, (DF.SEND_PREFILL, DF.ARM))}, world=NO_PATIENCE
    ),
    "no patience with a cancelled ticket": Broken(
        FOR_EVER, {(D.CANCELLING, DE.PATIENCE): Move(D.CANCELLING, ())}, world=LOST_AND_WRAPPED
    ),
    "no patience with a draining ticket": Broken(
        FOR_EVER, {(D.DRAINING, DE.PATIENCE): Move(D.DRAINING, ())}, world=LOST_WRITE
    ),
    "patience not started anew for the drain": Broken(
        FOR_EVER,
        {(D.OPEN, DE.TOLD): Move(D.DRAINING, (DF.QUARANTINE_PAGES, DF.RETARGET, DF.ANSWER_FAILED))},
        world=replace(LOST_WRITE, num_faults=2, faults=frozenset({"write lost", "failed step"})),
    ),
    "lost writes never noticed": Broken(
        FOR_EVER, {(D.OPEN, DE.LOST_TIMER): Move(D.OPEN, ())}, world=replace(LOST_WRITE, cancelled=NOBODY)
    ),
    "revoke does not end a ticket": Broken(FOR_EVER, {(D.OPEN, DE.REVOKED): Move(D.OPEN, ())}, world=DEATH),
    "a ticket outlives its epoch": Broken(
        "a ticket that is open is answered as over", {(D.OPEN, DE.REVOKED): Move(D.OPEN, ())}, world=REVOKE
    ),
    "failure not answered": Broken(
        FOR_EVER, {(D.OPEN, DE.TOLD): Move(D.DRAINING, (DF.QUARANTINE_PAGES, DF.RETARGET, DF.START_PATIENCE))}
    ),
    "pages freed on Refused": Broken(PAGE, world=replace(BREACH, refused_is_counted=False)),
    "Prefill not sent again": Broken(
        FOR_EVER,
        {(D.OPEN, DE.REPEAT_TIMER): Move(D.OPEN, ())},
        world=replace(UNATTENDED, num_faults=1, faults=LOST),
    ),
    "Cancel not sent again": Broken(
        FOR_EVER,
        {(D.CANCELLING, DE.REPEAT_TIMER): Move(D.CANCELLING, ())},
        world=replace(NO_PATIENCE, num_faults=1, faults=LOST),
    ),
    "armed again when Prefill is sent again": Broken(
        FOR_EVER, {(D.OPEN, DE.REPEAT_TIMER): Move(D.OPEN, (DF.ARM, DF.SEND_PREFILL))}, world=UNATTENDED
    ),
    "answered again after the cancel": Broken(
        "a request is answered twice",
        {(D.CANCELLING, DE.REVOKED): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE, DF.ANSWER_FAILED))},
    ),
    # access that lingers
    "pages freed while access lingers": Broken(
        PAGE,
        {(D.OPEN, DE.ACCESS_ENDING): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE, DF.ANSWER_FAILED))},
        world=LINGERING,
    ),
    "pages of a cancelled ticket freed while access lingers": Broken(
        PAGE, {(D.CANCELLING, DE.ACCESS_ENDING): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE))}, world=LINGERING
    ),
    "pages of a draining ticket freed while access lingers": Broken(
        PAGE, {(D.DRAINING, DE.ACCESS_ENDING): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE))}, world=LINGERING
    ),
    "pages freed, and only the slot kept, while access lingers": Broken(
        PAGE,
        {(D.OPEN, DE.ACCESS_ENDING): Move(D.REVOKING, (DF.FREE_PAGES, DF.ANSWER_FAILED))},
        world=LINGERING,
    ),
    "aux slot given back while access lingers": Broken(
        "an aux slot that was given back may still be written",
        {(D.OPEN, DE.ACCESS_ENDING): Move(D.CLOSED, (DF.QUARANTINE_PAGES, DF.CLOSE, DF.ANSWER_FAILED))},
        world=LINGERING,
    ),
    "pages freed at the end of a patience that was not stopped": Broken(
        PAGE,
        {
            (D.CANCELLING, DE.ACCESS_ENDING): Move(D.REVOKING, ()),
            (D.REVOKING, DE.PATIENCE): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE)),
        },
        world=LINGERING,
    ),
    "not answered before the access has ended": Broken(
        FOR_EVER, {(D.OPEN, DE.ACCESS_ENDING): Move(D.OPEN, ())}, world=HUNG_WITH_ACCESS
    ),
    "not answered even then": Broken(
        FOR_EVER, {(D.OPEN, DE.ACCESS_ENDING): Move(D.REVOKING, (DF.QUARANTINE_PAGES,))}, world=LINGERING
    ),
    "answered again when the access has ended": Broken(
        "a request is answered twice",
        {(D.REVOKING, DE.REVOKED): Move(D.CLOSED, (DF.FREE_PAGES, DF.CLOSE, DF.ANSWER_FAILED))},
        world=LINGERING,
    ),
    "a ticket outlives the access": Broken(
        "a ticket that is open is answered as over",
        {(D.REVOKING, DE.REVOKED): Move(D.REVOKING, ())},
        world=LINGERING,
    ),
    # the prefiller
    "acknowledged before the list is closed": Broken(
        PAGE,
        prefiller={(P.OPEN, PE.CANCEL): Move(P.ENDED, (PF.SEND_CANCEL_ACK, PF.CLOSE_LIST, PF.DROP_JOB, PF.END_LEASE))},
    ),
    "list left open on cancel": Broken(
        PAGE, prefiller={(P.SENDING, PE.CANCEL): Move(P.DRAINING, (PF.SEND_CANCEL_ACK,))}
    ),
    "source released on cancel": Broken(
        SOURCE_READ,
        prefiller={(P.SENDING, PE.CANCEL): Move(P.DONE, (PF.CLOSE_LIST, PF.RELEASE_SOURCE, PF.SEND_CANCEL_ACK))},
    ),
    "source released at the deadline": Broken(
        SOURCE_READ,
        prefiller={(P.SENDING, PE.DEADLINE): Move(P.DONE, (PF.CLOSE_LIST, PF.RELEASE_SOURCE, PF.SEND_FAILED))},
    ),
    "source released when the engine leaves": Broken(
        SOURCE_READ, prefiller={(P.ENDED, PE.ENGINE_LEFT): Move(P.DONE, (PF.RELEASE_SOURCE,))}
    ),
    "source released on a newer epoch": Broken(
        SOURCE_READ,
        prefiller={(P.SENDING, PE.NEWER_EPOCH): Move(P.DONE, (PF.CLOSE_LIST, PF.RELEASE_SOURCE))},
        world=REVOKE,
    ),
    "source released under a running step": Broken(
        SOURCE_WRITTEN, prefiller={(P.ENDED, PE.LIST_FAILED): Move(P.DONE, (PF.RELEASE_SOURCE,))}
    ),
    "source released under the step that ends it": Broken(
        SOURCE_WRITTEN, prefiller={(P.OPEN, PE.LIST_DONE): Move(P.DONE, (PF.RELEASE_SOURCE, PF.SEND_CLOSED))}
    ),
    "source released under a running step when the target exits": Broken(
        SOURCE_WRITTEN,
        prefiller={(P.OPEN, PE.TARGET_EXITED): Move(P.DONE, (PF.DROP_JOB, PF.END_LEASE, PF.RELEASE_SOURCE))},
        world=DECODER_DEATH,
    ),
    "source kept for ever": Broken(FOR_EVER, prefiller={(P.SETTLED, PE.ENGINE_LEFT): Move(P.DONE, (PF.END_LEASE,))}),
    "lease kept for ever": Broken(FOR_EVER, prefiller={(P.OPEN, PE.ENGINE_LEFT): Move(P.SENDING, ())}),
    "failure not told": Broken(
        FOR_EVER,
        prefiller={(P.OPEN, PE.STEP_FAILED): Move(P.ENDED, (PF.CLOSE_LIST, PF.DROP_JOB, PF.END_LEASE))},
        world=replace(UNATTENDED, num_faults=1, faults=frozenset({"failed step"})),
    ),
    "second copy of a Prefill refused": Broken(
        PAGE, prefiller={(P.OPEN, PE.PREFILL_STALE): Move(P.OPEN, (PF.SEND_REFUSED,))}, world=DOUBLED_MESSAGE
    ),
    "second copy of a Prefill run": Broken(
        "a ticket runs twice",
        prefiller={(P.OPEN, PE.PREFILL_STALE): Move(P.OPEN, (PF.START_JOB,))},
        world=DOUBLED_MESSAGE,
    ),
    "second copy of a refused Prefill run": Broken(
        PAGE,
        prefiller={(P.DONE, PE.PREFILL_STALE): Move(P.OPEN, (PF.OPEN_LIST, PF.START_JOB))},
        world=NO_ROOM,
    ),
    "second copy of a Prefill told that it failed": Broken(
        PAGE, prefiller={(P.OPEN, PE.PREFILL_STALE): Move(P.OPEN, (PF.SEND_FAILED,))}
    ),
    "second copy of a Prefill told that it failed, after the engine left": Broken(
        PAGE, prefiller={(P.SENDING, PE.PREFILL_STALE): Move(P.SENDING, (PF.SEND_FAILED,))}
    ),
    "second copy of a Prefill that is done refused": Broken(
        ACCUSED, prefiller={(P.DONE, PE.PREFILL_STALE): Move(P.DONE, (PF.END_LEASE, PF.SEND_REFUSED))}
    ),
    "second copy of a Prefill whose list was cut short refused": Broken(
        ACCUSED, prefiller={(P.ENDED, PE.PREFILL_STALE): Move(P.ENDED, (PF.SEND_REFUSED,))}
    ),
    "second copy of a Prefill that is draining answered with Closed": Broken(
        ACCUSED,
        prefiller={(P.DRAINING, PE.PREFILL_STALE): Move(P.DRAINING, (PF.SEND_CLOSED,))},
    ),
    "answer not repeated": Broken(
        FOR_EVER,
        prefiller={(P.DONE, PE.PREFILL_STALE): Move(P.DONE, (PF.END_LEASE,))},
        world=replace(UNATTENDED, num_faults=2, faults=LOST | {"no room"}),
    ),
    "tombstone without num_posted": Broken(ACCUSED, world=replace(NO_PATIENCE, tombstones_keep_answers=False)),
    "an older use of a slot remembered over a newer one": Broken(
        ACCUSED,  # not run twice, but only because the lease is used
        prefiller={(P.UNSEEN, PE.PREFILL_STALE): Move(P.DONE, (PF.REMEMBER, PF.END_LEASE, PF.SEND_REFUSED))},
        world=replace(TWO_TICKETS, num_faults=0, tombstones_keep_newest=False),
    ),
    "a ticket that looks old left without an answer": Broken(
        FOR_EVER,
        prefiller={(P.UNSEEN, PE.PREFILL_STALE): Move(P.UNSEEN, (PF.END_LEASE,))},
        world=replace(TWO_TICKETS, num_faults=0, order_wrapped=True),
    ),
    "Closed sent for a list that was cut short": Broken(
        ACCUSED,
        prefiller={(P.ENDED, PE.LIST_FAILED): Move(P.SETTLED, (PF.SEND_CLOSED,))},
    ),
    "no tombstone for an unseen ticket": Broken(
        PAGE, prefiller={(P.UNSEEN, PE.CANCEL): Move(P.UNSEEN, (PF.SEND_CANCEL_ACK,))}
    ),
    "no tombstone for a refused ticket": Broken(
        PAGE, prefiller={(P.UNSEEN, PE.REFUSE): Move(P.UNSEEN, (PF.SEND_REFUSED,))}, world=NO_ROOM
    ),
    "list closed after it was told done": Broken(
        "close_transfer after its TransferDone was taken",
        prefiller={(P.SETTLED, PE.CANCEL): Move(P.SETTLED, (PF.CLOSE_LIST, PF.SEND_CANCEL_ACK))},
    ),
    # the fabric: what was measured on it before the design
    "only the registration is closed": Broken(PAGE, world=replace(HALVES, revoke_stops_halves=False)),
    "access that lingers taken for ended": Broken(PAGE, world=replace(LINGERING, revoke_says_so=False)),
    "a restarted process takes its predecessor's key": Broken(
        "a write lands in a process that never asked for it",
        world=replace(TWO_TICKETS, faults=frozenset({"decoder death"}), restart=True, fresh_keys=False),
    ),
    "a write that failed is posted again": Broken(
        "a write is posted twice", world=replace(ERROR, errors_are_final=False)
    ),
    "a slot comes back with its old generation": Broken(
        "a foreign counter moved",
        world=replace(TWO_TICKETS, faults=frozenset({"revoke"}), next_generation=False),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_finds(name: str) -> None:
    broken = BROKEN[name]
    settings = replace(
        broken.world,
        decoder={**DECODER, **(broken.decoder or {})},
        prefiller={**PREFILLER, **(broken.prefiller or {})},
    )
    report = explore(settings)
    assert broken.says in report.broken, str(report)
    assert report.trace


def is_part_of(world: Settings, whole: Settings) -> bool:
    """With fewer faults it has no state and no move that the whole has not; the fair moves are the same."""
    is_smaller = world.num_faults <= whole.num_faults and world.faults <= whole.faults
    return is_smaller and replace(world, num_faults=whole.num_faults, faults=whole.faults) == whole


def test_the_worlds_of_the_broken_tables_are_sound_with_the_real_ones() -> None:
    worlds: list[Settings] = []
    for broken in BROKEN.values():
        is_known = any(is_part_of(broken.world, whole) for whole in (*WORLDS.values(), *worlds))
        if (broken.decoder or broken.prefiller) and not is_known:
            worlds.append(broken.world)
    assert worlds
    for world in worlds:
        report = explore(world)
        assert not report.broken, f"{world}\n{report}"
