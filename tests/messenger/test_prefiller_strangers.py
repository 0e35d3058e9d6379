"""Messages that come late, twice, or from somebody who has no business with the ticket."""

import pytest
from kv_world import pool_layout
from prefiller_pair import EXPECTED, PROMPT, Pair
from puppet import PuppetDecoder

from headrace.fabric.interface import IMM_SLOT_BITS
from headrace.messenger.slots import NUM_GENERATIONS
from headrace.protocol.control import Reserve, encode_control
from headrace.protocol.messages import Cancel, CancelAck, Refused, Ticket, encode


@pytest.fixture
def pair() -> Pair:
    return Pair()


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
    # The second of them is the answer to the Prefill: its decoder may have missed the first.
    assert [(ack.num_posted, ack.num_unknown) for ack in pair.decoder.heard(CancelAck)] == [(0, 0)] * 3
    assert pair.decoder.heard(Refused) == []
    assert pair.num_accepted == 0
    assert pair.decoder.num_arrivals(message.ticket) == 0
    pair.everything_is_back()


def test_a_late_prefill_of_an_earlier_use_of_the_slot_is_stale_and_touches_nothing_of_the_newer(pair: Pair) -> None:
    lease = pair.prefiller.lease("late", 14)
    assert lease is not None
    old = pair.decoder.prefill(PROMPT, lease, request_id="late")
    newer = Ticket(decoder=old.ticket.decoder, epoch=old.ticket.epoch, imm=old.ticket.imm + (1 << 12))
    pair.ask(request_id="b", ticket=newer, aux_slot=0)
    pair.decoder.say(pair.decoder.peer, old)
    pair.decoder.cancel(old.ticket)
    pair.compute_everything()
    pair.settle()
    pair.decoder.say(pair.decoder.peer, old)  # the newer one is over now
    pair.decoder.cancel(newer)
    pair.settle()
    assert pair.decoder.num_arrivals(old.ticket) == 0
    assert pair.decoder.num_arrivals(newer) == EXPECTED
    assert [(refused.ticket, refused.reason) for refused in pair.decoder.heard(Refused)] == [(old.ticket, "stale")] * 2
    assert [(ack.ticket, ack.num_posted) for ack in pair.decoder.heard(CancelAck)] == [(newer, EXPECTED)]
    pair.everything_is_back()


def test_a_prefill_from_half_a_circle_of_generations_away_is_stale_and_what_is_remembered_stays(pair: Pair) -> None:
    """Neither is newer than the other: a decoder that left a slot alone for so long must not be served twice."""
    message = pair.ask()
    pair.compute_everything()
    pair.settle()
    opposite = Ticket(
        decoder=message.ticket.decoder, epoch=1, imm=message.ticket.imm ^ (NUM_GENERATIONS // 2 << IMM_SLOT_BITS)
    )
    pair.ask(request_id="b", ticket=opposite)
    assert [(refused.ticket, refused.reason) for refused in pair.decoder.heard(Refused)] == [(opposite, "stale")]
    pair.decoder.cancel(message.ticket)
    pair.settle()
    assert [(ack.ticket, ack.num_posted) for ack in pair.decoder.heard(CancelAck)] == [(message.ticket, EXPECTED)]
    assert pair.num_accepted == 1
    pair.everything_is_back()


def test_a_prefill_of_an_older_epoch_is_stale_and_its_lease_ends(pair: Pair) -> None:
    lease = pair.prefiller.lease("a", 14)
    assert lease is not None
    old = pair.decoder.prefill(PROMPT, lease)
    pair.decoder.greet()
    pair.decoder.say(pair.decoder.peer, old)
    pair.compute_everything()
    pair.settle()
    assert pair.decoder.num_arrivals(old.ticket) == 0
    assert [(refused.ticket, refused.reason) for refused in pair.decoder.heard(Refused)] == [(old.ticket, "stale")]
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
    reserve = Reserve(sender="0" * 32, request_id="x", num_tokens=1, tier="flex", remaining_s=1.0)
    other.say(other.peer, encode_control(reserve))  # of the gateways' socket, not of the fabric
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
