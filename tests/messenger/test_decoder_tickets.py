"""A ticket at the decoder: one answer a request, and pages back when that is safe."""

from collections.abc import Callable
from typing import Any

import pytest
from decoder_pair import EXPECTED, NUM_PAGES, PROMPT, Pair, ticket_request
from kv_world import pool_layout
from puppet import PuppetPrefiller

from headrace.errors import InputError
from headrace.fabric.interface import Imm, PeerId
from headrace.messenger.entries import DecoderOptions
from headrace.messenger.outcomes import LinkSuspected, Ready
from headrace.protocol.messages import Cancel, CancelAck, Failed, Prefill, Refused, Ticket, TicketClosed
from headrace.testing import Faults


@pytest.fixture
def pair() -> Pair:
    return Pair()


# ---- opened ----------------------------------------------------------------------------------------------------


def test_the_prefill_names_what_is_to_be_fetched_and_the_counter_is_armed_before_it(pair: Pair) -> None:
    request, prefill = pair.open()
    assert prefill.token_ids == PROMPT
    assert prefill.pages == request.reservation.pages[:NUM_PAGES]
    assert (prefill.request_id, prefill.lease, prefill.ticket.epoch) == ("a", "lease", 1)
    assert prefill.ticket.imm == request.imm
    assert pair.decoder.fabric.statistics().num_counters_now == 1


WRONG_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"token_ids": (), "pages": ()}, "cached_len"),
    "nothing to prefill": ({"token_ids": (1,), "pages": ()}, "cached_len"),
    "everything is cached": ({"token_ids": tuple(range(9)), "cached_len": 8, "pages": ()}, "cached_len"),
    "a hit that is no whole page": ({"cached_len": 2}, "cached_len"),
    "a negative hit": ({"cached_len": -4, "pages": tuple(range(5))}, "cached_len"),
    "too few pages": ({"pages": (0, 1, 2)}, "pages"),
    "pages of the hit, too": ({"cached_len": 4, "pages": (0, 1, 2, 3)}, "pages"),
    "a page twice": ({"pages": (0, 1, 2, 2)}, "pages"),
    "a page beyond the pool": ({"pages": (0, 1, 2, 24)}, "pages"),
    "a page before the pool": ({"pages": (-1, 1, 2, 3)}, "pages"),
    "a group beyond the last": ({"group": 1}, "group"),
    "a group before the first": ({"group": -1}, "group"),
    "a deadline in the past": ({"remaining_s": -0.1}, "remaining_s"),
    "a deadline that is no number": ({"remaining_s": float("nan")}, "remaining_s"),
    "a deadline that never comes": ({"remaining_s": float("inf")}, "remaining_s"),
    "a deadline beyond the wire's": ({"remaining_s": 1.1e6}, "remaining_s"),
    "a token before the first": ({"token_ids": (*PROMPT[:-1], -1)}, "token_ids"),
    "a token beyond the last": ({"token_ids": (2**31, *PROMPT[1:])}, "token_ids"),
    "a request_id that is too long": ({"request_id": "r" * 257}, "request_id"),
    "a request_id that cannot be encoded": ({"request_id": "r\ud800"}, "request_id"),
    "a lease that is too long": ({"lease": "l" * 257}, "lease"),
    "a lease that cannot be encoded": ({"lease": "\udfffl"}, "lease"),
}


@pytest.mark.parametrize("wrong", WRONG_REQUESTS)
def test_a_request_that_is_wrong_is_refused_by_name_and_takes_nothing(wrong: str, pair: Pair) -> None:
    changes, field = WRONG_REQUESTS[wrong]
    with pytest.raises(InputError) as refusal:
        pair.decoder.messenger.try_open_ticket(ticket_request(pair, **changes), 0.0)
    assert refusal.value.field == field
    pair.deliver()
    assert pair.prefiller.heard(Prefill) == []
    pair.everything_is_back()


def test_a_prompt_beyond_the_digests_of_an_aux_slot_is_refused() -> None:
    pair = Pair(num_pages=100)
    request = ticket_request(pair, token_ids=tuple(range(290)), pages=tuple(range(73)))
    with pytest.raises(InputError) as refusal:
        pair.decoder.messenger.try_open_ticket(request, 0.0)
    assert refusal.value.field == "token_ids"
    pair.everything_is_back()


def test_names_and_a_deadline_as_large_as_the_wire_takes_are_taken(pair: Pair) -> None:
    pages = pair.decoder.pool.try_allocate(NUM_PAGES)
    assert pages is not None
    longest = ticket_request(pair, request_id="r" * 256, lease="\U0001f600" * 256, remaining_s=1e6, pages=tuple(pages))
    imm = pair.decoder.messenger.try_open_ticket(longest, 0.0)
    assert imm is not None
    while pair.site.network.step():
        pass
    [prefill] = pair.prefiller.heard(Prefill)
    assert (prefill.request_id, prefill.lease, prefill.remaining_s) == ("r" * 256, "\U0001f600" * 256, 1e6)


def free(pair: Pair) -> tuple[int, ...]:
    return (0, 1, 2, 3)


def shared(pair: Pair) -> tuple[int, ...]:
    pages = pair.decoder.pool.try_allocate(NUM_PAGES)
    assert pages is not None
    pair.decoder.pool.pin(pages[:1])
    return tuple(pages)


def indexed(pair: Pair) -> tuple[int, ...]:
    pages = pair.decoder.pool.try_allocate(NUM_PAGES)
    assert pages is not None
    assert pair.decoder.pool.try_index(pages[2], b"hash")
    return tuple(pages)


@pytest.mark.parametrize(
    ("which", "what"), [(free, "is not held"), (shared, "is held 2 times"), (indexed, "is indexed")]
)
def test_pages_that_are_not_the_requests_alone_are_our_own_mistake_and_nothing_is_taken(
    which: Callable[[Pair], tuple[int, ...]], what: str, pair: Pair
) -> None:
    pages = which(pair)
    with pytest.raises(AssertionError, match=what):
        pair.decoder.messenger.try_open_ticket(ticket_request(pair, pages=pages), 0.0)
    pair.deliver()
    assert pair.prefiller.heard(Prefill) == []
    assert (pair.statistics.num_open, pair.decoder.fabric.statistics().num_counters_now) == (0, 0)
    pair.decoder.messenger.check()


def test_without_a_slot_no_ticket_is_opened_and_with_the_next_free_one_it_is() -> None:
    pair = Pair(num_aux_slots=1)
    _, first = pair.open()
    second = pair.decoder.reserve("b", tuple(range(9)))
    assert second is not None
    assert pair.decoder.open(second, pair.peer, "lease") is None
    assert second.answers == []
    pair.write_all(first)
    assert pair.decoder.open(second, pair.peer, "lease") is not None
    pair.deliver()
    later = pair.prefiller.heard(Prefill)[-1]
    assert later.aux_slot == first.aux_slot
    assert later.ticket.imm == (first.ticket.imm + (1 << 12)) % 2**32, "the same slot, its next generation"
    pair.write_all(later)
    pair.everything_is_back()


def test_no_ticket_is_opened_at_a_prefiller_that_is_unknown_or_not_ready(pair: Pair) -> None:
    try_open = pair.decoder.messenger.try_open_ticket
    assert try_open(ticket_request(pair, prefiller=PeerId(99)), 0.0) is None
    silent = PuppetPrefiller(pair.site, pool_layout(8))
    peer = pair.decoder.messenger.greet(silent.fabric.address, 0.0)
    assert try_open(ticket_request(pair, prefiller=peer), 0.0) is None
    pair.decoder.messenger.peer_hung(pair.peer, 0.0)
    assert try_open(ticket_request(pair), 0.0) is None
    pair.everything_is_back()


# ---- ready -----------------------------------------------------------------------------------------------------


def test_a_ticket_is_ready_when_everything_has_arrived_whether_or_not_it_is_told_closed(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.write_all(prefill, cached_len=8)
    [answer] = request.answers
    assert isinstance(answer, Ready)
    assert (answer.request_id, answer.imm, answer.cached_len) == ("a", request.imm, 8)
    pair.say(TicketClosed, prefill, num_posted=EXPECTED)
    assert pair.statistics.num_ready == 1
    pair.everything_is_back()


@pytest.mark.parametrize("verify_kv", [True, False])
def test_ready_says_when_the_last_byte_landed_however_late_the_loop_hears_of_it(verify_kv: bool) -> None:
    pair = Pair(options=DecoderOptions(verify_kv=verify_kv))
    pair.pass_time(1.5)
    request, prefill = pair.open()
    pair.site.network.advance(0.25)
    pair.prefiller.write_all(prefill)
    while pair.decoder.fabric.statistics().num_arrivals < EXPECTED:
        pair.site.network.step()
    pair.pass_time(0.5)  # the loop was busy
    [answer] = request.answers
    assert isinstance(answer, Ready)
    assert (answer.landed_at, pair.site.now) == (1.75, 2.25)
    pair.everything_is_back()


def test_nothing_has_landed_after_now_though_the_fabric_counts_in_whole_nanoseconds(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.site.network.advance(0.7e-9)  # a nanosecond, rounded
    pair.write_all(prefill)
    [answer] = request.answers
    assert isinstance(answer, Ready)
    assert answer.landed_at == pair.site.now
    pair.everything_is_back()


def test_pages_are_indexed_when_they_are_ready_and_the_tail_page_never(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.write(prefill, EXPECTED - 1)
    assert pair.decoder.pool.statistics().num_indexed == 0
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.say(CancelAck, prefill, num_posted=EXPECTED - 1)
    assert pair.decoder.pool.statistics().num_indexed == 0, "of a ticket that was never verified"
    pair.everything_is_back()
    request, prefill = pair.open(name="b")
    pair.write_all(prefill)
    assert pair.decoder.pool.statistics().num_indexed == 3
    assert request.reservation.pages[3] not in pair.decoder.pool.prefix
    pair.everything_is_back()


LIES: dict[str, dict[str, Any]] = {
    "another ticket": {"ticket": Ticket(decoder="0" * 32, epoch=1, imm=1)},
    "another count": {"num_messages": 5},
    "a hit that is no whole page": {"cached_len": 5},
    "a hit beyond the prompt": {"cached_len": 16},
}


@pytest.mark.parametrize("verify_kv", [True, False])
@pytest.mark.parametrize("lie", LIES)
def test_an_aux_header_of_something_else_is_corrupt(lie: str, verify_kv: bool) -> None:
    pair = Pair(options=DecoderOptions(verify_kv=verify_kv))
    request, prefill = pair.open()
    pair.write_all(prefill, **LIES[lie])
    answer = pair.answer_of(request)
    assert answer.reason == "corrupt"
    assert pair.decoder.pool.statistics().num_indexed == 0
    assert pair.statistics.num_wrong_bytes == 1
    assert pair.suspected_links == [LinkSuspected(peer=pair.peer, text=answer.text)]
    assert pair.suspected == [], "once is an accident"
    pair.everything_is_back()


def test_bytes_that_are_not_those_that_were_sent_are_corrupt_and_the_link_is_suspected(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.site.network.faults = Faults(flip_bit=0.3)
    pair.write_all(prefill)
    answer = pair.answer_of(request)
    assert (answer.reason, answer.refusal) == ("corrupt", None)
    assert pair.suspected_links == [LinkSuspected(peer=pair.peer, text=answer.text)]
    assert pair.decoder.pool.statistics().num_indexed == 0
    pair.everything_is_back()


# ---- refused, failed, cancelled --------------------------------------------------------------------------------


def test_a_refusal_gives_everything_back_and_says_why_and_when_to_come_again(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.say(Refused, prefill)
    answer = pair.answer_of(request)
    assert (answer.reason, answer.refusal, answer.text) == ("refused", "no_room", "full")
    assert answer.retry_after_s == 0.5
    assert pair.num_quarantined == 0
    pair.say(Refused, prefill)
    assert pair.suspected == []
    pair.everything_is_back()


def test_the_pages_of_a_refused_ticket_are_nobodys_until_its_counter_is_known_to_stand_at_nothing(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.tell_the_messenger(Refused, prefill)
    assert pair.num_quarantined == NUM_PAGES, "freed before the fabric said how many writes arrived"
    pair.deliver()
    assert pair.answer_of(request).reason == "refused"
    assert (pair.num_quarantined, pair.suspected) == (0, [])
    pair.everything_is_back()


def test_only_a_refusal_has_a_reason_of_refusal(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.say(Failed, prefill, num_posted=0)
    answer = pair.answer_of(request)
    assert (answer.reason, answer.refusal, answer.retry_after_s) == ("failed", None, 0.0)
    pair.everything_is_back()


@pytest.mark.parametrize("arrived", [0, 3, 5])
def test_a_failed_tickets_pages_come_back_after_exactly_the_writes_that_were_posted(arrived: int, pair: Pair) -> None:
    request, prefill = pair.open()
    pair.write(prefill, arrived)
    pair.say(Failed, prefill, num_posted=5, num_unknown=1)
    answer = pair.answer_of(request)
    assert answer.reason == "failed"
    assert "the step failed" in answer.text
    for _ in range(5 - arrived):
        assert pair.num_quarantined == NUM_PAGES
        pair.write(prefill, 1)
    assert pair.num_quarantined == 0
    assert pair.suspected == []
    pair.everything_is_back()


@pytest.mark.parametrize("arrived", [0, 2, 5])
def test_a_cancelled_request_is_answered_at_once_and_its_pages_wait_for_what_was_posted(
    arrived: int, pair: Pair
) -> None:
    request, prefill = pair.open()
    pair.write(prefill, arrived)
    for _ in range(2):
        pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.deliver()
    assert pair.answer_of(request).reason == "cancelled"
    assert [cancel.ticket for cancel in pair.prefiller.heard(Cancel)] == [prefill.ticket]
    assert pair.num_quarantined == NUM_PAGES, "num_posted is not known yet"
    pair.say(CancelAck, prefill, num_posted=5)
    pair.say(CancelAck, prefill, num_posted=5)
    for _ in range(5 - arrived):
        assert pair.num_quarantined == NUM_PAGES
        pair.write(prefill, 1)
    assert pair.num_quarantined == 0
    pair.everything_is_back()


def test_a_cancel_that_comes_too_late_for_the_prefiller_waits_for_the_rest(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.deliver()
    pair.say(TicketClosed, prefill, num_posted=EXPECTED)
    assert pair.num_quarantined == NUM_PAGES
    pair.write_all(prefill)
    assert pair.num_quarantined == 0
    assert pair.answer_of(request).reason == "cancelled"
    pair.everything_is_back()


def test_a_request_cancelled_while_its_digests_are_compared_gives_everything_back(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.prefiller.write_all(prefill)
    while pair.decoder.fabric.statistics().num_arrivals < EXPECTED:
        pair.site.network.step()
    pair.decoder.turn()
    assert request.answers == []
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.deliver()
    assert pair.answer_of(request).reason == "cancelled"
    assert pair.prefiller.heard(Cancel) == []
    pair.everything_is_back()


def test_cancelling_what_is_over_or_was_never_open_does_nothing(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.write_all(prefill)
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.decoder.messenger.cancel(Imm(12345), pair.site.now)
    pair.deliver()
    assert isinstance(request.answers[0], Ready)
    assert pair.prefiller.heard(Cancel) == []
    pair.everything_is_back()


def test_at_its_deadline_a_request_is_answered_and_its_ticket_cancelled(pair: Pair) -> None:
    request, prefill = pair.open(remaining_s=1.0)
    pair.pass_time(0.999)
    assert request.answers == []
    pair.pass_time(0.001)
    assert pair.answer_of(request).reason == "deadline"
    assert len(pair.prefiller.heard(Cancel)) == 1
    pair.say(CancelAck, prefill, num_posted=0)
    pair.everything_is_back()
