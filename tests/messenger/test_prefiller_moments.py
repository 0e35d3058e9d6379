"""Whatever happens to a ticket, at whichever moment of its life: what is posted, told and given back."""

from collections.abc import Callable

import pytest
from prefiller_pair import EXPECTED, LATE, LAYERS, Pair

from headrace.errors import InputError
from headrace.fabric.interface import PeerHeard, PeerSilent
from headrace.protocol.messages import CancelAck, Failed, Refused, TicketClosed
from headrace.testing import Faults


@pytest.fixture(params=["layers", "whole"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(transfer=request.param)


@pytest.fixture
def pair_by_layers() -> Pair:
    return Pair(transfer="layers")


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
"""What is posted by then, layer by layer. Whole, it is nothing before the last step is committed, then everything."""


def num_posted(moment: Moment, pair: Pair) -> int:
    is_committed = moment in (moment_all_posted, moment_closed)
    return POSTED[moment] if pair.transfer == "layers" or is_committed else 0


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
    assert acknowledged == [(message.ticket, num_posted(moment, pair), 0)] * 3
    assert pair.decoder.num_arrivals(message.ticket) == num_posted(moment, pair)
    assert pair.decoder.heard(Failed) == []
    pair.everything_is_back()


@at_every_moment
def test_a_second_copy_of_a_prefill_is_never_run_and_has_no_answer_before_the_first(moment: Moment, pair: Pair) -> None:
    message = pair.ask()
    moment(pair)
    answers = pair.decoder.heard(TicketClosed)
    pair.decoder.say(pair.decoder.peer, message)
    pair.deliver()
    assert pair.decoder.heard(TicketClosed) == 2 * answers
    pair.compute_everything()
    pair.settle()
    assert pair.num_accepted == 1
    assert pair.decoder.heard(Refused) == []
    assert pair.decoder.num_arrivals(message.ticket) == EXPECTED
    closed = pair.decoder.heard(TicketClosed)
    assert [told.num_posted for told in closed] == [EXPECTED] * max(1, 2 * len(answers))
    pair.everything_is_back()


@at_every_moment
def test_a_copy_of_a_prefill_after_its_cancel_is_answered_as_the_cancel_was(moment: Moment, pair: Pair) -> None:
    message = pair.ask()
    moment(pair)
    pair.decoder.cancel(message.ticket)
    pair.deliver()
    [ack] = pair.decoder.heard(CancelAck)
    told = len(pair.decoder.heard(TicketClosed))
    for _ in range(2):  # the engine's step runs, if it did; then everything is over
        pair.decoder.say(pair.decoder.peer, message)
        pair.deliver()
        pair.compute_everything()
        pair.settle()
    assert pair.decoder.heard(CancelAck) == [ack] * 3
    assert len(pair.decoder.heard(TicketClosed)) == told
    assert pair.num_accepted == 1
    assert pair.decoder.num_arrivals(message.ticket) == ack.num_posted == num_posted(moment, pair)
    pair.everything_is_back()


@pytest.mark.parametrize("moment", [moment_queued, moment_in_a_step, moment_between_steps, moment_all_posted])
def test_a_copy_of_a_prefill_after_its_failure_is_told_of_it_again(moment: Moment, pair: Pair) -> None:
    message = pair.ask(remaining_s=1.0)
    moment(pair)
    pair.site.network.advance(1.0)
    pair.deliver()
    [failed] = pair.decoder.heard(Failed)
    for _ in range(2):
        pair.decoder.say(pair.decoder.peer, message)
        pair.deliver()
        pair.compute_everything()
        pair.settle()
    assert pair.decoder.heard(Failed) == [failed] * 3
    assert pair.num_accepted == 1
    assert pair.decoder.num_arrivals(message.ticket) == failed.num_posted
    pair.everything_is_back()


@at_every_moment
def test_a_copy_of_a_prefill_of_an_older_epoch_says_nothing_of_what_was_and_is_never_run(
    moment: Moment, pair: Pair
) -> None:
    message = pair.ask()
    moment(pair)
    pair.decoder.greet()
    pair.deliver()
    pair.decoder.say(pair.decoder.peer, message)
    pair.compute_everything()
    pair.settle()
    pair.decoder.say(pair.decoder.peer, message)
    pair.settle()
    assert {refused.reason for refused in pair.decoder.heard(Refused)} <= {"stale"}
    assert pair.decoder.heard(Refused)[-1].ticket == message.ticket
    assert pair.num_accepted == 1
    assert pair.decoder.num_arrivals(message.ticket) == num_posted(moment, pair)
    pair.everything_is_back()


@pytest.mark.parametrize("moment", [moment_queued, moment_between_steps])
def test_a_job_that_the_engine_gives_up_fails_with_what_was_posted_and_why(moment: Moment, pair: Pair) -> None:
    message = pair.ask()
    moment(pair)
    for _ in range(2):
        pair.prefiller.messenger.fail_job(message.ticket, "it drains", pair.site.now)
    pair.deliver()
    assert pair.prefiller.prompts == {}, "the role was not told"
    pair.settle()
    [failed] = pair.decoder.heard(Failed)
    assert (failed.ticket, failed.reason) == (message.ticket, "it drains")
    assert failed.num_posted == pair.decoder.num_arrivals(message.ticket) == num_posted(moment, pair)
    pair.everything_is_back()


@pytest.mark.parametrize("moment", [moment_in_a_step, moment_last_step_computed])
def test_a_job_in_a_running_step_is_not_given_up_alone(moment: Moment, pair: Pair) -> None:
    message = pair.ask()
    moment(pair)
    with pytest.raises(InputError) as refusal:
        pair.prefiller.messenger.fail_job(message.ticket, "it drains", pair.site.now)
    assert refusal.value.field == "ticket"
    pair.compute_everything()
    pair.settle()
    assert [closed.num_posted for closed in pair.decoder.heard(TicketClosed)] == [EXPECTED]
    pair.everything_is_back()


@pytest.mark.parametrize("moment", [moment_all_posted, moment_closed])
def test_a_job_that_is_computed_is_given_up_by_nobody(moment: Moment, pair: Pair) -> None:
    message = pair.ask()
    moment(pair)
    pair.prefiller.messenger.fail_job(message.ticket, "it drains", pair.site.now)
    pair.settle()
    assert pair.decoder.heard(Failed) == []
    assert pair.decoder.num_arrivals(message.ticket) == EXPECTED
    pair.everything_is_back()


@pytest.mark.parametrize("reason", ["x" * 100_000, "no file named \udcff"])
def test_whatever_reason_a_step_fails_for_its_decoder_is_told(reason: str, pair: Pair) -> None:
    message = pair.ask()
    pair.step(1, end=False)
    pair.prefiller.messenger.fail_step(pair.prefiller.step, reason, pair.site.now)
    pair.settle()
    [failed] = pair.decoder.heard(Failed)
    assert (failed.ticket, failed.reason[:12]) == (message.ticket, reason[:12])
    assert 12 < len(failed.reason) <= 1024


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
    assert pair.decoder.num_arrivals(old.ticket) == num_posted(moment, pair)
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


@at_every_moment
def test_silence_of_a_decoder_ends_nothing_of_its_tickets(moment: Moment, pair: Pair) -> None:
    message = pair.ask()
    moment(pair)
    peer = pair.prefiller.decoders[pair.decoder.identity.uuid]
    pair.prefiller.messenger.handle([PeerSilent(peer=peer), PeerHeard(peer=peer)], pair.site.now)
    pair.compute_everything()
    pair.settle()
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)] == [message.ticket]
    assert pair.decoder.heard(Failed) == []
    pair.everything_is_back()


@at_every_moment
def test_tickets_of_a_decoder_whose_connection_broke_end_by_their_lists_and_no_page_is_kept(
    moment: Moment, pair: Pair
) -> None:
    """Its exit is told by nobody, as on another host; that it is gone is not known here, so it stays a decoder."""
    pair_decoder = pair.another_decoder()
    pair.ask()
    moment(pair)
    pair.site.network.kill(pair.decoder.fabric)
    pair.settle()
    pair.compute_everything()
    pair.settle()
    pair.everything_is_back()
    pair.decoder = pair_decoder
    other = pair.ask(tuple(range(14)), request_id="other")
    pair.compute_everything()
    pair.settle()
    assert pair_decoder.num_arrivals(other.ticket) == EXPECTED
    pair.everything_is_back()


@pytest.mark.parametrize("moment", [moment_queued, moment_in_a_step, moment_between_steps, moment_all_posted])
def test_at_its_deadline_a_ticket_fails_with_what_was_posted(moment: Moment, pair: Pair) -> None:
    message = pair.ask(remaining_s=1.0)
    moment(pair)
    pair.site.network.advance(1.0)
    pair.deliver()
    pair.compute_everything()
    pair.settle()
    [failed] = pair.decoder.heard(Failed)
    assert (failed.ticket, failed.num_posted) == (message.ticket, num_posted(moment, pair))
    assert "deadline" in failed.reason
    assert pair.decoder.num_arrivals(message.ticket) == num_posted(moment, pair)
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
    by_layers = steps_before * 2 * LAYERS + layers * 2
    assert failed.num_posted == (by_layers if pair.transfer == "layers" else 0)
    assert (failed.num_unknown, failed.reason) == (0, "the step failed")
    assert pair.decoder.num_arrivals(message.ticket) == failed.num_posted
    pair.everything_is_back()


def test_a_step_that_fails_after_its_last_write_takes_nothing_back(pair_by_layers: Pair) -> None:
    pair = pair_by_layers
    message = pair.ask()
    moment_last_step_computed(pair)
    pair.prefiller.end_step(fail=True)
    pair.settle()
    assert [closed.num_posted for closed in pair.decoder.heard(TicketClosed)] == [EXPECTED]
    assert pair.decoder.heard(Failed) == []
    assert pair.decoder.num_arrivals(message.ticket) == EXPECTED
    pair.everything_is_back()


@pytest.mark.parametrize(("least", "posted"), [(0, 0), (1, 32), (33, 46)])
def test_a_whole_list_that_is_closed_half_posted_tells_how_far_it_came(least: int, posted: int) -> None:
    """Everything is posted at once, but in turns of the owner: the deadline comes between two of them."""
    pair = Pair(transfer="whole")
    message = pair.ask(tuple(range(60)), remaining_s=1.0)
    while pair.prefiller.begin_step():
        while pair.prefiller.compute_layer():
            pass
        pair.prefiller.end_step()
    while pair.prefiller.fabric.statistics().num_writes_posted < least:
        pair.site.network.step()
    assert pair.num_held == 15
    pair.site.network.advance(1.0)
    pair.settle()
    [failed] = pair.decoder.heard(Failed)
    assert failed.num_posted == pair.decoder.num_arrivals(message.ticket) == posted
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
