"""The prefiller's messenger against a decoder made by hand: what it refuses, posts, tells and gives back, and when."""

from collections.abc import Callable
from typing import Any

import pytest
from kv_world import KV, LoopbackSite, PrefillerProcess, pool_layout
from puppet import PuppetDecoder

from headrace.errors import InputError
from headrace.messenger.leases import UNUSED_LEASE_S
from headrace.messenger.prefiller import Chunk, PrefillerOptions
from headrace.protocol.messages import (
    Cancel,
    CancelAck,
    Failed,
    Granted,
    Prefill,
    Refused,
    Reserve,
    Ticket,
    TicketClosed,
    Wait,
    encode,
)
from headrace.testing import Faults

LAYERS, PAGE = KV.num_layers, KV.page_size
LATE = Faults(late_completion=1.0, late_s=(5.0, 5.0))
PROMPT = tuple(range(100, 114))  # 13 tokens to prefill: three whole pages and a tail page, two steps of at most 8
NUM_PAGES, EXPECTED = 4, 4 * LAYERS + 1


class Pair:
    """A real prefiller and a puppet decoder, greeted."""

    def __init__(self, *, num_pages: int = 24, num_aux_slots: int = 8, decoder_pages: int = 100) -> None:
        self.site = LoopbackSite(seed=1)
        layout = pool_layout(num_pages, num_aux_slots=num_aux_slots)
        options = PrefillerOptions(lease_tokens=64, reserve_tokens=16, retry_after_s=0.5)
        self.prefiller = PrefillerProcess(self.site, layout, options=options)
        self.decoder = self.another_decoder(decoder_pages)

    def another_decoder(self, num_pages: int = 100) -> PuppetDecoder:
        made = PuppetDecoder(self.site, pool_layout(num_pages), self.prefiller.fabric.address)
        made.greet()
        self.deliver()
        return made

    def deliver(self) -> None:
        """All that is due now; the clock stands still, so late completions stay outstanding."""
        self.prefiller.turn()
        while self.site.network.step():
            self.prefiller.turn()

    def settle(self) -> None:
        """Until nothing moves any more, late completions and all."""
        for _ in range(2):  # what the last turn sent arrives, too
            self.site.settle(self.prefiller)

    def ask(self, token_ids: tuple[int, ...] = PROMPT, *, request_id: str = "a", **changes: Any) -> Prefill:
        lease = self.prefiller.lease(request_id, max(1, len(token_ids)))
        assert lease is not None
        message = self.decoder.prefill(token_ids, **{"lease": lease, "request_id": request_id, **changes})
        self.decoder.say(self.decoder.peer, message)
        self.deliver()
        return message

    def step(self, layers: int = LAYERS, *, end: bool = True) -> None:
        assert self.prefiller.begin_step()
        for _ in range(layers):
            self.prefiller.compute_layer()
            self.deliver()
        if end:
            self.prefiller.end_step()
            self.deliver()

    def compute_everything(self) -> None:
        self.deliver()
        if self.prefiller.running is not None:
            while self.prefiller.compute_layer():
                self.deliver()
            self.prefiller.end_step()
        while self.prefiller.begin_step():
            while self.prefiller.compute_layer():
                self.deliver()
            self.prefiller.end_step()
            self.deliver()

    @property
    def num_accepted(self) -> int:
        return self.prefiller.messenger.statistics().num_accepted

    @property
    def num_held(self) -> int:
        return self.prefiller.pool.statistics().num_held

    def everything_is_back(self) -> None:
        statistics = self.prefiller.messenger.statistics()
        assert (statistics.num_tickets, statistics.num_leased_tokens, statistics.num_held_pages) == (0, 0, 0)
        assert self.num_held == 0
        self.prefiller.messenger.check()
        assert self.prefiller.fabric.statistics().num_transfers_now == 0


@pytest.fixture
def pair() -> Pair:
    return Pair()


# ---- refused ---------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown lease": ({"lease": "unknown"}, "no_lease"),
    "a page beyond the pool": ({"pages": (0, 1, 2, 100)}, "malformed"),
    "an aux slot beyond the pool": ({"aux_slot": 8}, "malformed"),
    "more pages than the prompt has": ({"pages": (0, 1, 2, 3, 4)}, "malformed"),
    "no pages": ({"pages": ()}, "malformed"),
    "no prompt": ({"token_ids": ()}, "malformed"),
    "a prompt with nothing to prefill": ({"token_ids": (1,), "pages": (0,)}, "malformed"),
    "more tokens than our pool has": ({"token_ids": tuple(range(98)), "pages": tuple(range(25))}, "too_long"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_and_nothing_is_ever_written_for_it(wrong: str, pair: Pair) -> None:
    changes, reason = WRONG[wrong]
    message = pair.ask(**changes)
    [refused] = pair.decoder.heard(Refused)
    assert (refused.ticket, refused.reason) == (message.ticket, reason)
    assert refused.text
    right = {"token_ids": PROMPT, "pages": (0, 1, 2, 3), "aux_slot": 0}
    lease = pair.prefiller.lease("again", len(PROMPT))
    assert lease is not None
    again = pair.decoder.prefill(request_id="again", lease=lease, **right)
    for late in (message, type(message)(**{**_fields(again), "ticket": message.ticket})):
        pair.decoder.say(pair.decoder.peer, late)  # a second copy, and a right one under the same ticket
        pair.deliver()
    pair.compute_everything()
    assert len(pair.decoder.heard(Refused)) == 1
    assert pair.decoder.num_arrivals(message.ticket) == 0
    assert pair.num_accepted == 0
    assert pair.prefiller.messenger.statistics().num_refused == {reason: 1}
    pair.site.network.advance(UNUSED_LEASE_S)
    pair.settle()
    pair.everything_is_back()


def _fields(message: Prefill) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_prompt_with_more_pages_than_an_aux_slot_has_digests_for_is_too_long() -> None:
    pair = Pair(num_pages=100)
    pair.ask(tuple(range(290)))
    assert [refused.reason for refused in pair.decoder.heard(Refused)] == ["too_long"]


def test_a_lease_of_another_request_is_still_good_for_that_one(pair: Pair) -> None:
    theirs = pair.prefiller.lease("theirs", 14)
    message = pair.ask(request_id="mine", lease=theirs)
    assert [refused.ticket for refused in pair.decoder.heard(Refused)] == [message.ticket]
    pair.ask(request_id="theirs", lease=theirs)
    pair.compute_everything()
    assert [refused.ticket for refused in pair.decoder.heard(Refused)] == [message.ticket]
    assert len(pair.decoder.heard(TicketClosed)) == 1


def test_a_lease_that_was_used_is_refused_and_the_ticket_that_used_it_goes_on(pair: Pair) -> None:
    first = pair.ask()
    second = pair.ask(tuple(range(20)), lease=first.lease)
    assert [(r.ticket, r.reason) for r in pair.decoder.heard(Refused)] == [(second.ticket, "no_lease")]
    leased = pair.prefiller.messenger.statistics().num_leased_tokens
    assert leased == len(PROMPT) + 20, "the running ticket lost its lease, or the one that nobody used is gone"
    pair.compute_everything()
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)] == [first.ticket]


def test_a_lease_that_expired_is_refused(pair: Pair) -> None:
    lease = pair.prefiller.lease("a", 14)
    assert lease is not None
    pair.site.network.advance(UNUSED_LEASE_S)
    pair.settle()
    pair.decoder.say(pair.decoder.peer, pair.decoder.prefill(PROMPT, lease))
    pair.settle()
    assert [refused.reason for refused in pair.decoder.heard(Refused)] == ["no_lease"]


@pytest.mark.parametrize("scarce", [{"num_pages": 7}, {"num_aux_slots": 1}])
def test_without_room_a_ticket_is_refused_and_may_come_again_when_there_is_some(scarce: dict[str, int]) -> None:
    pair = Pair(**scarce)
    pair.ask()
    second = pair.ask(tuple(range(15)), request_id="b")
    [refused] = pair.decoder.heard(Refused)
    assert (refused.ticket, refused.reason, refused.retry_after_s) == (second.ticket, "no_room", 0.5)
    pair.compute_everything()
    third = pair.ask(tuple(range(15)), request_id="b")
    pair.compute_everything()
    assert pair.decoder.num_arrivals(second.ticket) == 0
    assert pair.decoder.num_arrivals(third.ticket) == EXPECTED
    pair.everything_is_back()


def test_a_decoder_that_does_not_take_its_pages_is_refused_beyond_its_cap_and_others_are_not(pair: Pair) -> None:
    pair.site.network.faults = LATE
    for i in range(3):
        pair.ask(tuple(range(20 * i, 20 * i + 14)), request_id=f"r{i}")
        pair.compute_everything()
    assert pair.prefiller.messenger.statistics().num_held_pages == 12
    refused_one = pair.ask(tuple(range(80, 90)), request_id="beyond")
    [refused] = pair.decoder.heard(Refused)
    assert (refused.ticket, refused.reason) == (refused_one.ticket, "held_cap")
    first, pair.decoder = pair.decoder, pair.another_decoder()
    pair.ask(tuple(range(80, 90)), request_id="of another")
    assert pair.decoder.heard(Refused) == []
    pair.compute_everything()
    pair.settle()
    pair.decoder = first
    pair.ask(tuple(range(90, 99)), request_id="later")
    pair.compute_everything()
    pair.settle()
    assert len(first.heard(Refused)) == 1
    pair.everything_is_back()


# ---- served ----------------------------------------------------------------------------------------------------


def test_a_ticket_that_is_served_is_closed_with_its_count_and_leaves_nothing(pair: Pair) -> None:
    message = pair.ask()
    pair.compute_everything()
    pair.settle()
    [closed] = pair.decoder.heard(TicketClosed)
    assert (closed.ticket, closed.num_posted) == (message.ticket, EXPECTED)
    assert pair.decoder.num_arrivals(message.ticket) == EXPECTED
    pair.everything_is_back()


def test_each_layer_is_sent_when_it_is_computed_and_not_before(pair: Pair) -> None:
    message = pair.ask()
    assert pair.decoder.num_arrivals(message.ticket) == 0
    assert pair.prefiller.begin_step()
    for layer in range(LAYERS):
        assert pair.decoder.num_arrivals(message.ticket) == 2 * layer
        pair.prefiller.compute_layer()
        pair.deliver()
    assert pair.decoder.num_arrivals(message.ticket) == 2 * LAYERS


def test_a_prompt_that_the_prefiller_has_needs_no_step(pair: Pair) -> None:
    prompt = tuple(range(13))  # 12 tokens to prefill, whole pages
    pair.ask(prompt)
    pair.compute_everything()
    again = pair.ask(prompt, request_id="b")
    assert pair.prefiller.prompts == {}
    pair.settle()
    assert pair.decoder.num_arrivals(again.ticket) == 3 * LAYERS + 1
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)][-1] == again.ticket
    pair.everything_is_back()


def test_what_the_prefiller_has_of_a_prompt_is_sent_before_any_step(pair: Pair) -> None:
    pair.ask(tuple(range(9)))
    pair.compute_everything()
    again = pair.ask(tuple(range(14)), request_id="b")
    assert pair.decoder.num_arrivals(again.ticket) == 2 * LAYERS
    [prompt] = pair.prefiller.prompts.values()
    assert prompt.job.cached_len == 8
    assert pair.prefiller.messenger.statistics().num_leased_tokens == 14 - 8
    pair.compute_everything()
    assert pair.decoder.num_arrivals(again.ticket) == EXPECTED


def test_pages_are_indexed_when_their_step_is_committed_and_the_tail_page_never(pair: Pair) -> None:
    def num_indexed() -> int:
        return pair.prefiller.pool.statistics().num_indexed

    pair.ask()
    pair.step(end=False)
    assert num_indexed() == 0
    pair.prefiller.end_step()
    assert num_indexed() == 2
    pair.step()
    assert num_indexed() == 3


def test_pages_of_a_failed_step_are_not_indexed(pair: Pair) -> None:
    pair.ask()
    pair.step(end=False)
    pair.prefiller.end_step(fail=True)
    pair.settle()
    assert pair.prefiller.pool.statistics().num_indexed == 0
    pair.everything_is_back()


# ---- moments of a ticket's life --------------------------------------------------------------------------------


def moment_queued(pair: Pair) -> None:
    pass


def moment_in_a_step(pair: Pair) -> None:
    pair.step(1, end=False)


def moment_between_steps(pair: Pair) -> None:
    pair.step()


def moment_last_step_computed(pair: Pair) -> None:
    pair.step()
    pair.step(end=False)


def moment_all_posted(pair: Pair) -> None:
    pair.site.network.faults = LATE
    pair.compute_everything()


def moment_closed(pair: Pair) -> None:
    pair.compute_everything()


Moment = Callable[[Pair], None]
POSTED: dict[Moment, int] = {
    moment_queued: 0,
    moment_in_a_step: 2,
    moment_between_steps: 2 * LAYERS,
    moment_last_step_computed: EXPECTED,
    moment_all_posted: EXPECTED,
    moment_closed: EXPECTED,
}
at_every_moment = pytest.mark.parametrize("moment", POSTED, ids=lambda moment: moment.__name__)


@at_every_moment
def test_a_cancel_is_answered_alike_as_often_as_it_is_repeated_and_nothing_follows_it(
    moment: Moment, pair: Pair
) -> None:
    message = pair.ask()
    moment(pair)
    for _ in range(2):
        pair.decoder.cancel(message.ticket)
        pair.deliver()
    pair.compute_everything()
    pair.settle()
    pair.decoder.cancel(message.ticket)
    pair.settle()
    acknowledged = [(ack.ticket, ack.num_posted, ack.num_unknown) for ack in pair.decoder.heard(CancelAck)]
    assert acknowledged == [(message.ticket, POSTED[moment], 0)] * 3
    assert pair.decoder.num_arrivals(message.ticket) == POSTED[moment]
    assert pair.decoder.heard(Failed) == []
    pair.everything_is_back()


@at_every_moment
def test_a_second_copy_of_a_prefill_is_ignored(moment: Moment, pair: Pair) -> None:
    message = pair.ask()
    moment(pair)
    pair.decoder.say(pair.decoder.peer, message)
    pair.deliver()
    pair.compute_everything()
    pair.settle()
    assert pair.num_accepted == 1
    assert pair.decoder.heard(Refused) == []
    assert pair.decoder.num_arrivals(message.ticket) == EXPECTED
    assert [closed.num_posted for closed in pair.decoder.heard(TicketClosed)] == [EXPECTED]
    pair.everything_is_back()


@at_every_moment
def test_a_newer_epoch_ends_the_tickets_of_the_older_without_a_word_and_serves_new_ones(
    moment: Moment, pair: Pair
) -> None:
    old = pair.ask()
    moment(pair)
    pair.decoder.listen()
    told = len(pair.decoder.heard(TicketClosed))
    pair.decoder.greet()
    pair.deliver()
    pair.compute_everything()
    pair.settle()
    assert pair.decoder.num_arrivals(old.ticket) == POSTED[moment]
    assert pair.decoder.heard(Failed) == []
    assert len(pair.decoder.heard(TicketClosed)) == told
    pair.everything_is_back()
    new = pair.ask(tuple(range(14)), request_id="new")
    pair.compute_everything()
    pair.settle()
    assert pair.decoder.num_arrivals(new.ticket) == EXPECTED
    pair.everything_is_back()


@at_every_moment
def test_a_decoder_that_exits_leaves_nothing_behind_and_disturbs_nobody(moment: Moment, pair: Pair) -> None:
    gone, pair_decoder = pair.decoder, pair.another_decoder()
    pair.ask()
    moment(pair)
    peer = pair.prefiller.decoders[gone.identity.uuid]
    pair.site.network.kill(gone.fabric)
    for _ in range(2):
        pair.prefiller.messenger.peer_exited(peer, pair.site.now)
    pair.deliver()
    assert (pair.num_held > 0) == (pair.prefiller.running is not None), "the pages are the running step's, or free"
    pair.decoder = pair_decoder
    other = pair.ask(tuple(range(14)), request_id="other")
    pair.compute_everything()
    pair.settle()
    assert pair_decoder.num_arrivals(other.ticket) == EXPECTED
    pair.everything_is_back()
    assert pair.prefiller.fabric.statistics().num_peers_now == 1


@pytest.mark.parametrize("moment", [moment_queued, moment_in_a_step, moment_between_steps, moment_all_posted])
def test_at_its_deadline_a_ticket_fails_with_what_was_posted(moment: Moment, pair: Pair) -> None:
    message = pair.ask(remaining_s=1.0)
    moment(pair)
    pair.site.network.advance(1.0)
    pair.deliver()
    pair.compute_everything()
    pair.settle()
    [failed] = pair.decoder.heard(Failed)
    assert (failed.ticket, failed.num_posted) == (message.ticket, POSTED[moment])
    assert "deadline" in failed.reason
    assert pair.decoder.num_arrivals(message.ticket) == POSTED[moment]
    pair.everything_is_back()


@pytest.mark.parametrize("layers", range(LAYERS))
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_step_that_fails_in_the_middle_posts_its_computed_layers_and_no_more(
    steps_before: int, layers: int, pair: Pair
) -> None:
    message = pair.ask()
    for _ in range(steps_before):
        pair.step()
    pair.step(layers, end=False)
    pair.prefiller.end_step(fail=True)
    pair.prefiller.fabric.raise_layers(100 * 1024)
    pair.settle()
    [failed] = pair.decoder.heard(Failed)
    assert failed.num_posted == steps_before * 2 * LAYERS + layers * 2
    assert (failed.num_unknown, failed.reason) == (0, "the step failed")
    assert pair.decoder.num_arrivals(message.ticket) == failed.num_posted
    pair.everything_is_back()


def test_a_step_that_fails_after_its_last_write_takes_nothing_back(pair: Pair) -> None:
    message = pair.ask()
    moment_last_step_computed(pair)
    pair.prefiller.end_step(fail=True)
    pair.settle()
    assert [closed.num_posted for closed in pair.decoder.heard(TicketClosed)] == [EXPECTED]
    assert pair.decoder.heard(Failed) == []
    assert pair.decoder.num_arrivals(message.ticket) == EXPECTED
    pair.everything_is_back()


def test_a_write_that_completes_in_error_fails_the_ticket_and_is_told_as_unknown(pair: Pair) -> None:
    message = pair.ask()
    pair.step()
    pair.site.network.faults = Faults(lose_write_with_error=1.0)
    pair.step(1, end=False)
    pair.compute_everything()
    pair.settle()
    [failed] = pair.decoder.heard(Failed)
    assert failed.num_unknown >= 1
    assert failed.num_posted - failed.num_unknown == pair.decoder.num_arrivals(message.ticket)
    pair.decoder.cancel(message.ticket)
    pair.settle()
    [ack] = pair.decoder.heard(CancelAck)
    assert (ack.num_posted, ack.num_unknown) == (failed.num_posted, failed.num_unknown)
    pair.everything_is_back()


# ---- cancelled, late or strange --------------------------------------------------------------------------------


def test_a_cancel_that_comes_first_is_acknowledged_with_nothing_and_the_prefill_never_runs(pair: Pair) -> None:
    lease = pair.prefiller.lease("a", 14)
    assert lease is not None
    message = pair.decoder.prefill(PROMPT, lease)
    pair.decoder.cancel(message.ticket)
    pair.deliver()
    pair.decoder.say(pair.decoder.peer, message)
    pair.deliver()
    pair.decoder.cancel(message.ticket)
    pair.compute_everything()
    pair.settle()
    assert [(ack.num_posted, ack.num_unknown) for ack in pair.decoder.heard(CancelAck)] == [(0, 0)] * 2
    assert pair.num_accepted == 0
    assert pair.decoder.num_arrivals(message.ticket) == 0
    pair.everything_is_back()


def test_a_late_prefill_of_an_earlier_use_of_the_slot_never_runs(pair: Pair) -> None:
    lease = pair.prefiller.lease("late", 14)
    assert lease is not None
    old = pair.decoder.prefill(PROMPT, lease, request_id="late")
    newer = Ticket(decoder=old.ticket.decoder, epoch=old.ticket.epoch, imm=old.ticket.imm + (1 << 12))
    pair.ask(request_id="b", ticket=newer, aux_slot=0)
    pair.decoder.say(pair.decoder.peer, old)
    pair.decoder.cancel(old.ticket)
    pair.compute_everything()
    pair.settle()
    assert pair.decoder.num_arrivals(old.ticket) == 0
    assert pair.decoder.num_arrivals(newer) == EXPECTED
    assert pair.decoder.heard(CancelAck) == []
    pair.everything_is_back()


def test_a_prefill_of_an_older_epoch_is_ignored_and_its_lease_ends(pair: Pair) -> None:
    lease = pair.prefiller.lease("a", 14)
    assert lease is not None
    old = pair.decoder.prefill(PROMPT, lease)
    pair.decoder.greet()
    pair.decoder.say(pair.decoder.peer, old)
    pair.compute_everything()
    pair.settle()
    assert pair.decoder.num_arrivals(old.ticket) == 0
    assert pair.decoder.heard(Refused) == []
    pair.everything_is_back()


def test_what_is_remembered_of_a_slot_ends_with_its_epoch(pair: Pair) -> None:
    old = pair.ask()
    pair.compute_everything()
    pair.settle()
    pair.decoder.greet()
    pair.deliver()
    same_imm = Ticket(decoder=old.ticket.decoder, epoch=2, imm=old.ticket.imm)
    pair.ask(tuple(range(14)), request_id="new", ticket=same_imm, aux_slot=0)
    pair.compute_everything()
    pair.settle()
    assert pair.decoder.num_arrivals(same_imm) == 2 * EXPECTED
    pair.everything_is_back()


def test_messages_from_strangers_about_others_tickets_or_of_no_sense_are_dropped_and_counted(pair: Pair) -> None:
    message = pair.ask()
    other = pair.another_decoder()
    stranger = PuppetDecoder(pair.site, pool_layout(8), pair.prefiller.fabric.address)
    other.cancel(message.ticket)  # another's ticket
    stranger.cancel(Ticket(decoder=stranger.identity.uuid, epoch=1, imm=5))  # never said Hello
    stranger.say(stranger.peer, stranger.prefill(PROMPT, "1"))
    other.say(other.peer, b"\xc1 no message")
    other.say(other.peer, encode(CancelAck(sender="0" * 32, ticket=message.ticket, num_posted=0, num_unknown=0)))
    other.say(other.peer, Reserve(sender="0" * 32, request_id="x", num_tokens=1, tier="flex", remaining_s=1.0))
    pair.compute_everything()
    pair.settle()
    assert pair.prefiller.messenger.statistics().num_strange_messages == 6
    assert pair.decoder.num_arrivals(message.ticket) == EXPECTED
    assert other.heard(CancelAck) == stranger.heard(CancelAck) == []
    pair.everything_is_back()


def test_a_cancel_under_a_forged_sender_does_not_reach_another_decoders_ticket(pair: Pair) -> None:
    message = pair.ask()
    other = pair.another_decoder()
    other.say(other.peer, Cancel(sender=other.identity.uuid, ticket=message.ticket))
    pair.deliver()
    assert pair.prefiller.messenger.statistics().num_strange_messages == 1
    assert len(pair.prefiller.prompts) == 1


# ---- steps -----------------------------------------------------------------------------------------------------


def test_a_chunk_that_does_not_continue_its_prompt_is_refused_and_a_right_one_still_goes(pair: Pair) -> None:
    ticket = pair.ask().ticket
    unknown = Ticket(decoder=ticket.decoder, epoch=ticket.epoch, imm=ticket.imm + 1)
    begin_step = pair.prefiller.messenger.begin_step

    def chunk(begin: int, end: int, of: Ticket = ticket) -> Chunk:
        return Chunk(ticket=of, begin=begin, end=end)

    for chunks in ([chunk(4, 8)], [chunk(0, 0)], [chunk(0, 14)], [chunk(0, 8, unknown)], [chunk(0, 8), chunk(0, 8)]):
        with pytest.raises(InputError) as refusal:
            begin_step(1, chunks)
        assert refusal.value.field == "chunk"
    pair.step(end=False)
    with pytest.raises(InputError, match="not waiting for a step"):
        begin_step(2, [chunk(8, 13)])
    pair.compute_everything()
    pair.settle()
    assert pair.decoder.num_arrivals(ticket) == EXPECTED
    pair.everything_is_back()


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_that_does_not_rise_is_refused_and_its_tickets_are_not_stuck(step: int, pair: Pair) -> None:
    message = pair.ask()
    pair.step()
    with pytest.raises(InputError) as refusal:
        pair.prefiller.messenger.begin_step(step, [Chunk(ticket=message.ticket, begin=8, end=13)])
    assert refusal.value.field == "step"
    pair.compute_everything()
    pair.settle()
    assert pair.decoder.num_arrivals(message.ticket) == EXPECTED
    pair.everything_is_back()


def test_a_dropped_ticket_is_not_waiting_for_a_step(pair: Pair) -> None:
    message = pair.ask()
    pair.decoder.cancel(message.ticket)
    pair.deliver()
    assert pair.prefiller.prompts == {}, "the role was not told"
    with pytest.raises(InputError):
        pair.prefiller.messenger.begin_step(1, [Chunk(ticket=message.ticket, begin=0, end=8)])


# ---- timers and leases -----------------------------------------------------------------------------------------


def test_nothing_is_due_before_next_due_and_something_is_at_it(pair: Pair) -> None:
    pair.ask(remaining_s=5.0)
    pair.prefiller.lease("unused", 10)
    refused = PuppetDecoder(pair.site, pool_layout(8), pair.prefiller.fabric.address)
    refused.say(refused.peer, refused.hello(fingerprint="another"))
    pair.deliver()

    def state() -> tuple[Any, ...]:
        statistics = pair.prefiller.messenger.statistics()
        return statistics, pair.prefiller.fabric.statistics().num_peers_now, len(pair.prefiller.prompts)

    dues = []
    while (due := pair.prefiller.messenger.next_due()) is not None:
        before = state()
        pair.site.network.advance(due - pair.site.now - 1e-6)
        pair.deliver()
        assert state() == before, f"something happened before {due}"
        assert pair.prefiller.messenger.next_due() == due
        pair.site.network.advance(due - pair.site.now)
        pair.deliver()
        assert state() != before, f"nothing happened at {due}"
        dues.append(round(due, 3))
    assert dues == [2.0, 5.0]
    pair.settle()
    pair.everything_is_back()


def test_a_gateway_is_granted_a_lease_told_to_wait_and_may_return_it(pair: Pair) -> None:
    messenger = pair.prefiller.messenger

    def reserve(name: str, num_tokens: int) -> Granted | Wait:
        message = Reserve(sender="0" * 32, request_id=name, num_tokens=num_tokens, tier="interactive", remaining_s=1.0)
        answer = messenger.reserve(message, pair.site.now)
        assert (answer.sender, answer.request_id) == (pair.prefiller.identity.uuid, name)
        return answer

    granted = reserve("a", 60)
    assert isinstance(granted, Granted)
    waiting = reserve("b", 20)
    assert isinstance(waiting, Wait)
    assert waiting.num_queued_tokens == 60
    for _ in range(2):
        messenger.return_lease(granted.lease)
    assert isinstance(reserve("b", 20), Granted)
    pair.site.network.advance(UNUSED_LEASE_S)
    assert isinstance(reserve("c", 64), Granted), "an expired lease still counts"
