"""The life of a ticket, once for each side, as tables: (state, event) -> next state and the effects to carry out.

Owns no state and does nothing: the messenger's loop looks a move up, stores the new state, then carries out the
effects in order. What a decision hangs on beside the state (counts, generations) is turned into an event by the small
functions at the end. The tables are total: an event that changes nothing stands in `idle`, so none is forgotten.

    decoder                 Reached          digests equal
        NEW --> OPEN -----------------> VERIFYING ------------> CLOSED    the request owns the pages
                 |  `--- Failed, lost       `---- differ, -----> CLOSED    the pages are free: everything has landed
                 | cancel           |              cancel
                 v       CancelAck  v     Reached at num_posted
             CANCELLING ---------> DRAINING ------------------> CLOSED    the pages are free: nothing more can land

      and from each of these, once the peer is revoked and its access
                            has ended -------------------------> CLOSED    the pages are free: nothing more can land
                            is ending ------> REVOKING --------> CLOSED    the same, as soon as it has ended

    prefiller               engine left          all written
        UNSEEN --> OPEN -----------------> SENDING ------------> DONE      a list that was posted whole
                    |                         |
                    | cancel, failed step,    | cancel, deadline,
                    | deadline, newer epoch   | newer epoch
                    v       engine left       v  all written
                  ENDED -----------------> DRAINING -----------> DONE      a list that was closed early
                    |                                             ^
                    '-----> SETTLED ------------------------------'        all written before the engine left
                 all written              engine left                      (from OPEN too)

What the tables rely on. `close_transfer` and `fail_step` are done when they return, and so is a `revoke` that says so;
of any other the end is told, which may be never while the peer hangs. A batch of fabric events is applied with its
TransferDone first: CLOSE_LIST must not meet a transfer whose result was drained already. A failed step is told as
STEP_FAILED, then ENGINE_LEFT. Tickets are looked up by decoder, epoch and imm; what comes for one that is not known is
dropped, but at a prefiller it is UNSEEN for Prefill, and for Cancel unless a newer use of the slot is remembered. Per
slot the newest generation is remembered with its num_posted and its last answer, which bounds the tombstones.
"""

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

# ---- the decoder's side ----------------------------------------------------------------------------------------


class DecoderState(Enum):
    NEW = auto()  # slot and pages taken, nobody knows of it
    OPEN = auto()  # counter armed, Prefill sent
    VERIFYING = auto()  # everything has landed, digests are being compared
    CANCELLING = auto()  # answered, pages quarantined, num_posted not known
    DRAINING = auto()  # answered, pages quarantined until arrivals == num_posted
    REVOKING = auto()  # answered, pages quarantined until the peer's access has ended; counts are void
    CLOSED = auto()  # counter disarmed, slot given back; what still comes for it is ignored


class DecoderEvent(Enum):
    OPENED = auto()  # the request was accepted: slot and pages are taken
    REACHED = auto()  # the armed target is met
    DIGESTS_EQUAL = auto()
    DIGESTS_DIFFER = auto()  # or the aux header is another ticket's
    CANCEL = auto()  # abort, or the request's deadline
    TOLD = auto()  # num_posted learnt from Failed, CancelAck, or Refused (which says 0)
    TOLD_AGAIN = auto()  # the num_posted that is known already
    CLOSED_TOLD = auto()  # the prefiller says that everything was posted and completed
    CONTRADICTED = auto()  # the peer broke the rules of counting
    LOST_TIMER = auto()  # the time from CLOSED_TOLD to Reached is over
    REPEAT_TIMER = auto()  # no answer for a while: what was sent may be lost
    PATIENCE = auto()  # the time for CancelAck, or for the drain, is over
    ACCESS_ENDING = auto()  # the peer is revoked, for whichever ticket's sake, but may write on until REVOKED
    REVOKED = auto()  # no write of the peer can land any more, for whichever ticket's sake


class DecoderEffect(Enum):
    ARM = auto()
    SEND_PREFILL = auto()
    SEND_CANCEL = auto()
    RETARGET = auto()  # the counter to num_posted
    START_DIGESTS = auto()  # check the aux header, and the digests where that is on: DIGESTS_EQUAL or _DIFFER follows
    START_LOST_TIMER = auto()  # once: a repeated Closed does not prolong it
    START_PATIENCE = auto()  # or start it anew
    STOP_TIMERS = auto()
    SUSPECT_LINK = auto()  # count bytes that came wrong or not at all
    QUARANTINE_PAGES = auto()  # neither the request's nor free
    KEEP_PAGES = auto()  # the request owns them
    FREE_PAGES = auto()  # safe to reuse from here on
    REVOKE_PEER = auto()  # revoke, then REVOKED or ACCESS_ENDING for every open ticket of the peer, this one too
    CLOSE = auto()  # stop timers, disarm, give the slot back (with the next generation)
    ANSWER_READY = auto()
    ANSWER_FAILED = auto()


# ---- the prefiller's side --------------------------------------------------------------------------------------


class PrefillerState(Enum):
    UNSEEN = auto()
    OPEN = auto()  # list open, the engine has the job
    SENDING = auto()  # the engine has left, the list is not done
    ENDED = auto()  # list closed early (num_posted is final), writes outstanding, the engine has not left
    DRAINING = auto()  # list closed early, writes outstanding, the engine has left
    SETTLED = auto()  # every posted write has completed, the engine has not left
    DONE = auto()  # everything given back: the tombstone


class PrefillerEvent(Enum):
    PREFILL = auto()  # a new ticket; its lease is used and its source pages are taken
    REFUSE = auto()  # a new ticket that cannot be run: no lease, no room, too long, malformed
    PREFILL_STALE = auto()  # a ticket that is not newer than what is remembered of its slot, or of an older epoch
    CANCEL = auto()
    STEP_FAILED = auto()  # a step with this ticket failed, or the engine gave the job up
    DEADLINE = auto()
    LIST_DONE = auto()  # every write was posted and completed
    LIST_FAILED = auto()  # every posted write has completed; some in error, or some were never posted
    ENGINE_LEFT = auto()  # no running or later step touches the source pages
    NEWER_EPOCH = auto()  # the decoder revoked us and said Hello again
    TARGET_EXITED = auto()  # the decoder's process is gone and `remove_peer` returned


class PrefillerEffect(Enum):
    REMEMBER = auto()  # the slot's newest generation is this one; num_posted 0 until a list is open
    OPEN_LIST = auto()
    START_JOB = auto()
    DROP_JOB = auto()  # the engine is to forget it; ENGINE_LEFT follows when no running step has it
    CLOSE_LIST = auto()  # nothing more is posted; yields num_posted
    END_LEASE = auto()
    RELEASE_SOURCE = auto()
    SEND_REFUSED = auto()
    SEND_FAILED = auto()
    SEND_CANCEL_ACK = auto()
    SEND_CLOSED = auto()
    SEND_AGAIN = auto()  # the last of these, if one was sent


# ---- tables ----------------------------------------------------------------------------------------------------

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Effect = TypeVar("Effect", bound=Enum)


class Move(NamedTuple, Generic[State, Effect]):  # a tuple, because a table's rows read better without keywords
    state: State
    effects: tuple[Effect, ...]


DecoderMove = Move[DecoderState, DecoderEffect]
PrefillerMove = Move[PrefillerState, PrefillerEffect]


def _table(
    moves: Mapping[State, Mapping[Event, Move[State, Effect]]], idle: Mapping[State, tuple[Event, ...]]
) -> Mapping[tuple[State, Event], Move[State, Effect]]:
    """Flatten; every event of every state must be listed exactly once, as a move or as idle."""
    table: dict[tuple[State, Event], Move[State, Effect]] = {}
    for state, of_state in moves.items():
        assert not set(of_state) & set(idle[state]), f"{state}: an event both moves and idles"
        table.update({(state, event): move for event, move in of_state.items()})
        table.update({(state, event): Move(state, ()) for event in idle[state]})
    return MappingProxyType(table)


def _decoder_table() -> Mapping[tuple[DecoderState, DecoderEvent], DecoderMove]:
    S, E, F = DecoderState, DecoderEvent, DecoderEffect  # noqa: N806, short so that a row fits a line
    ready = Move(S.CLOSED, (F.KEEP_PAGES, F.CLOSE, F.ANSWER_READY))
    # The pages are back before the answer is given, so that a retry finds them.
    failed = Move(S.CLOSED, (F.FREE_PAGES, F.CLOSE, F.ANSWER_FAILED))
    wrong = Move(S.CLOSED, (F.SUSPECT_LINK, F.FREE_PAGES, F.CLOSE, F.ANSWER_FAILED))
    freed = Move(S.CLOSED, (F.FREE_PAGES, F.CLOSE))
    waits = Move(S.REVOKING, (F.STOP_TIMERS,))
    failed_waits = Move(S.REVOKING, (F.STOP_TIMERS, F.QUARANTINE_PAGES, F.ANSWER_FAILED))
    moves = {
        S.NEW: {
            # Armed first: the peer must not know an imm that nobody counts.
            E.OPENED: Move(S.OPEN, (F.ARM, F.SEND_PREFILL)),
            E.CANCEL: failed,
            E.ACCESS_ENDING: failed,
            E.REVOKED: failed,
        },
        S.OPEN: {
            E.REACHED: Move(S.VERIFYING, (F.START_DIGESTS,)),
            E.CANCEL: Move(S.CANCELLING, (F.QUARANTINE_PAGES, F.SEND_CANCEL, F.START_PATIENCE, F.ANSWER_FAILED)),
            E.TOLD: Move(S.DRAINING, (F.QUARANTINE_PAGES, F.RETARGET, F.START_PATIENCE, F.ANSWER_FAILED)),
            E.CLOSED_TOLD: Move(S.OPEN, (F.START_LOST_TIMER,)),
            E.REPEAT_TIMER: Move(S.OPEN, (F.SEND_PREFILL,)),
            E.LOST_TIMER: Move(S.DRAINING, (F.SUSPECT_LINK, F.QUARANTINE_PAGES, F.START_PATIENCE, F.ANSWER_FAILED)),
            E.CONTRADICTED: Move(S.OPEN, (F.REVOKE_PEER,)),
            E.ACCESS_ENDING: failed_waits,
            E.REVOKED: failed,
        },
        S.VERIFYING: {
            E.DIGESTS_EQUAL: ready,
            E.DIGESTS_DIFFER: wrong,
            E.CANCEL: failed,  # all that can be posted has landed: nothing to tell, nothing to wait for
            E.CONTRADICTED: Move(S.VERIFYING, (F.REVOKE_PEER,)),
            E.ACCESS_ENDING: failed_waits,  # all has landed, but a peer that breaks the rules may write more
            E.REVOKED: failed,
        },
        S.CANCELLING: {
            E.REACHED: freed,  # `expected` arrived before the peer saw the Cancel: there is nothing beyond it
            E.TOLD: Move(S.DRAINING, (F.RETARGET, F.START_PATIENCE)),
            E.TOLD_AGAIN: Move(S.DRAINING, (F.START_PATIENCE,)),
            E.CLOSED_TOLD: Move(S.DRAINING, (F.START_PATIENCE,)),  # the counter stands at `expected` already
            E.CONTRADICTED: Move(S.CANCELLING, (F.REVOKE_PEER,)),
            E.REPEAT_TIMER: Move(S.CANCELLING, (F.SEND_CANCEL,)),
            E.PATIENCE: Move(S.CANCELLING, (F.REVOKE_PEER,)),
            E.ACCESS_ENDING: waits,
            E.REVOKED: freed,
        },
        S.DRAINING: {
            E.REACHED: freed,
            E.CONTRADICTED: Move(S.DRAINING, (F.REVOKE_PEER,)),
            E.PATIENCE: Move(S.DRAINING, (F.REVOKE_PEER,)),
            E.ACCESS_ENDING: waits,
            E.REVOKED: freed,
        },
        S.REVOKING: {E.REVOKED: freed},
        S.CLOSED: {},
    }
    idle = {
        S.NEW: tuple(e for e in E if e not in (E.OPENED, E.CANCEL, E.ACCESS_ENDING, E.REVOKED)),
        S.OPEN: (E.OPENED, E.DIGESTS_EQUAL, E.DIGESTS_DIFFER, E.TOLD_AGAIN, E.PATIENCE),
        S.VERIFYING: (
            E.OPENED,
            E.REACHED,
            E.TOLD,  # would be CONTRADICTED: num_posted is known from Reached on
            E.TOLD_AGAIN,
            E.CLOSED_TOLD,
            E.REPEAT_TIMER,
            E.LOST_TIMER,
            E.PATIENCE,
        ),
        S.CANCELLING: (E.OPENED, E.DIGESTS_EQUAL, E.DIGESTS_DIFFER, E.CANCEL, E.LOST_TIMER),
        S.DRAINING: (
            E.OPENED,
            E.DIGESTS_EQUAL,
            E.DIGESTS_DIFFER,
            E.CANCEL,
            E.TOLD,
            E.TOLD_AGAIN,
            E.CLOSED_TOLD,
            E.REPEAT_TIMER,
            E.LOST_TIMER,
        ),
        S.REVOKING: tuple(e for e in E if e is not E.REVOKED),
        S.CLOSED: tuple(E),
    }
    return _table(moves, idle)


def _prefiller_table() -> Mapping[tuple[PrefillerState, PrefillerEvent], PrefillerMove]:
    S, E, F = PrefillerState, PrefillerEvent, PrefillerEffect  # noqa: N806
    acknowledge = (F.SEND_CANCEL_ACK,)  # idempotent: the same num_posted as often as it is asked for
    again = (F.SEND_AGAIN,)  # a decoder that asks again may have missed the answer
    stop = (F.CLOSE_LIST, F.DROP_JOB, F.END_LEASE)
    moves = {
        S.UNSEEN: {
            E.PREFILL: Move(S.OPEN, (F.REMEMBER, F.OPEN_LIST, F.START_JOB)),
            # Remembered: a second copy of this Prefill must not find room after the decoder reused the pages.
            E.REFUSE: Move(S.DONE, (F.REMEMBER, F.END_LEASE, F.SEND_REFUSED)),
            # Its slot or epoch has gone on, so the decoder has closed it; or the serial order of generations wrapped.
            E.PREFILL_STALE: Move(S.UNSEEN, (F.END_LEASE, F.SEND_REFUSED)),
            E.CANCEL: Move(S.DONE, (F.REMEMBER, F.SEND_CANCEL_ACK)),
        },
        S.OPEN: {
            E.CANCEL: Move(S.ENDED, (*stop, F.SEND_CANCEL_ACK)),
            E.STEP_FAILED: Move(S.ENDED, (*stop, F.SEND_FAILED)),
            E.DEADLINE: Move(S.ENDED, (*stop, F.SEND_FAILED)),
            E.NEWER_EPOCH: Move(S.ENDED, stop),
            E.LIST_DONE: Move(S.SETTLED, (F.SEND_CLOSED,)),
            E.LIST_FAILED: Move(S.SETTLED, (F.DROP_JOB, F.END_LEASE, F.SEND_FAILED)),
            E.TARGET_EXITED: Move(S.SETTLED, (F.DROP_JOB, F.END_LEASE)),
            E.ENGINE_LEFT: Move(S.SENDING, (F.END_LEASE,)),
        },
        S.SENDING: {
            E.CANCEL: Move(S.DRAINING, (F.CLOSE_LIST, F.SEND_CANCEL_ACK)),
            E.DEADLINE: Move(S.DRAINING, (F.CLOSE_LIST, F.SEND_FAILED)),
            E.NEWER_EPOCH: Move(S.DRAINING, (F.CLOSE_LIST,)),
            E.LIST_DONE: Move(S.DONE, (F.RELEASE_SOURCE, F.SEND_CLOSED)),
            E.LIST_FAILED: Move(S.DONE, (F.RELEASE_SOURCE, F.SEND_FAILED)),
            E.TARGET_EXITED: Move(S.DONE, (F.RELEASE_SOURCE,)),
        },
        S.ENDED: {
            E.PREFILL_STALE: Move(S.ENDED, again),
            E.CANCEL: Move(S.ENDED, acknowledge),
            E.LIST_DONE: Move(S.SETTLED, ()),
            E.LIST_FAILED: Move(S.SETTLED, ()),
            E.TARGET_EXITED: Move(S.SETTLED, ()),
            E.ENGINE_LEFT: Move(S.DRAINING, ()),
        },
        S.DRAINING: {
            E.PREFILL_STALE: Move(S.DRAINING, again),
            E.CANCEL: Move(S.DRAINING, acknowledge),
            E.LIST_DONE: Move(S.DONE, (F.RELEASE_SOURCE,)),
            E.LIST_FAILED: Move(S.DONE, (F.RELEASE_SOURCE,)),
            E.TARGET_EXITED: Move(S.DONE, (F.RELEASE_SOURCE,)),
        },
        S.SETTLED: {
            E.PREFILL_STALE: Move(S.SETTLED, again),
            E.CANCEL: Move(S.SETTLED, acknowledge),
            E.STEP_FAILED: Move(S.SETTLED, (F.DROP_JOB,)),  # with its last write completed: the decoder has all of it
            E.ENGINE_LEFT: Move(S.DONE, (F.END_LEASE, F.RELEASE_SOURCE)),
        },
        S.DONE: {
            E.CANCEL: Move(S.DONE, acknowledge),
            E.PREFILL_STALE: Move(S.DONE, (F.END_LEASE, F.SEND_AGAIN)),
        },
    }
    starts = (E.PREFILL, E.REFUSE)  # a second copy is stale, whatever its lease
    idle = {
        S.UNSEEN: (
            E.STEP_FAILED,
            E.DEADLINE,
            E.LIST_DONE,
            E.LIST_FAILED,
            E.ENGINE_LEFT,
            E.NEWER_EPOCH,
            E.TARGET_EXITED,
        ),
        S.OPEN: (*starts, E.PREFILL_STALE),  # never Refused here: the first copy is running
        S.SENDING: (*starts, E.PREFILL_STALE, E.STEP_FAILED, E.ENGINE_LEFT),
        S.ENDED: (*starts, E.STEP_FAILED, E.DEADLINE, E.NEWER_EPOCH),
        S.DRAINING: (*starts, E.STEP_FAILED, E.DEADLINE, E.NEWER_EPOCH, E.ENGINE_LEFT),
        S.SETTLED: (
            *starts,
            E.DEADLINE,
            E.LIST_DONE,
            E.LIST_FAILED,
            E.NEWER_EPOCH,
            E.TARGET_EXITED,
        ),
        S.DONE: tuple(e for e in E if e not in (E.CANCEL, E.PREFILL_STALE)),
    }
    return _table(moves, idle)


DECODER = _decoder_table()
PREFILLER = _prefiller_table()


# ---- guards: what the state alone does not say, as events ------------------------------------------------------


def reached(*, arrivals: int, target: int) -> DecoderEvent:
    """The event of Reached. `target` is the counter's newest, which a Reached from before a retarget may miss."""
    # Targets only sink, so a miss means more arrivals than writes.
    return DecoderEvent.REACHED if arrivals == target else DecoderEvent.CONTRADICTED


def told(*, num_posted: int, known: int | None, expected: int) -> DecoderEvent:
    """The event of Failed, CancelAck, or Refused (with num_posted 0). `known` is num_posted as far as the decoder
    knows it: by an earlier message, or `expected` once that many arrived."""
    if num_posted > expected or known not in (None, num_posted):
        return DecoderEvent.CONTRADICTED
    return DecoderEvent.TOLD if known is None else DecoderEvent.TOLD_AGAIN


def closed(*, num_posted: int, known: int | None, expected: int) -> DecoderEvent:
    """The event of Closed, which is only sent when everything was posted."""
    if num_posted != expected or known not in (None, expected):
        return DecoderEvent.CONTRADICTED
    return DecoderEvent.CLOSED_TOLD


def prefill(*, is_new: bool, may_run: bool) -> PrefillerEvent:
    """The event of Prefill. `is_new`: of the current epoch, and newer than what is remembered of its slot. It is
    asked first: a second copy finds its lease used, and Refused would free pages that the first one writes."""
    if not is_new:
        return PrefillerEvent.PREFILL_STALE
    return PrefillerEvent.PREFILL if may_run else PrefillerEvent.REFUSE


def list_done(*, complete: bool, num_failed: int) -> PrefillerEvent:
    """The event of TransferDone."""
    return PrefillerEvent.LIST_DONE if complete and num_failed == 0 else PrefillerEvent.LIST_FAILED
