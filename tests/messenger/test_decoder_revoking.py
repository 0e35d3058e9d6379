"""A prefiller that is revoked while it has our memory mapped: its access ends when it lets go, and no page is used
before. It lets go when it is told, which it is not while it is stopped, and when it is gone."""

import pytest
from decoder_pair import EXPECTED, NUM_PAGES, PATIENCE_S, PROMPT, Pair
from kv_world import DecoderProcess, LoopbackSite, pool_layout
from puppet import PuppetPrefiller
from test_decoder_exits import REASONS, States, in_every_state

from headrace.errors import FabricError
from headrace.fabric.interface import Descriptor, Imm, MessageReceived, PeerId, Revoked
from headrace.messenger.known_prefillers import FIRST_REPEAT_S, FORGET_S
from headrace.messenger.outcomes import PeerReady, PeerRefused, Ready
from headrace.protocol.messages import CancelAck, Failed, Hello, HelloRefused, Prefill, Refused, TicketClosed, encode
from headrace.testing import Faults


@pytest.fixture
def pair() -> Pair:
    return Pair(revocation="when let go")


def stop(pair: Pair) -> None:
    """The prefiller stands still, and its heartbeats are missed."""
    pair.site.network.hang(pair.prefiller.fabric)
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    pair.deliver()


def go_on(pair: Pair) -> None:
    pair.site.network.wake(pair.prefiller.fabric)
    pair.deliver()


def num_hellos(pair: Pair) -> int:
    return len(pair.prefiller.heard(Hello))


# ---- tickets ---------------------------------------------------------------------------------------------------


@in_every_state
def test_a_ticket_is_answered_at_once_and_its_pages_come_back_when_the_prefiller_wakes(
    state: States, pair: Pair
) -> None:
    request, prefill = pair.open()
    state(pair, prefill)
    pair.prefiller.write(prefill, 4)  # posted when it wakes, if not before
    stop(pair)
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    assert pair.answer_of(request).reason == REASONS[state]
    assert (pair.num_quarantined, pair.statistics.num_revoking, len(pair.suspected)) == (NUM_PAGES, 1, 1)
    pair.decoder.finish(request)
    for _ in range(5):
        pair.pass_time(10.0)
    assert (pair.num_quarantined, pair.statistics.num_revoking) == (NUM_PAGES, 1)
    assert num_hellos(pair) == 1, "greeted anew while it may still write as before"
    go_on(pair)
    assert (pair.num_quarantined, pair.statistics.num_revoking) == (0, 0)
    pair.decoder.pool.look()
    pair.next_epoch_works()
    assert len([o for o in pair.decoder.outcomes if isinstance(o, PeerReady)]) == 2
    pair.everything_is_back()


@in_every_state
def test_when_the_prefiller_exits_meanwhile_everything_comes_back_at_once(state: States, pair: Pair) -> None:
    request, prefill = pair.open()
    state(pair, prefill)
    stop(pair)
    assert pair.num_quarantined == NUM_PAGES
    pair.site.network.kill(pair.prefiller.fabric)
    for _ in range(2):
        pair.decoder.messenger.peer_exited(pair.peer, pair.site.now)
    assert pair.num_quarantined == 0
    assert pair.answer_of(request).reason == REASONS[state]
    pair.deliver()
    assert pair.decoder.fabric.statistics().num_peers_now == 0
    assert pair.decoder.messenger.next_due() is None
    pair.everything_is_back()


def test_when_the_fabric_is_the_first_to_see_the_exit_the_pages_come_back_and_a_successor_is_greeted(
    pair: Pair,
) -> None:
    pair.open()
    stop(pair)
    pair.site.network.kill(pair.prefiller.fabric)
    pair.deliver()
    assert pair.num_quarantined == 0
    assert pair.decoder.messenger.next_due() == pair.site.now + FIRST_REPEAT_S
    pair.decoder.messenger.peer_exited(pair.peer, pair.site.now)
    assert pair.decoder.messenger.next_due() is None
    pair.everything_is_back()


def test_what_still_lands_is_counted_and_frees_nothing(pair: Pair) -> None:
    _, prefill = pair.open()
    pair.site.network.faults = Faults(delay_s=(1.0, 1.0))
    pair.prefiller.write_all(prefill)
    assert pair.site.network.step()  # posted
    stop(pair)
    pair.pass_time(1.0)
    assert pair.decoder.fabric.statistics().num_arrivals == EXPECTED
    assert pair.statistics.num_surplus == 0
    assert pair.num_quarantined == NUM_PAGES
    pair.decoder.pool.look()
    pair.site.network.faults = Faults()
    go_on(pair)
    pair.next_epoch_works()
    pair.everything_is_back()


@in_every_state
def test_nothing_is_due_while_access_is_ending(state: States, pair: Pair) -> None:
    _, prefill = pair.open()
    state(pair, prefill)
    assert pair.decoder.messenger.next_due() is not None
    stop(pair)
    assert pair.decoder.messenger.next_due() is None
    go_on(pair)
    pair.next_epoch_works()
    pair.everything_is_back()


def test_counts_are_void_and_contradict_nobody_while_access_is_ending(pair: Pair) -> None:
    request, prefill = pair.open()
    stop(pair)
    told = [
        pair.message(Failed, prefill, num_posted=3),
        pair.message(CancelAck, prefill, num_posted=EXPECTED + 1),
        pair.message(TicketClosed, prefill, num_posted=EXPECTED),
        pair.message(Refused, prefill),
    ]
    pair.decoder.messenger.handle([MessageReceived(message=encode(message)) for message in told], pair.site.now)
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.pass_time(100.0)
    assert pair.answer_of(request).reason == "peer_lost"
    assert (pair.num_quarantined, len(pair.suspected)) == (NUM_PAGES, 1)
    go_on(pair)
    pair.next_epoch_works()
    pair.everything_is_back()


def test_a_slot_is_not_given_to_another_ticket_before_the_access_has_ended() -> None:
    pair = Pair(revocation="when let go", num_aux_slots=1)
    pair.open()
    stop(pair)
    revoked, revoked_peer = pair.prefiller, pair.peer
    pair.prefiller, pair.peer = pair.another_prefiller()
    request = pair.decoder.reserve("another", PROMPT)
    assert request is not None
    assert pair.decoder.open(request, revoked_peer, "lease") is None
    assert pair.decoder.open(request, pair.peer, "lease") is None
    pair.site.network.wake(revoked.fabric)
    pair.deliver()
    assert pair.decoder.open(request, pair.peer, "lease") is not None
    pair.deliver()
    pair.write_all(pair.prefiller.heard(Prefill)[-1])
    assert isinstance(request.answers[0], Ready)
    pair.everything_is_back()


# ---- what revokes ----------------------------------------------------------------------------------------------


def test_a_cancel_without_an_answer_ends_in_a_revoke_whose_end_is_waited_for(pair: Pair) -> None:
    _, prefill = pair.open()
    pair.site.network.hang(pair.prefiller.fabric)
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.pass_time(PATIENCE_S)
    assert len(pair.suspected) == 1
    pair.pass_time(10 * PATIENCE_S)
    assert (pair.num_quarantined, pair.statistics.num_revokes) == (NUM_PAGES, 1)
    go_on(pair)
    pair.next_epoch_works()
    pair.everything_is_back()


def test_a_prefiller_that_contradicts_itself_is_revoked_with_all_its_tickets_and_no_other(pair: Pair) -> None:
    request, prefill = pair.open()
    neighbour, _ = pair.open(tuple(range(9)), name="neighbour")
    liar, liar_peer = pair.prefiller, pair.peer
    honest, pair.peer = pair.another_prefiller()
    pair.prefiller = honest
    stranger, strangers = pair.open(tuple(range(20, 29)), name="stranger")
    pair.prefiller, pair.peer = liar, liar_peer
    pair.tell_the_messenger(TicketClosed, prefill, num_posted=EXPECTED - 1)
    assert pair.statistics.num_revoking == 2
    assert pair.num_quarantined == NUM_PAGES + 2
    pair.deliver()
    assert (pair.answer_of(request).reason, pair.answer_of(neighbour).reason) == ("fault", "revoked")
    assert (pair.num_quarantined, stranger.answers) == (0, [])
    pair.next_epoch_works()
    honest.write_all(strangers)
    pair.deliver()
    assert isinstance(stranger.answers[0], Ready)
    pair.everything_is_back()


def test_the_end_of_an_access_that_nobody_took_away_changes_nothing(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.decoder.messenger.handle([Revoked(peer=pair.peer), Revoked(peer=PeerId(99))], pair.site.now)
    assert (request.answers, pair.statistics.num_open, pair.decoder.messenger.is_ready(pair.peer)) == ([], 1, True)
    pair.write_all(prefill)
    assert isinstance(request.answers[0], Ready)
    pair.everything_is_back()


# ---- greeting --------------------------------------------------------------------------------------------------


def refused_decoder() -> tuple[LoopbackSite, DecoderProcess, PuppetPrefiller, PeerId]:
    """The decoder refuses the answer of a prefiller that has its memory mapped and stands still."""
    site = LoopbackSite(seed=1, revocation="when let go")
    decoder, other = DecoderProcess(site, pool_layout(10)), PuppetPrefiller(site, pool_layout(16))
    peer = decoder.messenger.greet(other.fabric.address, site.now)
    site.settle(decoder)
    asked = other.meet()
    other.say(other.peer, other.hello(asked.epoch, fingerprint="another"))
    while site.network.step():
        pass
    site.network.hang(other.fabric)
    site.settle(decoder)
    assert [type(outcome) for outcome in decoder.outcomes] == [PeerRefused]
    return site, decoder, other, peer


def test_a_refused_prefiller_is_greeted_again_only_when_its_access_has_ended() -> None:
    site, decoder, other, peer = refused_decoder()
    for _ in range(2):
        assert decoder.messenger.greet(other.fabric.address, site.now) == peer
    assert decoder.messenger.next_due() is None
    site.network.wake(other.fabric)
    site.settle(decoder)
    assert [hello.epoch for hello in other.heard(Hello)] == [1, 2]
    other.answer()
    site.settle(decoder)
    assert decoder.messenger.is_ready(peer)


def test_a_refused_prefiller_whose_access_has_ended_is_not_greeted_unasked() -> None:
    site, decoder, other, peer = refused_decoder()
    site.network.wake(other.fabric)
    site.settle(decoder)
    assert decoder.messenger.next_due() == FORGET_S, "something is done before it is forgotten"
    assert len(other.heard(Hello)) == 1
    assert decoder.messenger.greet(other.fabric.address, site.now) == peer
    site.settle(decoder)
    assert [hello.epoch for hello in other.heard(Hello)] == [1, 2]


def test_a_prefiller_that_refuses_and_never_mapped_the_memory_is_greeted_again_at_once() -> None:
    site = LoopbackSite(seed=1, revocation="when let go")
    decoder, other = DecoderProcess(site, pool_layout(10)), PuppetPrefiller(site, pool_layout(16))
    decoder.messenger.greet(other.fabric.address, site.now)
    site.settle(decoder)
    [asked] = other.heard(Hello)
    refusal = HelloRefused(
        sender="f" * 32, epoch=asked.epoch, address=other.fabric.address, field="layout", ours="a", theirs="b"
    )
    other.say(other.fabric.add_peer(asked.address), refusal)
    site.settle(decoder)
    site.network.hang(other.fabric)
    decoder.messenger.greet(other.fabric.address, site.now)
    assert decoder.messenger.next_due() == site.now + FIRST_REPEAT_S


def test_a_prefiller_that_cannot_be_granted_access_anew_after_its_end_is_greeted_when_that_is_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.open()
    stop(pair)
    grant = pair.decoder.fabric.grant

    def refuse(peer: PeerId) -> Descriptor:
        raise FabricError("memfd_create", 24, "Too many open files")

    monkeypatch.setattr(pair.decoder.fabric, "grant", refuse)
    with pytest.raises(FabricError):
        go_on(pair)
    assert pair.num_quarantined == 0, "pages wait for what has nothing to do with them"
    monkeypatch.setattr(pair.decoder.fabric, "grant", grant)
    assert pair.decoder.messenger.greet(pair.prefiller.fabric.address, pair.site.now) == pair.peer
    pair.deliver()
    pair.next_epoch_works()
    pair.everything_is_back()
