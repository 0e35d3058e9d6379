"""The decoder's messenger against a prefiller made by hand: one answer a request, and pages back when that is safe."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kv_world import KV, DecoderProcess, LoopbackSite, PrefillerProcess, Request, pool_layout, run_prompts
from kv_world import greet as greet_real
from puppet import PuppetPrefiller

from headrace.errors import InputError
from headrace.fabric.interface import Imm, PeerId
from headrace.messenger.decoder import DecoderOptions, DecoderStatistics
from headrace.messenger.landings import TicketRequest
from headrace.messenger.outcomes import PeerReady, PeerSuspected, Ready, TicketFailed
from headrace.protocol.messages import (
    Cancel,
    CancelAck,
    Failed,
    Granted,
    Hello,
    Prefill,
    Refused,
    Ticket,
    TicketClosed,
)
from headrace.testing import Faults

LAYERS, PAGE = KV.num_layers, KV.page_size
PROMPT = tuple(range(100, 114))  # 13 tokens to prefill: three whole pages and a tail page
NUM_PAGES, EXPECTED = 4, 4 * LAYERS + 1
LOST_S, PATIENCE_S = DecoderOptions().lost_write_s, DecoderOptions().patience_s


class Pair:
    """A real decoder and a puppet prefiller, greeted."""

    def __init__(self, *, num_aux_slots: int = 8, options: DecoderOptions = DecoderOptions()) -> None:
        self.site = LoopbackSite(seed=1)
        self.decoder = DecoderProcess(self.site, pool_layout(24, num_aux_slots=num_aux_slots), options=options)
        self.prefiller, self.peer = self.another_prefiller()

    def another_prefiller(self) -> tuple[PuppetPrefiller, PeerId]:
        made = PuppetPrefiller(self.site, pool_layout(40))
        peer = self.decoder.messenger.greet(made.fabric.address, self.site.now)
        self.deliver()
        made.answer()
        self.deliver()
        assert self.decoder.messenger.is_ready(peer)
        return made, peer

    def deliver(self) -> None:
        for _ in range(3):  # what a turn asks of its own fabric is told at once, and calls for another turn
            self.decoder.turn()
            while self.site.network.step():
                self.decoder.turn()

    def pass_time(self, seconds: float) -> None:
        self.site.network.advance(seconds)
        self.deliver()

    def open(
        self, token_ids: tuple[int, ...] = PROMPT, *, name: str = "a", remaining_s: float = 30.0
    ) -> tuple[Request, Prefill]:
        """-> the request, and its Prefill as the prefiller got it."""
        request = self.decoder.reserve(name, token_ids)
        assert request is not None
        assert self.decoder.open(request, self.peer, "lease", remaining_s=remaining_s) is not None
        self.deliver()
        return request, self.prefiller.heard(Prefill)[-1]

    def say(self, kind: type[Any], prefill: Prefill, *, sender: str | None = None, **fields: Any) -> None:
        """Any message about the ticket, true or not."""
        defaults: dict[type[Any], dict[str, Any]] = {
            Refused: {"reason": "no_room", "text": "full", "retry_after_s": 0.5},
            Failed: {"num_unknown": 0, "reason": "the step failed"},
            CancelAck: {"num_unknown": 0},
            TicketClosed: {},
        }
        ticket = fields.pop("ticket", prefill.ticket)
        message = kind(sender=sender or self.prefiller.identity.uuid, ticket=ticket, **(defaults[kind] | fields))
        self.prefiller.say(self.prefiller.peer, message)
        self.deliver()

    def write(self, prefill: Prefill, num_writes: int) -> None:
        self.prefiller.write(prefill, num_writes)
        self.deliver()

    def write_all(self, prefill: Prefill, **lies: Any) -> None:
        self.prefiller.write_all(prefill, **lies)
        self.deliver()

    @property
    def statistics(self) -> DecoderStatistics:
        return self.decoder.messenger.statistics()

    @property
    def num_quarantined(self) -> int:
        self.decoder.messenger.check()
        assert self.decoder.pool.statistics().num_quarantined == self.statistics.num_quarantined_pages
        assert self.decoder.pool.capacity == 24 - self.statistics.num_quarantined_pages
        return self.statistics.num_quarantined_pages

    @property
    def suspected(self) -> list[PeerSuspected]:
        return [outcome for outcome in self.decoder.outcomes if isinstance(outcome, PeerSuspected)]

    def answer_of(self, request: Request) -> TicketFailed:
        [answer] = request.answers
        assert isinstance(answer, TicketFailed), answer
        return answer

    def everything_is_back(self) -> None:
        for request in list(self.decoder.requests.values()):
            assert len(request.answers) == 1, f"{request.request_id} was answered {request.answers}"
            self.decoder.finish(request)
        self.decoder.pool.look()
        self.decoder.messenger.check()
        pages = self.decoder.pool.statistics()
        assert (self.statistics.num_open, pages.num_held, pages.num_quarantined) == (0, 0, 0)
        assert self.decoder.fabric.statistics().num_counters_now == 0

    def next_epoch_works(self) -> None:
        """The prefiller answers its new Hello, and a ticket is served under it."""
        assert not self.decoder.messenger.is_ready(self.peer)
        self.prefiller.answer()
        self.deliver()
        assert self.decoder.messenger.is_ready(self.peer)
        request, prefill = self.open(tuple(range(50, 60)), name="of the next epoch")
        assert prefill.ticket.epoch == self.prefiller.heard(Hello)[-1].epoch > 1
        self.write_all(prefill)
        assert isinstance(request.answers[0], Ready)


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
    "a deadline in the past": ({"remaining_s": -0.1}, "remaining_s"),
    "a deadline that is no number": ({"remaining_s": float("nan")}, "remaining_s"),
}


def ticket_request(pair: Pair, **changes: Any) -> TicketRequest:
    right = TicketRequest(
        request_id="a",
        prefiller=pair.peer,
        lease="lease",
        token_ids=PROMPT,
        cached_len=0,
        pages=(0, 1, 2, 3),
        hashes=(),
        remaining_s=30.0,
    )
    return replace(right, **changes)


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
    pair = Pair()
    pair.decoder = DecoderProcess(pair.site, pool_layout(100))
    request = ticket_request(pair, token_ids=tuple(range(290)), pages=tuple(range(73)))
    with pytest.raises(InputError) as refusal:
        pair.decoder.messenger.try_open_ticket(request, 0.0)
    assert refusal.value.field == "token_ids"


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
    assert pair.answer_of(request).reason == "corrupt"
    assert pair.decoder.pool.statistics().num_indexed == 0
    assert pair.statistics.num_wrong_bytes == 1
    pair.everything_is_back()


# ---- refused, failed, cancelled --------------------------------------------------------------------------------


def test_a_refusal_gives_everything_back_at_once_and_says_when_to_come_again(pair: Pair) -> None:
    request, prefill = pair.open()
    pair.say(Refused, prefill)
    answer = pair.answer_of(request)
    assert (answer.reason, answer.text, answer.retry_after_s) == ("refused", "no_room: full", 0.5)
    assert pair.num_quarantined == 0
    pair.say(Refused, prefill)
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
    assert pair.answer_of(request).reason == "lost_write"
    assert pair.statistics.num_wrong_bytes == 1
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
    told_less_than_arrived,
    wrote_more_than_told,
)
AT_ONCE: tuple[Contradiction, ...] = (told_more_than_there_is, told_closed_short, told_failed_after_closed)


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
    assert pair.answer_of(request).reason == ("fault" if contradict in AT_ONCE else "failed")
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


@pytest.mark.parametrize("contradict", AT_ONCE, ids=lambda made: made.__name__)
def test_a_contradiction_says_what_was_contradicted(contradict: Contradiction, pair: Pair) -> None:
    request, prefill = pair.open()
    contradict(pair, prefill)
    assert "contradicts itself" in pair.answer_of(request).text
    assert pair.suspected[0].text == pair.answer_of(request).text
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
    pair.prefiller.say(pair.prefiller.peer, Granted(sender="0" * 32, request_id="a", lease="1"))
    pair.deliver()
    assert pair.statistics.num_strange_messages == 3
    pair.write_all(prefill)
    assert isinstance(request.answers[0], Ready)
    pair.everything_is_back()


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
    """A deadline, a lost write, patience and a Hello that is repeated, one after the other."""
    pair.open(remaining_s=9.0, name="deadline")
    _, lost = pair.open(tuple(range(9)), name="lost")
    pair.say(TicketClosed, lost, num_posted=2 * LAYERS + 1)

    def state() -> tuple[Any, ...]:
        fabric = pair.decoder.fabric.statistics()
        return pair.statistics, len(pair.decoder.outcomes), fabric.num_messages_sent

    dues: list[float] = []
    while len(dues) < 6:
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
    assert dues == [LOST_S, revoked, *(round(revoked + after, 3) for after in (0.25, 0.75, 1.75, 3.75))]


def test_with_no_ticket_and_no_greeting_nothing_is_ever_due(pair: Pair) -> None:
    assert pair.decoder.messenger.next_due() is None
    _, prefill = pair.open()
    assert pair.decoder.messenger.next_due() == pair.site.now + 30.0
    pair.write_all(prefill)
    assert pair.decoder.messenger.next_due() is None
