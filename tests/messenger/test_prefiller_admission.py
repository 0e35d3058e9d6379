"""What a prefiller refuses and why, and what it grants."""

from typing import Any

import pytest
from prefiller_pair import EXPECTED, LATE, PAGE, PROMPT, Pair
from puppet import changed

from headrace.messenger.leases import UNUSED_LEASE_S
from headrace.protocol.control import Granted, Reserve, Wait
from headrace.protocol.messages import Refused, TicketClosed, Tier


@pytest.fixture
def pair() -> Pair:
    return Pair()


# ---- refused ---------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown lease": ({"lease": "unknown"}, "no_lease"),
    "a page beyond the pool": ({"pages": (0, 1, 2, 100)}, "malformed"),
    "an aux slot beyond the pool": ({"aux_slot": 8}, "malformed"),
    "a group beyond the last": ({"group": 1}, "malformed"),
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
    for late in (message, changed(again, ticket=message.ticket)):
        pair.decoder.say(pair.decoder.peer, late)  # a second copy, and a right one under the same ticket
        pair.deliver()
    pair.compute_everything()
    assert pair.decoder.heard(Refused) == [refused] * 3, "whoever asks again may have missed the answer"
    assert pair.decoder.num_arrivals(message.ticket) == 0
    assert pair.num_accepted == 0
    assert pair.prefiller.messenger.statistics().num_refused == {reason: 1}
    pair.site.network.advance(UNUSED_LEASE_S)
    pair.settle()
    pair.everything_is_back()


@pytest.mark.parametrize(
    ("num_pages", "limit"),
    [(24, 24 * PAGE + 1), (100, 68 * PAGE + 1)],
    ids=["pages of the pool", "digests of an aux slot"],
)
def test_a_prompt_that_is_too_long_is_told_the_limit_that_holds_and_one_of_that_length_is_served(
    num_pages: int, limit: int
) -> None:
    pair = Pair(num_pages=num_pages)
    refused_one = pair.ask(tuple(range(limit + 1)))
    [refused] = pair.decoder.heard(Refused)
    assert (refused.ticket, refused.reason) == (refused_one.ticket, "too_long")
    assert refused.text == f"token_ids: must be at most {limit}, are {limit + 1}"
    longest = pair.ask(tuple(range(limit)), request_id="longest")
    pair.compute_everything()
    pair.settle()
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)] == [longest.ticket]
    pair.everything_is_back()


def test_a_refusal_repeats_nothing_that_the_decoder_wrote(pair: Pair) -> None:
    pair.ask(lease="<script>", request_id="<request>")
    [refused] = pair.decoder.heard(Refused)
    assert "<" not in refused.text


@pytest.mark.parametrize("field", ["lease", "request_id"])
def test_a_prefill_with_a_huge_name_is_dropped_and_counted_and_the_next_one_is_served(field: str, pair: Pair) -> None:
    lease = pair.prefiller.lease("a", 14)
    assert lease is not None
    right = pair.decoder.prefill(PROMPT, lease)
    pair.decoder.say(pair.decoder.peer, changed(right, **{field: "x" * (8 << 20)}))
    pair.deliver()
    assert pair.prefiller.messenger.statistics().num_strange_messages == 1
    assert pair.decoder.heard(Refused) == []
    message = pair.ask(lease=lease)
    pair.compute_everything()
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)] == [message.ticket]


@pytest.mark.parametrize("remaining_s", [1.1e6, float("inf"), float("nan"), -1.0])
def test_a_prefill_whose_deadline_cannot_be_is_dropped_and_counted(remaining_s: float, pair: Pair) -> None:
    pair.ask(remaining_s=remaining_s)
    assert pair.prefiller.messenger.statistics().num_strange_messages == 1
    assert (pair.num_accepted, pair.num_held) == (0, 0)


def test_a_lease_must_be_as_large_as_the_prompt_and_need_not_be_larger(pair: Pair) -> None:
    small, exact = pair.prefiller.lease("small", 12), pair.prefiller.lease("exact", 13)
    assert small is not None and exact is not None
    too_long = pair.ask(lease=small, request_id="small")
    [refused] = pair.decoder.heard(Refused)
    assert (refused.ticket, refused.reason) == (too_long.ticket, "no_lease")
    assert pair.num_held == 0
    message = pair.ask(lease=exact, request_id="exact")
    pair.compute_everything()
    pair.settle()
    assert [closed.ticket for closed in pair.decoder.heard(TicketClosed)] == [message.ticket]
    # Neither counts any more; what is left are those that `ask` had granted and nobody used.
    pair.site.network.advance(UNUSED_LEASE_S)
    pair.settle()
    pair.everything_is_back()


def test_a_prefill_without_a_lease_costs_the_prefix_index_nothing(pair: Pair) -> None:
    pair.ask(tuple(range(61)), request_id="first")
    pair.compute_everything()
    pair.settle()
    cached = pair.prefiller.pool.statistics()
    assert cached.num_cached == 15
    pair.ask(tuple(range(1000, 1061)), request_id="without", lease="unknown")
    assert [refused.reason for refused in pair.decoder.heard(Refused)] == ["no_lease"]
    assert pair.prefiller.pool.statistics() == cached, "evicted for somebody who is not served"


def test_the_lease_of_a_prefill_that_finds_no_room_is_over_too() -> None:
    pair = Pair(num_pages=7)
    pair.ask()
    leased = pair.prefiller.messenger.statistics().num_leased_tokens
    pair.ask(tuple(range(15)), request_id="b")
    assert [refused.reason for refused in pair.decoder.heard(Refused)] == ["no_room"]
    assert pair.prefiller.messenger.statistics().num_leased_tokens == leased


def test_the_lease_of_a_refused_prefill_is_over_at_once(pair: Pair) -> None:
    lease = pair.prefiller.lease("a", 12)
    assert lease is not None
    pair.decoder.say(pair.decoder.peer, pair.decoder.prefill(PROMPT, lease))
    pair.deliver()
    assert pair.prefiller.messenger.statistics().num_leased_tokens == 0


@pytest.mark.parametrize("tier", ["interactive", "flex"])
def test_a_job_is_of_the_tier_of_its_lease(tier: Tier, pair: Pair) -> None:
    lease = pair.prefiller.lease("a", 14, tier)
    message = pair.ask(lease=lease)
    [prompt] = pair.prefiller.prompts.values()
    assert (prompt.job.ticket, prompt.job.tier) == (message.ticket, tier)


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


def test_pages_that_tickets_share_are_held_once(pair: Pair) -> None:
    pair.site.network.faults = LATE
    prefix = tuple(range(12))
    for i in range(4):
        pair.ask((*prefix, 100 + i, 200 + i), request_id=f"r{i}")
        pair.compute_everything()
    assert pair.prefiller.messenger.statistics().num_held_pages == 3 + 4
    assert pair.decoder.heard(Refused) == [], "counted once for each ticket they would be beyond the cap of 8"
    pair.settle()
    pair.everything_is_back()


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
