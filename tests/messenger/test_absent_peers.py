"""Peers of other hosts that are gone for good, which nobody tells: they are forgotten in the end, and leave nothing."""

import pytest
from decoder_pair import Pair as DecoderPair
from prefiller_pair import LATE
from prefiller_pair import Pair as PrefillerPair

from headrace.fabric.interface import PeerHeard, PeerLost, PeerSilent
from headrace.messenger.known_decoders import FORGET_ABSENT_S
from headrace.messenger.known_prefillers import FORGET_S
from headrace.protocol.messages import Hello, TicketClosed


def tell_absent(pair: PrefillerPair, kind: str) -> None:
    peer = pair.prefiller.decoders[pair.decoder.identity.uuid]
    event = PeerSilent(peer=peer) if kind == "silent" else PeerLost(peer=peer, code=104, text="gone")
    pair.prefiller.messenger.handle([event], pair.site.now)


def num_peers(pair: PrefillerPair | DecoderPair) -> int:
    side = pair.prefiller if isinstance(pair, PrefillerPair) else pair.decoder
    return side.fabric.statistics().num_peers_now


def pass_time(pair: PrefillerPair, seconds: float) -> None:
    pair.site.network.advance(seconds)
    pair.settle()


@pytest.mark.parametrize("kind", ["lost", "silent"])
def test_a_decoder_that_is_absent_for_minutes_is_forgotten_and_served_when_it_comes_back_after_all(kind: str) -> None:
    pair = PrefillerPair()
    tell_absent(pair, kind)
    due = pair.prefiller.messenger.next_due()
    assert due == pair.site.now + FORGET_ABSENT_S
    pass_time(pair, FORGET_ABSENT_S - 1.0)
    tell_absent(pair, kind)  # no news
    assert num_peers(pair) == 1
    pass_time(pair, 1.0)
    assert num_peers(pair) == 0
    assert pair.prefiller.messenger.next_due() is None
    pair.decoder.epoch += 1
    pair.decoder.greet()
    pair.deliver()
    message = pair.ask()
    pair.compute_everything()
    pair.settle()
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)] == [message.ticket]


def test_a_decoder_that_is_heard_again_in_any_way_is_not_forgotten() -> None:
    pair = PrefillerPair()
    peer = pair.prefiller.decoders[pair.decoder.identity.uuid]
    for word in ("heartbeat", "hello", "prefill"):
        tell_absent(pair, "lost")
        pass_time(pair, FORGET_ABSENT_S / 2)
        match word:
            case "heartbeat":
                pair.prefiller.messenger.handle([PeerHeard(peer=peer)], pair.site.now)
            case "hello":
                pair.decoder.epoch += 1
                pair.decoder.greet()
                pair.deliver()
            case _:
                pair.ask()
                pair.compute_everything()
        pass_time(pair, FORGET_ABSENT_S)
        assert num_peers(pair) == 1, word


def test_a_decoder_is_not_forgotten_while_source_pages_are_read_for_it() -> None:
    pair = PrefillerPair()
    pair.site.network.faults = LATE
    pair.ask()
    pair.compute_everything()
    assert pair.num_held > 0
    tell_absent(pair, "lost")
    pair.site.network.advance(FORGET_ABSENT_S)
    pair.prefiller.messenger.advance(pair.site.now)
    assert (num_peers(pair), pair.num_held > 0) == (1, True)
    pair.settle()
    assert pair.num_held == 0
    pass_time(pair, FORGET_ABSENT_S)
    assert num_peers(pair) == 0


def test_decoders_of_another_host_that_come_and_go_leave_nothing_behind() -> None:
    pair = PrefillerPair()
    for _ in range(300):
        tell_absent(pair, "lost")
        pair.site.network.kill(pair.decoder.fabric)
        pass_time(pair, FORGET_ABSENT_S / 2)
        pair.decoder = pair.another_decoder()
        assert num_peers(pair) <= 3
    assert len(pair.prefiller.messenger._decoders) <= 3


def test_a_prefiller_that_is_greeted_in_vain_for_minutes_is_forgotten() -> None:
    pair = DecoderPair()
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    while pair.decoder.messenger.knows(pair.peer):
        due = pair.decoder.messenger.next_due()
        assert due is not None and due <= FORGET_S, "it is greeted for ever"
        pair.pass_time(max(0.0, due - pair.site.now))
    assert pair.site.now == FORGET_S
    assert num_peers(pair) == 0 and pair.decoder.messenger.next_due() is None
    greeted = len(pair.prefiller.heard(Hello))
    pair.pass_time(FORGET_S)
    assert len(pair.prefiller.heard(Hello)) == greeted


def test_a_prefiller_that_was_forgotten_is_greeted_under_an_epoch_that_it_has_not_seen() -> None:
    pair = DecoderPair()
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    pair.pass_time(FORGET_S)
    seen = [hello.epoch for hello in pair.prefiller.heard(Hello)]
    pair.peer = pair.decoder.messenger.greet(pair.prefiller.fabric.address, pair.site.now)
    pair.deliver()
    assert pair.prefiller.heard(Hello)[-1].epoch > max(seen)
    pair.prefiller.answer()
    pair.deliver()
    assert pair.decoder.messenger.is_ready(pair.peer)
    _, prefill = pair.open()
    assert prefill.ticket.epoch > max(seen)


def test_a_prefiller_whose_access_is_ending_is_not_forgotten_before_it_has_ended() -> None:
    pair = DecoderPair(revocation="when let go")
    pair.open()
    pair.site.network.hang(pair.prefiller.fabric)
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    pair.pass_time(2 * FORGET_S)
    assert pair.decoder.messenger.knows(pair.peer)
    assert pair.num_quarantined > 0


def test_a_decoder_that_was_never_absent_is_never_forgotten() -> None:
    pair = PrefillerPair()
    pass_time(pair, 3 * FORGET_ABSENT_S)
    assert num_peers(pair) == 1
