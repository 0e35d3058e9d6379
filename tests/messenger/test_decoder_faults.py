"""What a prefiller does wrong, and what becomes of its tickets: lost writes, silence, contradictions, nonsense."""

from collections.abc import Callable
from typing import Any

import pytest
from decoder_pair import EXPECTED, LOST_S, NUM_PAGES, PATIENCE_S, PROMPT, Pair
from kv_world import DecoderProcess, LoopbackSite, PrefillerProcess, pool_layout, run_prompts
from kv_world import greet as greet_real

from headrace.fabric.interface import Imm
from headrace.messenger.outcomes import LinkSuspected, Ready, TicketFailed
from headrace.protocol.control import Granted, encode_control
from headrace.protocol.messages import CancelAck, Failed, Prefill, Refused, Ticket, TicketClosed
from headrace.testing import Faults


@pytest.fixture
def pair() -> Pair:
    return Pair()


# ---- lost writes, patience -------------------------------------------------------------------------------------


def test_a_write_missing_after_closed_is_lost_and_at_the_end_of_patience_the_peer_is_revoked(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.write(prefill, EXPECTED - 1)
    pair.say(TicketClosed, prefill, num_posted=EXPECTED)
    pair.pass_time(LOST_S / 2)
    pair.say(TicketClosed, prefill, num_posted=EXPECTED)  # does not prolong it
    pair.pass_time(LOST_S / 2 - 1e-6)
    assert request.answers == []
    pair.pass_time(1e-6)
    answer = pair.answer_of(request)
    assert answer.reason == "lost_write"
    assert pair.statistics.num_wrong_bytes == 1
    assert pair.suspected_links == [LinkSuspected(peer=pair.peer, text=answer.text)]
    assert pair.num_quarantined == NUM_PAGES
    pair.pass_time(PATIENCE_S - 1e-6)
    assert (pair.num_quarantined, pair.suspected) == (NUM_PAGES, [])
    pair.pass_time(1e-6)
    assert pair.num_quarantined == 0
    [suspicion] = pair.suspected
    assert suspicion.peer == pair.peer
    assert "did not account for" in suspicion.text
    assert pair.statistics.num_revokes == 1
    pair.write(prefill, 1)  # what was lost comes after all: surplus in nobody's page
    pair.decoder.pool.look()
    pair.next_epoch_works()
    pair.everything_is_back()


def test_a_write_that_is_late_after_all_brings_the_pages_back_without_a_revoke(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.write(prefill, EXPECTED - 1)
    pair.say(TicketClosed, prefill, num_posted=EXPECTED)
    pair.pass_time(LOST_S)
    assert pair.num_quarantined == NUM_PAGES
    pair.write(prefill, 1)
    assert pair.num_quarantined == 0
    pair.pass_time(2 * PATIENCE_S)
    assert pair.suspected == []
    assert pair.answer_of(request).reason == "lost_write"
    pair.everything_is_back()


def test_a_lost_write_of_a_real_prefiller_is_found_and_the_next_epoch_serves_it_again() -> None:
    site = LoopbackSite(seed=3)
    prefiller, decoder = PrefillerProcess(site, pool_layout(24)), DecoderProcess(site, pool_layout(24))
    peer = greet_real(decoder, prefiller)
    request = decoder.reserve("a", PROMPT)
    lease = prefiller.lease("a", 14)
    assert request is not None and lease is not None
    decoder.open(request, peer, lease)
    site.settle(prefiller, decoder)
    prefiller.begin_step()
    site.network.faults = Faults(lose_write=1.0)
    prefiller.compute_layer()
    while site.network.step():
        prefiller.turn()
    site.network.faults = Faults()
    while prefiller.compute_layer():
        pass
    prefiller.end_step()
    run_prompts(prefiller, decoder)
    site.settle(prefiller, decoder)
    for seconds in (LOST_S, PATIENCE_S):
        site.network.advance(seconds)
        site.settle(prefiller, decoder)
    [answer] = request.answers
    assert isinstance(answer, TicketFailed) and answer.reason == "lost_write"
    decoder.finish(request)
    site.settle(prefiller, decoder)
    assert decoder.messenger.is_ready(peer)
    again, lease = decoder.reserve("again", PROMPT), prefiller.lease("again", 14)
    assert again is not None and lease is not None
    decoder.open(again, peer, lease)
    run_prompts(prefiller, decoder)
    assert isinstance(again.answers[0], Ready)
    assert decoder.wrong_bytes(again) == []


def test_a_cancel_without_an_answer_revokes_the_peer_when_patience_is_over(pair: Pair) -> None:
    _, prefill = pair.open()
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.pass_time(PATIENCE_S - 1e-6)
    assert pair.num_quarantined == NUM_PAGES
    pair.pass_time(1e-6)
    assert pair.num_quarantined == 0
    assert len(pair.suspected) == 1
    pair.next_epoch_works()
    pair.everything_is_back()


# ---- contradictions --------------------------------------------------------------------------------------------


def told_two_counts(pair: Pair, prefill: Prefill) -> None:
    pair.say(Failed, prefill, num_posted=5)
    pair.say(CancelAck, prefill, num_posted=6)


def told_closed_after_failed(pair: Pair, prefill: Prefill) -> None:
    pair.say(Failed, prefill, num_posted=5)
    pair.say(TicketClosed, prefill, num_posted=EXPECTED)


def told_refused_after_failed(pair: Pair, prefill: Prefill) -> None:
    pair.say(Failed, prefill, num_posted=5)
    pair.say(Refused, prefill)


def told_more_than_there_is(pair: Pair, prefill: Prefill) -> None:
    pair.say(Failed, prefill, num_posted=EXPECTED + 1)


def told_closed_short(pair: Pair, prefill: Prefill) -> None:
    pair.say(TicketClosed, prefill, num_posted=EXPECTED - 1)


def told_failed_after_closed(pair: Pair, prefill: Prefill) -> None:
    pair.say(TicketClosed, prefill, num_posted=EXPECTED)
    pair.say(Failed, prefill, num_posted=5)


def told_refused_after_closed(pair: Pair, prefill: Prefill) -> None:
    pair.say(TicketClosed, prefill, num_posted=EXPECTED)
    pair.say(Refused, prefill)


def told_refused_after_writes(pair: Pair, prefill: Prefill) -> None:
    pair.write(prefill, 1)
    pair.say(Refused, prefill)


def wrote_after_refused(pair: Pair, prefill: Prefill) -> None:
    pair.prefiller.write(prefill, 1)
    while pair.site.network.step():
        pass
    pair.tell_the_messenger(Refused, prefill)
    pair.deliver()


def told_less_than_arrived(pair: Pair, prefill: Prefill) -> None:
    pair.write(prefill, 6)
    pair.say(Failed, prefill, num_posted=5)


def wrote_more_than_told(pair: Pair, prefill: Prefill) -> None:
    pair.say(Failed, prefill, num_posted=5)
    pair.prefiller.write(prefill, 6)
    while pair.site.network.step():
        pass
    pair.deliver()


Contradiction = Callable[[Pair, Prefill], None]
ANSWERED_BEFORE: tuple[Contradiction, ...] = (
    told_two_counts,
    told_closed_after_failed,
    told_refused_after_failed,
    told_refused_after_writes,
    wrote_after_refused,
    told_less_than_arrived,
    wrote_more_than_told,
)
REFUSED_FIRST: tuple[Contradiction, ...] = (told_refused_after_writes, wrote_after_refused)
AT_ONCE: tuple[Contradiction, ...] = (
    told_more_than_there_is,
    told_closed_short,
    told_failed_after_closed,
    told_refused_after_closed,
)


@pytest.mark.parametrize("contradict", ANSWERED_BEFORE + AT_ONCE, ids=lambda made: made.__name__)
def test_a_prefiller_that_contradicts_itself_is_revoked_with_all_its_tickets_and_no_other(
    contradict: Contradiction, pair: Pair
) -> None:
    request, prefill = pair.open()
    neighbour, _ = pair.open(tuple(range(9)), name="neighbour")
    liar, liar_peer = pair.prefiller, pair.peer
    pair.prefiller, pair.peer = pair.another_prefiller()
    stranger, strangers = pair.open(tuple(range(20, 29)), name="stranger")
    honest = pair.prefiller
    pair.prefiller, pair.peer = liar, liar_peer
    contradict(pair, prefill)
    reason = "refused" if contradict in REFUSED_FIRST else "failed"
    assert pair.answer_of(request).reason == ("fault" if contradict in AT_ONCE else reason)
    [suspicion] = pair.suspected
    assert suspicion.peer == liar_peer
    assert pair.answer_of(neighbour).reason == "revoked"
    assert pair.num_quarantined == 0
    assert stranger.answers == []
    pair.next_epoch_works()
    honest.write_all(strangers)
    pair.deliver()
    assert isinstance(stranger.answers[0], Ready)
    pair.everything_is_back()


CONTRADICTED: dict[Contradiction, str] = {
    told_more_than_there_is: f"{EXPECTED + 1} of {EXPECTED} writes posted, known before: unknown",
    told_closed_short: f"closed after {EXPECTED - 1} of {EXPECTED} writes",
    told_failed_after_closed: f"5 of {EXPECTED} writes posted, known before: {EXPECTED}",
    told_refused_after_closed: f"0 of {EXPECTED} writes posted, known before: {EXPECTED}",
}


@pytest.mark.parametrize("contradict", AT_ONCE, ids=lambda made: made.__name__)
def test_a_contradiction_says_what_was_contradicted(contradict: Contradiction, pair: Pair) -> None:
    request, prefill = pair.open()
    contradict(pair, prefill)
    assert pair.answer_of(request).text == f"the prefiller contradicts itself: {CONTRADICTED[contradict]}"
    assert pair.suspected[0].text == pair.answer_of(request).text
    assert pair.suspected_links == [], "a liar is no link"
    pair.everything_is_back()


def test_a_write_too_many_for_a_cancelled_ticket_revokes_its_peer(pair: Pair) -> None:
    _, prefill = pair.open()
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.write(prefill, 3)
    pair.say(CancelAck, prefill, num_posted=2)
    assert len(pair.suspected) == 1
    assert "contradicts itself" in pair.suspected[0].text
    pair.next_epoch_works()
    pair.everything_is_back()


def test_an_arrival_that_nobody_armed_is_counted_and_wakes_nobody(pair: Pair) -> None:
    request, prefill = pair.open()
    transfer = pair.prefiller.fabric.open_transfer(pair.prefiller.peer, Imm(prefill.ticket.imm ^ (1 << 12)))
    pair.prefiller.fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=0)
    pair.prefiller.fabric.submit_last(transfer)
    pair.deliver()
    assert pair.statistics.num_surplus == 1
    assert (request.answers, pair.suspected) == ([], [])
    pair.write_all(prefill)
    pair.everything_is_back()


@pytest.mark.parametrize("kind", [Refused, Failed, CancelAck, TicketClosed])
def test_a_message_about_a_ticket_from_a_wrong_sender_is_dropped_and_counted(kind: type[Any], pair: Pair) -> None:
    request, prefill = pair.open()
    fields = {} if kind is Refused else {"num_posted": 1}
    pair.say(kind, prefill, sender="f" * 32, **fields)
    other, _ = pair.another_prefiller()
    pair.say(kind, prefill, sender=other.identity.uuid, **fields)
    assert pair.statistics.num_strange_messages == 2
    assert (request.answers, pair.suspected, pair.num_quarantined) == ([], [], 0)
    pair.write_all(prefill)
    assert isinstance(request.answers[0], Ready)
    pair.everything_is_back()


@pytest.mark.parametrize("kind", [Refused, Failed, CancelAck, TicketClosed])
def test_a_message_about_another_use_of_the_slot_is_ignored(kind: type[Any], pair: Pair) -> None:
    request, prefill = pair.open()
    fields = {} if kind is Refused else {"num_posted": 1}
    ticket = prefill.ticket
    for imm, epoch in ((ticket.imm ^ (1 << 12), ticket.epoch), (ticket.imm, ticket.epoch + 1)):
        pair.say(kind, prefill, ticket=Ticket(decoder=ticket.decoder, epoch=epoch, imm=imm), **fields)
    assert (request.answers, pair.suspected) == ([], [])
    pair.write_all(prefill)
    pair.everything_is_back()


def test_messages_of_no_sense_are_dropped_and_counted(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.prefiller.say(pair.prefiller.peer, b"\xc1 no message")
    pair.prefiller.say(pair.prefiller.peer, prefill)
    granted = Granted(sender="0" * 32, request_id="a", lease="1")
    pair.prefiller.say(pair.prefiller.peer, encode_control(granted))  # of the gateways' socket, not of the fabric
    pair.deliver()
    assert pair.statistics.num_strange_messages == 3
    pair.write_all(prefill)
    assert isinstance(request.answers[0], Ready)
    pair.everything_is_back()


def test_what_is_longer_than_its_field_is_dropped_and_counted(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.say(Refused, prefill, text="x" * 1025)
    pair.say(Refused, prefill, retry_after_s=1.1e6)
    pair.say(Failed, prefill, num_posted=0, reason="x" * 1025)
    pair.prefiller.say(pair.prefiller.peer, pair.prefiller.hello(1, fingerprint="x" * (8 << 20)))
    pair.deliver()
    assert pair.statistics.num_strange_messages == 4
    assert (request.answers, pair.suspected, pair.num_quarantined) == ([], [], 0)
    pair.write_all(prefill)
    assert isinstance(request.answers[0], Ready)
    pair.everything_is_back()
