"""A ticket that is served: what is posted when, which steps are taken, and what is due when."""

from typing import Any

import pytest
from kv_world import pool_layout
from prefiller_pair import EXPECTED, LATE, LAYERS, PROMPT, Pair
from puppet import PuppetDecoder

from headrace.errors import InputError
from headrace.messenger.jobs import Chunk, PrefillerOptions, Transfer
from headrace.protocol.messages import CancelAck, Failed, Ticket, TicketClosed


@pytest.fixture
def pair() -> Pair:
    return Pair()


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


def test_only_whole_pages_are_indexed_wherever_chunks_end(pair: Pair) -> None:
    ticket, messenger = pair.ask().ticket, pair.prefiller.messenger
    for step, (begin, end, whole) in enumerate([(0, 3, 0), (3, 6, 1), (6, 9, 2), (9, 13, 3)], start=1):
        messenger.begin_step(step, [Chunk(ticket=ticket, begin=begin, end=end)])
        messenger.commit_step(step, pair.site.now)
        assert pair.prefiller.pool.statistics().num_indexed == whole


def test_a_lease_shrinks_with_every_committed_step_and_makes_room_for_the_next(pair: Pair) -> None:
    pair.ask(tuple(range(60)))  # of 64
    assert pair.prefiller.lease("b", 20) is None
    assert pair.prefiller.messenger.statistics().num_leased_tokens == 60
    pair.step()
    pair.step()
    assert pair.prefiller.messenger.statistics().num_leased_tokens == 60 - 16
    assert pair.prefiller.lease("b", 20) is not None


def test_a_ticket_cancelled_during_a_step_that_then_fails_gives_its_pages_back(pair: Pair) -> None:
    message = pair.ask()
    pair.step(1, end=False)
    pair.decoder.cancel(message.ticket)
    pair.deliver()
    pair.prefiller.end_step(fail=True)
    pair.settle()
    pair.everything_is_back()


def test_pages_of_a_failed_step_are_not_indexed(pair: Pair) -> None:
    pair.ask()
    pair.step(end=False)
    pair.prefiller.end_step(fail=True)
    pair.settle()
    assert pair.prefiller.pool.statistics().num_indexed == 0
    pair.everything_is_back()


# ---- whole -----------------------------------------------------------------------------------------------------


@pytest.fixture
def whole() -> Pair:
    return Pair(transfer="whole")


def test_whole_nothing_is_sent_before_the_last_step_is_committed_and_then_everything(whole: Pair) -> None:
    message = whole.ask()
    whole.step()
    whole.step(end=False)
    assert whole.decoder.num_arrivals(message.ticket) == 0
    whole.prefiller.end_step()
    whole.settle()
    assert [closed.num_posted for closed in whole.decoder.heard(TicketClosed)] == [EXPECTED]
    assert whole.decoder.num_arrivals(message.ticket) == EXPECTED
    whole.everything_is_back()


def test_whole_what_the_prefiller_has_of_a_prompt_waits_for_the_rest_of_it(whole: Pair) -> None:
    whole.ask(tuple(range(9)))
    whole.compute_everything()
    again = whole.ask(tuple(range(14)), request_id="b")
    [prompt] = whole.prefiller.prompts.values()
    assert prompt.job.cached_len == 8
    whole.step(end=False)
    assert whole.decoder.num_arrivals(again.ticket) == 0
    whole.prefiller.end_step()
    whole.settle()
    assert whole.decoder.num_arrivals(again.ticket) == EXPECTED
    whole.everything_is_back()


def test_whole_a_prompt_that_the_prefiller_has_is_sent_without_a_step(whole: Pair) -> None:
    prompt = tuple(range(13))
    whole.ask(prompt)
    whole.compute_everything()
    again = whole.ask(prompt, request_id="b")
    assert whole.prefiller.prompts == {}
    whole.settle()
    assert whole.decoder.num_arrivals(again.ticket) == 3 * LAYERS + 1
    assert [closed.ticket for closed in whole.decoder.heard(TicketClosed)][-1] == again.ticket
    whole.everything_is_back()


def test_whole_each_prompt_of_a_step_is_sent_when_its_own_last_chunk_is_committed(whole: Pair) -> None:
    short, long = whole.ask(tuple(range(5))), whole.ask(tuple(range(50, 60)), request_id="b")
    whole.step()  # all of the one, and a part of the other
    assert whole.decoder.num_arrivals(short.ticket) == LAYERS + 1
    assert whole.decoder.num_arrivals(long.ticket) == 0
    whole.step()
    whole.settle()
    assert whole.decoder.num_arrivals(long.ticket) == 3 * LAYERS + 1
    assert {closed.ticket for closed in whole.decoder.heard(TicketClosed)} == {short.ticket, long.ticket}
    whole.everything_is_back()


def test_whole_a_prompt_that_was_cancelled_in_its_last_step_is_not_sent_and_its_neighbour_is(whole: Pair) -> None:
    gone, stays = whole.ask(tuple(range(5))), whole.ask(tuple(range(50, 54)), request_id="b")
    whole.step(end=False)
    whole.decoder.cancel(gone.ticket)
    whole.deliver()
    whole.prefiller.end_step()
    whole.settle()
    assert [(ack.ticket, ack.num_posted) for ack in whole.decoder.heard(CancelAck)] == [(gone.ticket, 0)]
    assert whole.decoder.num_arrivals(gone.ticket) == 0
    assert whole.decoder.num_arrivals(stays.ticket) == LAYERS + 1
    whole.everything_is_back()


def test_whole_pages_are_kept_until_they_are_written(whole: Pair) -> None:
    whole.site.network.faults = LATE
    message = whole.ask()
    whole.compute_everything()
    whole.deliver()
    assert whole.decoder.num_arrivals(message.ticket) == EXPECTED
    statistics = whole.prefiller.messenger.statistics()
    assert (whole.num_held, statistics.num_held_pages, statistics.num_leased_tokens) == (4, 4, 0)
    whole.settle()
    whole.everything_is_back()


def test_whole_no_step_has_a_program(whole: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit_program(*_: object) -> None:
        pytest.fail("a layer would be sent as soon as it is computed")

    monkeypatch.setattr(whole.prefiller.fabric, "submit_program", submit_program)
    whole.ask()
    whole.compute_everything()
    whole.settle()
    assert len(whole.decoder.heard(TicketClosed)) == 1


def test_there_is_no_third_way_to_transfer() -> None:
    with pytest.raises(InputError, match="must be one of layers, whole, is 'half'") as refusal:
        PrefillerOptions(transfer="half")  # type: ignore[arg-type]
    assert refusal.value.field == "transfer"


# ---- the end of a process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", ["layers", "whole"])
def test_a_role_that_ends_fails_its_step_and_then_every_job_that_it_was_given(transfer: Transfer) -> None:
    """Outcomes are drained first: a job that nobody took from there would be nobody's to fail."""
    pair = Pair(transfer=transfer)
    sent = pair.ask(tuple(range(5)))
    pair.compute_everything()
    running = pair.ask(tuple(range(20, 34)), request_id="b")
    waiting = pair.ask(tuple(range(40, 54)), request_id="c")
    pair.step(1, end=False)
    not_told = pair.decoder.prefill(PROMPT, pair.prefiller.lease("d", 14) or "", request_id="d")
    pair.decoder.say(pair.decoder.peer, not_told)
    while pair.site.network.step():
        pass
    pair.prefiller.turn()
    pair.prefiller.end_step(fail=True)
    for ticket in list(pair.prefiller.prompts):
        pair.prefiller.messenger.fail_job(ticket, "it drains", pair.site.now)
    pair.settle()
    failed = {told.ticket: told.num_posted for told in pair.decoder.heard(Failed)}
    assert failed.keys() == {running.ticket, waiting.ticket, not_told.ticket}
    assert failed == {ticket: pair.decoder.num_arrivals(ticket) for ticket in failed}
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)] == [sent.ticket]
    assert pair.prefiller.prompts == {}
    pair.everything_is_back()


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


def test_a_step_that_sends_nothing_has_its_number_too(pair: Pair) -> None:
    message = pair.ask()
    messenger = pair.prefiller.messenger
    messenger.begin_step(1, [Chunk(ticket=message.ticket, begin=0, end=2)])  # completes no page
    messenger.commit_step(1, pair.site.now)
    with pytest.raises(InputError) as refusal:
        messenger.begin_step(1, [Chunk(ticket=message.ticket, begin=2, end=3)])
    assert refusal.value.field == "step"
    messenger.begin_step(2, [Chunk(ticket=message.ticket, begin=2, end=3)])


def test_a_step_that_the_fabric_does_not_take_marks_nothing_and_its_chunks_go_with_the_next(pair: Pair) -> None:
    message = pair.ask()
    pair.prefiller.fabric.submit_program(5, [])  # behind the messenger's back: the fabric takes no lower step now
    begin_step, chunk = pair.prefiller.messenger.begin_step, Chunk(ticket=message.ticket, begin=0, end=8)
    with pytest.raises(InputError):
        begin_step(3, [chunk])
    with pytest.raises(InputError, match="3 is not running"):
        pair.prefiller.messenger.commit_step(3, pair.site.now)
    pair.prefiller.step = 5
    pair.compute_everything()
    pair.settle()
    assert [closed.num_posted for closed in pair.decoder.heard(TicketClosed)] == [EXPECTED]
    pair.everything_is_back()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_that_is_not_running_can_be_neither_committed_nor_failed(step: int, pair: Pair) -> None:
    message = pair.ask()
    pair.step()  # number 1, and it is over
    for end in (
        lambda: pair.prefiller.messenger.commit_step(step, pair.site.now),
        lambda: pair.prefiller.messenger.fail_step(step, "for nothing", pair.site.now),
    ):
        with pytest.raises(InputError, match="is not running") as refusal:
            end()
        assert refusal.value.field == "step"
    pair.compute_everything()
    pair.settle()
    assert pair.decoder.num_arrivals(message.ticket) == EXPECTED
    assert pair.decoder.heard(Failed) == []
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
