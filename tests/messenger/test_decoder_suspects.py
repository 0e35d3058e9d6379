"""A prefiller that nobody but the fabric sees go: its connection breaks, or it is silent. No role tells anything here,
and no pid is watched, as with a prefiller of another host."""

from collections.abc import Callable

import pytest
from decoder_pair import NUM_PAGES, Pair
from test_decoder_exits import REASONS, States, state_cancelling, state_draining, state_open

from headrace.fabric.interface import PeerHeard, PeerId, PeerLost, PeerSilent
from headrace.messenger.known_prefillers import LONGEST_REPEAT_S
from headrace.messenger.outcomes import PeerReady, Ready
from headrace.testing import Revocation

Act = Callable[[Pair], None]
SILENCE_S = 1.0  # before any patience is over
LOST_TEXT = "the prefiller is gone: its control connection ended"
SILENT_TEXT = "the prefiller does not answer: it is silent"

# One whose digests are compared waits for nobody.
in_every_state_that_waits = pytest.mark.parametrize(
    "state", [state_open, state_cancelling, state_draining], ids=lambda state: state.__name__
)


@pytest.fixture
def pair() -> Pair:
    return Pair(silence_s=SILENCE_S)


def lost(pair: Pair) -> PeerLost:
    return PeerLost(peer=pair.peer, code=104, text="its control connection ended")


def tell(pair: Pair, *events: PeerLost | PeerSilent | PeerHeard) -> None:
    """What the fabric of the decoder may say at any time, rightly or not."""
    pair.decoder.messenger.handle(events, pair.site.now)
    pair.deliver()


def cut(pair: Pair) -> None:
    pair.site.network.cut(pair.decoder.fabric, pair.prefiller.fabric)


def heal(pair: Pair) -> None:
    pair.site.network.heal(pair.decoder.fabric, pair.prefiller.fabric)


def hang(pair: Pair) -> None:
    pair.site.network.hang(pair.prefiller.fabric)


def wake(pair: Pair) -> None:
    pair.site.network.wake(pair.prefiller.fabric)


# ---- silence ---------------------------------------------------------------------------------------------------


@in_every_state_that_waits
@pytest.mark.parametrize(("stop", "go_on"), [(cut, heal), (hang, wake)], ids=["cut", "hung"])
def test_a_ticket_of_a_silent_prefiller_fails_long_before_its_deadline_and_it_is_served_again_when_heard(
    stop: Act, go_on: Act, state: States, pair: Pair
) -> None:
    request, prefill = pair.open(remaining_s=600.0)
    state(pair, prefill)
    stop(pair)
    pair.prefiller.write(prefill, 4)  # under way until it goes on
    pair.pass_time(0.9 * SILENCE_S)
    assert pair.suspected == []
    pair.pass_time(0.1 * SILENCE_S)
    answer = pair.answer_of(request)
    assert answer.reason == REASONS[state]
    assert answer.reason != "peer_lost" or answer.text == SILENT_TEXT
    assert (pair.num_quarantined, len(pair.suspected)) == (0, 1)
    pair.decoder.finish(request)
    pair.pass_time(60.0)
    go_on(pair)
    pair.deliver()
    pair.decoder.pool.look()
    pair.next_epoch_works()
    assert len([o for o in pair.decoder.outcomes if isinstance(o, PeerReady)]) == 2
    pair.everything_is_back()


@pytest.mark.parametrize("revocation", ["at once", "when let go"])
def test_a_prefiller_that_is_taken_for_silent_wrongly_costs_its_tickets_and_nothing_else(
    revocation: Revocation,
) -> None:
    pair = Pair(revocation=revocation)
    request, prefill = pair.open()
    pair.prefiller.write(prefill, 5)
    tell(pair, PeerSilent(peer=pair.peer), PeerHeard(peer=pair.peer))
    assert pair.answer_of(request).reason == "peer_lost"
    pair.next_epoch_works()
    assert len(pair.suspected) == 1
    pair.everything_is_back()


def test_one_that_is_heard_again_was_greeted_meanwhile_and_nothing_more_follows(pair: Pair) -> None:
    request, prefill = pair.open()
    tell(pair, PeerHeard(peer=pair.peer))
    assert (request.answers, pair.decoder.messenger.is_ready(pair.peer)) == ([], True)
    pair.write_all(prefill)
    assert isinstance(request.answers[0], Ready)
    pair.everything_is_back()


def test_silence_changes_nothing_while_access_is_ending_and_the_pages_wait_for_its_end() -> None:
    pair = Pair(revocation="when let go", silence_s=SILENCE_S)
    request, _ = pair.open()
    hang(pair)
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    assert (pair.num_quarantined, pair.statistics.num_revoking) == (NUM_PAGES, 1)
    pair.pass_time(10 * SILENCE_S)
    tell(pair, PeerSilent(peer=pair.peer), lost(pair), PeerHeard(peer=pair.peer))
    assert (pair.num_quarantined, pair.statistics.num_revoking) == (NUM_PAGES, 1)
    assert (len(pair.suspected), pair.statistics.num_revokes) == (1, 1)
    assert pair.answer_of(request).text == "the prefiller does not answer"
    wake(pair)
    pair.deliver()
    assert pair.num_quarantined == 0
    pair.next_epoch_works()
    pair.everything_is_back()


def test_a_prefiller_that_beats_and_writes_nothing_is_waited_for_until_the_deadline(pair: Pair) -> None:
    request, prefill = pair.open(remaining_s=20 * SILENCE_S)
    for _ in range(19):
        pair.pass_time(SILENCE_S)
    assert request.answers == []
    pair.pass_time(SILENCE_S)
    assert pair.answer_of(request).reason == "deadline"
    pair.write(prefill, 0)
    assert pair.suspected == []


# ---- broken connections ----------------------------------------------------------------------------------------


@in_every_state_that_waits
def test_the_tickets_of_a_killed_prefiller_end_as_soon_as_its_connection_breaks(state: States, pair: Pair) -> None:
    request, prefill = pair.open(remaining_s=600.0)
    state(pair, prefill)
    pair.prefiller.write(prefill, 4)  # under way
    pair.site.network.kill(pair.prefiller.fabric)
    pair.pass_time(pair.site.network.faults.death_noticed_s[1])
    answer = pair.answer_of(request)
    assert answer.reason == REASONS[state]
    assert answer.reason != "peer_lost" or answer.text == LOST_TEXT
    assert (pair.num_quarantined, len(pair.suspected)) == (0, 1)
    pair.decoder.finish(request)
    pair.deliver()
    pair.decoder.pool.look()
    pair.decoder.messenger.peer_exited(pair.peer, pair.site.now)  # where a role learns it, too
    assert pair.decoder.messenger.next_due() is None
    pair.everything_is_back()


def test_a_prefiller_that_is_gone_for_good_is_greeted_ever_so_often_and_no_ticket_is_opened_there(pair: Pair) -> None:
    pair.open()
    pair.site.network.kill(pair.prefiller.fabric)
    pair.pass_time(1.0)
    before, begin = pair.decoder.fabric.statistics(), pair.site.now
    for _ in range(60):  # then it is forgotten
        due = pair.decoder.messenger.next_due()
        assert due is not None
        assert due - pair.site.now <= LONGEST_REPEAT_S
        pair.pass_time(due - pair.site.now)
    assert pair.site.now - begin > 50 * LONGEST_REPEAT_S, "greeted in haste"
    assert pair.decoder.fabric.statistics().num_messages_sent - before.num_messages_sent <= 60
    request = pair.decoder.reserve("b", tuple(range(9)))
    assert request is not None
    assert pair.decoder.open(request, pair.peer, "lease") is None
    assert pair.statistics.num_revokes == 1


def test_a_connection_that_breaks_twice_and_one_that_several_tell_of_costs_one_revoke(pair: Pair) -> None:
    request, _ = pair.open()
    tell(pair, lost(pair), lost(pair), PeerSilent(peer=pair.peer))
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    tell(pair, lost(pair))
    assert pair.answer_of(request).text == LOST_TEXT
    assert (len(pair.suspected), pair.statistics.num_revokes) == (1, 1)
    pair.next_epoch_works()
    again, _ = pair.open(name="again")
    tell(pair, lost(pair))  # and this is another one
    assert pair.answer_of(again).text == LOST_TEXT
    assert pair.statistics.num_revokes == 2
    pair.prefiller.answer()
    pair.deliver()
    assert pair.decoder.messenger.is_ready(pair.peer)
    pair.everything_is_back()


def test_what_is_told_after_an_exit_or_of_an_unknown_peer_matters_to_nobody(pair: Pair) -> None:
    request, _ = pair.open()
    tell(pair, PeerLost(peer=PeerId(99), code=104, text=""), PeerSilent(peer=PeerId(99)), PeerHeard(peer=PeerId(99)))
    assert (request.answers, pair.suspected) == ([], [])
    pair.decoder.messenger.peer_exited(pair.peer, pair.site.now)
    tell(pair, lost(pair), PeerSilent(peer=pair.peer))
    assert pair.answer_of(request).text == "the prefiller has exited"
    assert (pair.suspected, pair.decoder.messenger.next_due()) == ([], None)
    pair.everything_is_back()


def test_only_the_tickets_of_that_prefiller_fail(pair: Pair) -> None:
    request, _ = pair.open()
    gone_peer, gone = pair.peer, pair.prefiller
    pair.prefiller, pair.peer = pair.another_prefiller()
    other, prefill = pair.open(tuple(range(9)), name="other")
    pair.site.network.cut(pair.decoder.fabric, gone.fabric)
    pair.pass_time(SILENCE_S)
    assert pair.answer_of(request).reason == "peer_lost"
    assert [outcome.peer for outcome in pair.suspected] == [gone_peer]
    pair.write_all(prefill)
    assert isinstance(other.answers[0], Ready)
    pair.everything_is_back()
