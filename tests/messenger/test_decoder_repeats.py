"""What a decoder says again when no answer comes: Prefill, Cancel and Hello, and how often."""

from itertools import pairwise

import pytest
from decoder_pair import EXPECTED, PATIENCE_S, PROMPT, REPEAT_S, Pair

from headrace.fabric.interface import Imm, PeerId, SendFailed
from headrace.messenger.known_prefillers import FIRST_REPEAT_S
from headrace.messenger.outcomes import Ready
from headrace.protocol.messages import Cancel, CancelAck, Failed, Hello, Prefill, Refused, TicketClosed
from headrace.testing import Faults


@pytest.fixture
def pair() -> Pair:
    return Pair()


class Watch:
    """Writes down when messages of a kind arrive, moving the clock from one due time to the next."""

    def __init__(self, pair: Pair, kind: type[Prefill] | type[Cancel] | type[Hello]) -> None:
        self.pair, self.kind = pair, kind
        self.num_before = len(pair.prefiller.heard(kind))

    def times(self, until: float) -> list[float]:
        times: list[float] = []
        while (due := self.pair.decoder.messenger.next_due()) is not None and due <= until:
            self.pair.pass_time(due - self.pair.site.now)
            num_now = len(self.pair.prefiller.heard(self.kind))
            times += [round(self.pair.site.now, 6)] * (num_now - self.num_before)
            self.num_before = num_now
        return times


def lose_sends(pair: Pair, peer: PeerId) -> None:
    """The fabric tells that messages to this peer were lost."""
    lost = SendFailed(peer=peer, code=104, text="Connection reset by peer")
    pair.decoder.messenger.handle([lost, lost], pair.site.now)


def test_a_prefill_without_an_answer_is_repeated_after_a_second_and_then_twice_as_seldom_each_time(pair: Pair) -> None:
    pair.open()
    assert Watch(pair, Prefill).times(until=29.0) == [REPEAT_S, 3 * REPEAT_S, 7 * REPEAT_S, 15 * REPEAT_S]


def test_a_repeated_prefill_is_the_same_but_for_the_time_that_remains(pair: Pair) -> None:
    request, first = pair.open()
    pair.pass_time(REPEAT_S)
    [_, second] = pair.prefiller.heard(Prefill)
    assert (first.remaining_s, second.remaining_s) == (30.0, 30.0 - REPEAT_S)
    names = set(Prefill.__struct_fields__) - {"remaining_s"}
    assert [name for name in names if getattr(first, name) != getattr(second, name)] == []
    pair.write_all(second)
    assert isinstance(request.answers[0], Ready)
    assert Watch(pair, Prefill).times(until=60.0) == []
    pair.everything_is_back()


@pytest.mark.parametrize("answer", [Refused, Failed, CancelAck])
def test_what_is_answered_is_not_repeated(answer: type[Refused] | type[Failed] | type[CancelAck], pair: Pair) -> None:
    _, prefill = pair.open()
    pair.say(answer, prefill, **({} if answer is Refused else {"num_posted": 5}))
    assert Watch(pair, Prefill).times(until=PATIENCE_S - 0.1) == []
    assert pair.prefiller.heard(Cancel) == []


def test_a_cancel_without_an_answer_is_repeated_four_times_in_patience_and_then_the_peer_is_revoked(pair: Pair) -> None:
    _, prefill = pair.open()
    pair.pass_time(REPEAT_S / 2)  # the repeat of the Prefill is still to come, and does not
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.deliver()
    began, prefills = pair.site.now, len(pair.prefiller.heard(Prefill))
    watch = Watch(pair, Cancel)
    times = watch.times(until=began + PATIENCE_S - 1e-6)
    assert [round(time - began, 6) for time in times] == [PATIENCE_S / 4 * i for i in (1, 2, 3)]
    assert len(pair.prefiller.heard(Prefill)) == prefills
    assert pair.suspected == []
    pair.pass_time(began + PATIENCE_S - pair.site.now)
    assert len(pair.suspected) == 1
    assert watch.times(until=began + 60.0) == [], "a Cancel to a peer that was revoked"


def test_the_answer_to_a_repeated_cancel_is_as_good_as_one_to_the_first(pair: Pair) -> None:
    _, prefill = pair.open()
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.pass_time(PATIENCE_S * 0.6)
    assert len(pair.prefiller.heard(Cancel)) == 2
    for _ in pair.prefiller.heard(Cancel):
        pair.say(CancelAck, prefill, num_posted=0)
    assert (pair.num_quarantined, pair.suspected) == (0, [])
    pair.everything_is_back()


def test_a_failed_send_brings_the_repeat_of_that_peers_tickets_forward_and_of_no_others(pair: Pair) -> None:
    first, first_peer = pair.prefiller, pair.peer
    pair.open()
    second, pair.peer = pair.another_prefiller()
    pair.prefiller = second
    pair.open(tuple(range(9)), name="of another")
    pair.prefiller = first
    watch = Watch(pair, Prefill)
    lose_sends(pair, first_peer)
    assert watch.times(until=REPEAT_S * 0.99) == [2 * REPEAT_S / 10]
    assert len(second.heard(Prefill)) == 1
    assert pair.decoder.messenger.next_due() == REPEAT_S, "the other's"


def test_a_failed_send_does_not_put_a_repeat_off(pair: Pair) -> None:
    pair.open()
    watch = Watch(pair, Prefill)
    pair.pass_time(0.95 * REPEAT_S)
    lose_sends(pair, pair.peer)
    assert watch.times(until=1.5 * REPEAT_S) == [REPEAT_S]


def test_a_failed_send_brings_a_cancel_forward_too(pair: Pair) -> None:
    _, prefill = pair.open()
    pair.decoder.messenger.cancel(Imm(prefill.ticket.imm), pair.site.now)
    pair.deliver()
    watch = Watch(pair, Cancel)
    lose_sends(pair, pair.peer)
    assert watch.times(until=PATIENCE_S / 4) == [2 * REPEAT_S / 10]


def test_a_failed_send_brings_the_next_hello_forward(pair: Pair) -> None:
    pair.decoder.messenger.peer_hung(pair.peer, pair.site.now)
    pair.deliver()
    watch = Watch(pair, Hello)
    assert watch.times(until=4.0) == [0.25, 0.75, 1.75, 3.75]
    lose_sends(pair, pair.peer)
    assert watch.times(until=7.0) == [3.75 + FIRST_REPEAT_S]


def test_a_failed_send_to_somebody_unknown_or_ready_makes_nothing_due(pair: Pair) -> None:
    lose_sends(pair, pair.peer)
    lose_sends(pair, PeerId(99))
    assert pair.decoder.messenger.next_due() is None


def test_a_prefill_that_is_lost_is_served_all_the_same(pair: Pair) -> None:
    request = pair.decoder.reserve("a", PROMPT)
    assert request is not None
    pair.site.network.faults = Faults(lose_message=1.0)
    assert pair.decoder.open(request, pair.peer, "lease") is not None
    pair.deliver()
    assert pair.prefiller.heard(Prefill) == []
    pair.site.network.faults = Faults()
    pair.pass_time(REPEAT_S)
    prefill = pair.prefiller.heard(Prefill)[-1]
    pair.write_all(prefill)
    pair.say(TicketClosed, prefill, num_posted=EXPECTED)
    assert isinstance(request.answers[0], Ready)
    pair.everything_is_back()


def test_prefills_grow_rarer_however_many_sends_fail(pair: Pair) -> None:
    pair.open()
    watch, times = Watch(pair, Prefill), list[float]()
    for tenth in range(1, 101):
        lose_sends(pair, pair.peer)
        times += watch.times(until=tenth * REPEAT_S / 10)
    gaps = [after - before for before, after in pairwise(times)]
    assert 3 <= len(times) <= 8
    assert all(later > 1.5 * earlier for earlier, later in pairwise(gaps)), gaps
