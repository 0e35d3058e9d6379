"""What an attempt holds, message by message, and random histories: whatever was granted is used or given back."""

from collections.abc import Callable

import pytest
from gateway_fleet import A_PROMPT, generation
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.dispatch.attempt import Arrived, Attempt, RequestMessage, State
from headrace.gateway.dispatch.errand import Errand
from headrace.protocol.control import (
    Abort,
    Accepted,
    Finished,
    FinishReason,
    GatewayMessage,
    Generate,
    Granted,
    NoRoom,
    Prefilled,
    Rejected,
    Reserve,
    ReturnLease,
    Tokens,
    UsePrefiller,
    Wait,
    Waterfall,
)

US, P1, P2, D1, D2 = ("a" * 32, "1" * 32, "2" * 32, "d" * 32, "e" * 32)


class Told:
    """An attempt, and what it has told to whom."""

    def __init__(self, *, max_tokens: int = 5) -> None:
        self.sent: list[tuple[str, GatewayMessage]] = []
        self.num_wakes = 0
        self.on_tell: Callable[[str], None] = lambda to: None
        errand = Errand(
            request_id="r", generation=generation("r"), token_ids=A_PROMPT, max_tokens=max_tokens, deadline=10.0
        )
        self.attempt = Attempt(errand, sender=US, tell=self._tell, wake=self._wake)

    def _tell(self, to: str, message: GatewayMessage) -> None:
        self.sent.append((to, message))
        self.on_tell(to)

    def _wake(self) -> None:
        self.num_wakes += 1

    def drain(self) -> list[tuple[str, str]]:
        sent, self.sent = self.sent, []
        return [(to, type(message).__name__) for to, message in sent]

    def offered(self) -> "Told":
        """With a lease of P1, to D1."""
        self.attempt.reserve(P1, 0.0)
        assert self.attempt.take(granted(P1, "1"), 0.1)
        self.attempt.offer(D1, 0.2)
        assert self.drain() == [(P1, "Reserve"), (D1, "Generate")]
        return self

    def running(self) -> "Told":
        self.offered().attempt.take(accepted(uses_lease=True), 0.3)
        return self


def granted(sender: str, lease: str) -> Granted:
    return Granted(sender=sender, request_id="r", lease=lease)


def wait(sender: str) -> Wait:
    return Wait(sender=sender, request_id="r", num_queued_tokens=0)


def accepted(sender: str = D1, *, uses_lease: bool) -> Accepted:
    return Accepted(sender=sender, request_id="r", uses_lease=uses_lease, cached_tokens=0)


def no_room(sender: str = D1) -> NoRoom:
    return NoRoom(sender=sender, request_id="r", num_free_pages=0)


def tokens(index: int, *token_ids: int) -> Tokens:
    return Tokens(sender=D1, request_id="r", index=index, token_ids=token_ids, cached_tokens=0)


def finished(reason: FinishReason, num_tokens: int, sender: str = D1) -> Finished:
    return Finished(
        sender=sender,
        request_id="r",
        reason=reason,
        text="",
        num_tokens=num_tokens,
        cached_tokens=0,
        waterfall=Waterfall(),
    )


def test_what_it_asks_carries_the_seconds_that_remain() -> None:
    told = Told()
    told.attempt.reserve(P1, 4.0)
    told.attempt.take(granted(P1, "1"), 5.0)
    told.attempt.offer(D1, 12.0)
    (_, reserve), (_, generate) = told.sent
    assert isinstance(reserve, Reserve) and reserve.remaining_s == 6.0
    assert isinstance(generate, Generate) and generate.remaining_s == 0.0


def test_a_lease_rides_with_the_offer_and_goes_back_with_no_room() -> None:
    told = Told().offered()
    assert told.attempt.take(no_room(), 0.3)
    assert told.attempt.state is State.PLACING
    assert told.drain() == [(P1, "ReturnLease")]


def test_a_lease_that_is_not_used_goes_back_and_one_that_is_does_not() -> None:
    told = Told().offered()
    told.attempt.take(accepted(uses_lease=False), 0.3)
    assert told.drain() == [(P1, "ReturnLease")] and told.attempt.prefiller is None
    told = Told().running()
    assert told.drain() == [] and told.attempt.prefiller == P1


@pytest.mark.parametrize(
    ("stage", "given_back"),
    [
        ("new", []),
        ("reserving", []),
        ("granted", [(P1, "ReturnLease")]),
        ("offered", [(D1, "Abort"), (P1, "ReturnLease")]),
        ("running", [(D1, "Abort")]),
        ("replacing", [(D1, "Abort")]),
        ("replaced", [(D1, "Abort"), (P2, "ReturnLease")]),
    ],
)
def test_giving_up_returns_exactly_what_is_held(stage: str, given_back: list[tuple[str, str]]) -> None:
    told = Told()
    attempt = told.attempt
    if stage in ("reserving", "granted"):
        attempt.reserve(P1, 0.0)
    if stage == "granted":
        attempt.take(granted(P1, "1"), 0.1)
    if stage == "offered":
        told.offered()
    if stage in ("running", "replacing", "replaced"):
        told.running()
    if stage in ("replacing", "replaced"):
        attempt.replace_prefiller(P2, 1.0, answer_by=1.2)
    if stage == "replaced":
        attempt.take(granted(P2, "7"), 1.1)
    told.drain()
    attempt.release()
    attempt.release()
    assert told.drain() == given_back
    assert attempt.state is State.OVER


def test_what_others_say_about_it_is_not_its_business() -> None:
    told = Told().offered()
    strange = [accepted(D2, uses_lease=True), no_room(D2), granted(P2, "9"), wait(P2), finished("stop", 0, D2)]
    for message in strange:
        assert not told.attempt.take(message, 0.3)
    assert told.attempt.state is State.OFFERED and told.drain() == []


def test_a_grant_that_is_repeated_is_no_second_lease() -> None:
    told = Told().offered()
    assert told.attempt.take(granted(P1, "1"), 0.3) and told.drain() == []
    assert not told.attempt.take(granted(P1, "2"), 0.3)


def test_an_answer_after_it_stopped_asking_is_late() -> None:
    told = Told()
    told.attempt.reserve(P1, 0.0)
    told.attempt.stop_asking()
    assert not told.attempt.take(granted(P1, "1"), 3.0)


def test_tokens_are_taken_once_and_in_order() -> None:
    told = Told().running()
    for message in (tokens(0, 10), tokens(0, 10), tokens(0, 10, 11), tokens(1, 11, 12), tokens(0, 10)):
        assert told.attempt.take(message, 1.0)
    assert told.attempt.drain_arrived() == [Arrived(1.0, (10,)), Arrived(1.0, (11,)), Arrived(1.0, (12,))]
    assert told.attempt.drain_arrived() == []


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (tokens(2, 12), "tokens 1..1 never came"),
        (tokens(1, 11, 12), "more than the 2 tokens that were asked for came"),
        (finished("length", 2), "2 tokens were announced, 1 came"),
        (finished("stop", 3), "3 tokens were announced, 1 came"),
        (finished("stop", 0), "0 tokens were announced, 1 came"),
    ],
)
def test_a_decoder_that_contradicts_itself_is_given_up(message: RequestMessage, reason: str) -> None:
    told = Told(max_tokens=2).running()
    told.attempt.take(tokens(0, 10), 1.0)
    assert told.attempt.take(message, 1.1)
    assert (told.attempt.state, told.attempt.lost) == (State.OVER, reason)
    assert told.drain() == [(D1, "Abort")]
    assert told.attempt.drain_arrived() == [Arrived(1.0, (10,))]


def test_tokens_before_acceptance_are_a_contradiction_too() -> None:
    told = Told().offered()
    told.attempt.take(tokens(0, 10), 1.0)
    assert told.attempt.lost == "tokens came before it was accepted"
    assert told.drain() == [(D1, "Abort"), (P1, "ReturnLease")]


@pytest.mark.parametrize(
    ("reason", "num_tokens"), [("stop", 1), ("stop", 2), ("length", 1), ("error", 0), ("abort", 0)]
)
def test_the_last_word_ends_it_and_nothing_is_told(reason: FinishReason, num_tokens: int) -> None:
    told = Told(max_tokens=2).running()
    told.attempt.take(tokens(0, 10), 1.0)
    told.attempt.take(finished(reason, num_tokens), 1.1)
    assert told.attempt.finished is not None and told.attempt.lost is None
    assert told.drain() == []
    assert not told.attempt.take(tokens(1, 11), 1.2)


def test_a_rejection_returns_the_lease() -> None:
    told = Told().offered()
    told.attempt.take(Rejected(sender=D1, request_id="r", field="seed", text="no"), 0.3)
    assert told.attempt.rejected is not None and told.drain() == [(P1, "ReturnLease")]


def test_a_failed_ticket_gets_another_prefiller_in_time() -> None:
    told = Told().running()
    told.attempt.replace_prefiller(P2, 1.0, answer_by=1.2)
    told.attempt.take(granted(P2, "7"), 1.1)
    answer = told.sent[-1][1]
    assert isinstance(answer, UsePrefiller) and answer.prefill is not None and answer.prefill.lease == "7"
    told.drain()
    told.attempt.take(accepted(uses_lease=False), 1.3)
    assert told.drain() == [(P2, "ReturnLease")]


def test_a_failed_ticket_gets_no_prefiller_after_the_decoders_patience() -> None:
    told = Told().running()
    told.attempt.replace_prefiller(P2, 1.0, answer_by=1.2)
    told.drain()
    told.attempt.take(granted(P2, "7"), 1.3)
    assert told.drain() == [(P2, "ReturnLease")]


@pytest.mark.parametrize("ends", ["wait", "gone"])
def test_a_failed_ticket_is_told_to_go_on_alone_when_the_other_cannot(ends: str) -> None:
    told = Told().running()
    told.attempt.replace_prefiller(P2, 1.0, answer_by=1.2)
    if ends == "wait":
        told.attempt.take(wait(P2), 1.1)
    else:
        told.attempt.gone(P2, "silent", 1.1)
    answer = told.sent[-1][1]
    assert isinstance(answer, UsePrefiller) and answer.prefill is None


def test_prefilled_is_noted_from_the_prefiller_in_use_only() -> None:
    told = Told().running()
    for sender, is_its_business in ((P2, False), (P1, True)):
        message = Prefilled(sender=sender, request_id="r", num_computed=3, queue_s=0.0, prefill_s=0.1)
        assert told.attempt.take(message, 1.0) is is_its_business


def test_what_a_prefiller_granted_dies_with_it() -> None:
    told = Told()
    told.attempt.reserve(P1, 0.0)
    told.attempt.gone(P1, "silent", 0.1)
    assert told.attempt.reserving is None and told.num_wakes == 1
    told.attempt.reserve(P2, 0.2)
    told.attempt.take(granted(P2, "1"), 0.3)
    told.attempt.gone(P2, "silent", 0.4)
    told.drain()
    told.attempt.release()
    assert told.drain() == []


def test_a_decoder_that_is_gone_is_not_told_and_its_lease_goes_back() -> None:
    told = Told().offered()
    told.attempt.gone(D1, "silent", 0.3)
    assert told.attempt.lost == "its decoder is gone: silent" and told.drain() == [(P1, "ReturnLease")]
    told = Told().running()
    told.attempt.gone(D1, "silent", 0.3)
    assert told.drain() == []


def test_it_may_hear_that_somebody_is_gone_while_it_tells_him() -> None:
    told = Told()
    told.on_tell = lambda to: told.attempt.gone(to, "its connection is gone", 0.0)
    told.attempt.reserve(P1, 0.0)
    assert told.attempt.reserving is None
    told.attempt.offer(D1, 0.1)
    assert told.attempt.state is State.OVER and told.attempt.lost is not None


STEPS = (
    *("reserve", "grant", "grant another", "wait", "stop asking", "offer", "accept", "decline", "no room", "reject"),
    *("need", "tokens", "gap", "finish", "gone D1", "gone P1", "gone P2", "release"),
)


@given(st.lists(st.sampled_from(STEPS), max_size=25))
def test_in_every_history_each_lease_is_used_returned_or_its_prefillers_own(history: list[str]) -> None:
    told = Told(max_tokens=1000)
    attempt = told.attempt
    open_leases: dict[str, str] = {}  # lease -> prefiller, granted and neither used nor returned
    at_decoder: str | None = None
    num_granted = num_tokens = 0

    def settle() -> None:
        nonlocal at_decoder
        for to, message in told.sent:
            if isinstance(message, ReturnLease):
                open_leases.pop(message.lease, None)
            if isinstance(message, Generate | UsePrefiller):
                at_decoder = None if message.prefill is None else message.prefill.lease
            assert not isinstance(message, Abort) or to == D1
        told.sent.clear()

    for now, step in enumerate([*history, "release"]):
        match step:
            case "reserve" if attempt.state is State.PLACING and attempt.reserving is attempt.lease is None:
                attempt.reserve(P1 if now % 2 else P2, now)
            case "need" if attempt.state is State.RUNNING and attempt.reserving is None:
                attempt.replace_prefiller((P1, P2, None)[now % 3], now, answer_by=now + 3)
            case "grant" | "grant another":
                num_granted += 1
                sender = attempt.reserving if step == "grant" else P1
                if sender is not None:
                    open_leases[f"{num_granted}"] = sender
                    if not attempt.take(granted(sender, f"{num_granted}"), now):
                        del open_leases[f"{num_granted}"]  # the exchange returns what comes too late
            case "wait" if attempt.reserving is not None:
                attempt.take(wait(attempt.reserving), now)
            case "stop asking" if attempt.state is State.PLACING:
                attempt.stop_asking()
            case "offer" if attempt.state is State.PLACING and attempt.reserving is None:
                attempt.offer(D1, now)
            case "accept":
                settle()
                if attempt.take(accepted(uses_lease=True), now) and at_decoder is not None:
                    open_leases.pop(at_decoder, None)
            case "decline":
                attempt.take(accepted(uses_lease=False), now)
            case "no room":
                attempt.take(no_room(), now)
            case "reject":
                attempt.take(Rejected(sender=D1, request_id="r", field="f", text="t"), now)
            case "tokens" | "gap":
                if attempt.take(tokens(num_tokens + (step == "gap"), 1), now) and attempt.state is State.RUNNING:
                    num_tokens += 1
            case "finish":
                attempt.take(finished("stop", num_tokens + 1), now)
            case "gone D1":
                attempt.gone(D1, "silent", now)
            case "gone P1" | "gone P2":
                gone = P1 if step == "gone P1" else P2
                open_leases = {lease: prefiller for lease, prefiller in open_leases.items() if prefiller != gone}
                attempt.gone(gone, "silent", now)
            case "release":
                attempt.release()
        settle()
    assert open_leases == {}
    assert attempt.state is State.OVER and attempt.reserving is attempt.lease is attempt.decoder is None
