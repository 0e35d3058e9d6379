"""A prefiller that exits or hangs, as its decoder sees it; and what is due when."""

from collections.abc import Callable
from typing import Any

import pytest
from decoder_pair import EXPECTED, LAYERS, LOST_S, PATIENCE_S, REPEAT_S, Pair

from headrace.fabric.interface import Imm, PeerId
from headrace.messenger.outcomes import PeerReady, Ready
from headrace.protocol.messages import Failed, Prefill, TicketClosed


@pytest.fixture
def pair() -> Pair:
    return Pair()


# ---- exits and hangs -------------------------------------------------------------------------------------------


def state_open(pair: Pair, prefill: Prefill) -> None:
    pair.write(prefill, 3)


def state_verifying(pair: Pair, prefill: Prefill) -> None:
    pair.prefiller.write_all(prefill)
    while pair.decoder.fabric.statistics().num_arrivals < EXPECTED:
        pair.site.network.step()
    pair.decoder.turn()


def state_cancelling(pair: Pair, prefill: Prefill) -> None:
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.deliver()


def state_draining(pair: Pair, prefill: Prefill) -> None:
    pair.say(Failed, prefill, num_posted=5)


States = Callable[[Pair, Prefill], None]
REASONS: dict[States, str] = {
    state_open: "peer_lost",
    state_verifying: "peer_lost",
    state_cancelling: "cancelled",
    state_draining: "failed",
}
in_every_state = pytest.mark.parametrize("state", REASONS, ids=lambda state: state.__name__)


@in_every_state
def test_when_a_prefiller_exits_its_tickets_end_and_late_writes_land_nowhere(state: States, pair: Pair) -> None:
    request, prefill = pair.open()
    state(pair, prefill)
    pair.prefiller.write(prefill, 4)  # under way
    for _ in range(2):
        pair.decoder.messenger.peer_exited(pair.peer, pair.site.now)
    pair.decoder.turn()
    assert pair.answer_of(request).reason == REASONS[state]
    assert pair.num_quarantined == 0
    pair.decoder.finish(request)
    pair.deliver()
    pair.decoder.pool.look()
    assert not pair.decoder.messenger.is_ready(pair.peer)
    assert pair.decoder.fabric.statistics().num_peers_now == 0
    assert pair.decoder.messenger.next_due() is None
    pair.everything_is_back()


@in_every_state
def test_a_prefiller_that_hangs_is_revoked_and_greeted_until_it_wakes(state: States, pair: Pair) -> None:
    request, prefill = pair.open()
    state(pair, prefill)
    pair.site.network.hang(pair.prefiller.fabric)
    pair.prefiller.write(prefill, 4)  # posted when it wakes
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    pair.decoder.turn()
    assert pair.answer_of(request).reason == REASONS[state]
    assert pair.num_quarantined == 0
    assert len(pair.suspected) == 1, "revoked twice for one hang"
    pair.decoder.finish(request)
    for _ in range(5):
        pair.pass_time(10.0)
    pair.site.network.wake(pair.prefiller.fabric)
    pair.deliver()
    pair.decoder.pool.look()
    pair.next_epoch_works()
    assert len([o for o in pair.decoder.outcomes if isinstance(o, PeerReady)]) == 2
    pair.everything_is_back()


def test_what_an_unknown_peer_does_matters_to_nobody(pair: Pair) -> None:
    request, _ = pair.open()
    pair.decoder.messenger.peer_exited(PeerId(99), pair.site.now)
    pair.decoder.messenger.peer_hung(PeerId(99), pair.site.now)
    pair.deliver()
    assert (request.answers, pair.suspected) == ([], [])


def test_a_decoder_that_hangs_finds_on_waking_what_came_meanwhile(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.site.network.hang(pair.decoder.fabric)
    pair.prefiller.write_all(prefill)
    pair.deliver()
    assert request.answers == []
    pair.site.network.wake(pair.decoder.fabric)
    pair.deliver()
    assert isinstance(request.answers[0], Ready)
    pair.everything_is_back()


# ---- timers ----------------------------------------------------------------------------------------------------


def test_nothing_is_due_before_next_due_and_something_is_at_it(pair: Pair) -> None:
    """A lost write, a Prefill that is repeated, patience, and a Hello that is repeated, one after the other."""
    pair.open(remaining_s=9.0, name="deadline")
    _, lost = pair.open(tuple(range(9)), name="lost")
    pair.say(TicketClosed, lost, num_posted=2 * LAYERS + 1)

    def state() -> tuple[Any, ...]:
        fabric = pair.decoder.fabric.statistics()
        return pair.statistics, len(pair.decoder.outcomes), fabric.num_messages_sent

    dues: list[float] = []
    while len(dues) < 8:
        due = pair.decoder.messenger.next_due()
        assert due is not None
        before = state()
        pair.pass_time(due - pair.site.now - 1e-6)
        assert state() == before, f"something happened before {due}"
        assert pair.decoder.messenger.next_due() == due
        pair.pass_time(due - pair.site.now)
        assert state() != before, f"nothing happened at {due}"
        dues.append(round(due, 3))
    revoked = LOST_S + PATIENCE_S  # and everything of that peer with it, the other ticket's deadline too
    hellos = [round(revoked + after, 3) for after in (0.25, 0.75, 1.75, 3.75, 7.75)]
    assert dues == [LOST_S, REPEAT_S, revoked, *hellos]


def test_with_no_ticket_and_no_greeting_nothing_is_ever_due(pair: Pair) -> None:
    assert pair.decoder.messenger.next_due() is None
    _, prefill = pair.open(remaining_s=REPEAT_S / 2)
    assert pair.decoder.messenger.next_due() == pair.site.now + REPEAT_S / 2
    pair.write_all(prefill)
    assert pair.decoder.messenger.next_due() is None


@pytest.mark.parametrize(("state", "due"), [(state_verifying, 30.0), (state_draining, PATIENCE_S)])
def test_a_ticket_that_asks_for_nothing_any_more_repeats_nothing(state: States, due: float, pair: Pair) -> None:
    _, prefill = pair.open()
    state(pair, prefill)
    assert pair.decoder.messenger.next_due() == pair.site.now + due
