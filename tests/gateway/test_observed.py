"""What is learned of instances: transfers by pair, hand-overs by decoder, prefixes. No clock, no socket."""

import pytest
from gateway_fleet import A_PROMPT, generation
from scripted_instance import MODEL, announce, status

from headrace.gateway.dispatch.attempt import Attempt, RequestMessage
from headrace.gateway.dispatch.errand import Errand
from headrace.gateway.dispatch.instances import Instances
from headrace.gateway.dispatch.observed import (
    FIRST_SUSPICION_S,
    FORGET_S,
    LONGEST_SUSPICION_S,
    ONE_EVENT_S,
    SUSPECTED,
    Observed,
    fit,
)
from headrace.gateway.options import Timings
from headrace.gateway.route import TransferCost, Wanted, route
from headrace.protocol.control import Accepted, Finished, Granted, Prefilled, Prefilling, Tokens, Waterfall

P, D = "1" * 32, "d" * 32


def observed() -> Observed:
    instances = Instances(MODEL, Timings())
    instances.take(announce("prefiller", P), 0.0)
    instances.take(announce("decoder", D), 0.0)
    return Observed(instances)


def offered(token_ids: tuple[int, ...] = A_PROMPT) -> Attempt:
    """An attempt whose Generate is out, with a lease."""
    errand = Errand(request_id="r", generation=generation(), token_ids=token_ids, max_tokens=5, deadline=100.0)
    attempt = Attempt(errand, sender="f" * 32, tell=lambda to, message: None, wake=lambda: None)
    attempt.reserve(P, 0.0)
    assert attempt.take(Granted(sender=P, request_id="r", lease="1"), 0.0)
    attempt.offer(D, 0.0)
    return attempt


def hears(known: Observed, attempt: Attempt, *messages: RequestMessage, now: float = 0.0) -> None:
    for message in messages:
        assert attempt.take(message, now)
        known.take(attempt, message, now)


def accepted(hit: int = 0, *, uses_lease: bool = True) -> Accepted:
    return Accepted(sender=D, request_id="r", uses_lease=uses_lease, cached_tokens=hit)


def finished(waterfall: Waterfall) -> Finished:
    return Finished(
        sender=D, request_id="r", reason="length", text="", num_tokens=0, cached_tokens=0, waterfall=waterfall
    )


def fetched(
    known: Observed,
    *,
    exposed_s: float,
    num_tokens: int = 40,
    hit: int = 0,
    first_step_s: float = 0.0,
    now: float = 0.0,
) -> None:
    """A request that was prefilled at the prefiller, in 0.3 s with its queue."""
    told = Waterfall(fetch_s=0.3 + exposed_s, first_step_s=first_step_s)
    prefilled = Prefilled(sender=P, request_id="r", num_computed=1, queue_s=0.1, prefill_s=0.2)
    hears(known, offered(tuple(range(num_tokens))), accepted(hit), prefilled, finished(told), now=now)


FIRST = Tokens(sender=D, request_id="r", index=0, token_ids=(7,), cached_tokens=0)


def cached(known: Observed) -> tuple[int, int]:
    """Of the prompt, at the decoder and at the prefiller."""
    prompt = offered().prompt
    return known.decoders(prompt)[0].cached_tokens, known.prefillers(prompt)[0].cached_tokens


def test_with_its_first_token_a_prompt_is_known_to_be_at_both_sides() -> None:
    known = observed()
    attempt = offered()
    hears(known, attempt, accepted())
    assert cached(known) == (0, 0)
    hears(known, attempt, FIRST)
    assert cached(known) == (32, 32)


def test_a_prompt_that_the_decoder_computed_is_known_to_be_there_alone() -> None:
    known = observed()
    hears(known, offered(), accepted(uses_lease=False), FIRST)
    assert cached(known) == (32, 0)


def test_what_the_decoder_did_not_find_is_no_longer_expected_there() -> None:
    known = observed()
    hears(known, offered(), accepted(), FIRST)
    hears(known, offered(), accepted(hit=16))
    assert cached(known) == (16, 32)


def test_what_was_generated_is_known_to_be_at_the_decoder_when_it_is_over() -> None:
    known = observed()
    attempt = offered()
    hears(known, attempt, accepted(), FIRST)
    known.wrote(attempt, (*A_PROMPT, *range(8)))  # 48 tokens, the last of which is not computed
    assert cached(known) == (32, 32)
    known.wrote(attempt, (*A_PROMPT, *range(9)))
    assert known.decoders(offered((*A_PROMPT, *range(20))).prompt)[0].cached_tokens == 48


def test_one_that_leaves_is_forgotten_with_its_pairs() -> None:
    known = observed()
    hears(known, offered(), accepted(), FIRST)
    fetched(known, exposed_s=0.02, hit=32, first_step_s=0.01)
    known.left(P)
    assert cached(known) == (32, 0) and known.transfers(0.0) == {}
    known.left(D)
    assert cached(known) == (0, 0)


def test_a_transfer_costs_what_the_decoder_waited_beyond_queue_and_prefill() -> None:
    known = observed()
    for _ in range(2):
        fetched(known, exposed_s=0.02)
    assert known.transfers(0.0)[P, D].predict(1000) == pytest.approx(0.02)
    for _ in range(2):
        fetched(known, exposed_s=0.1, num_tokens=440)
    assert known.transfers(0.0)[P, D].predict(839) == pytest.approx(0.18)
    fetched(known, exposed_s=0.18, num_tokens=1000, hit=160)  # of which those travel that the decoder lacks
    assert known.transfers(0.0)[P, D].predict(839) == pytest.approx(0.18)


def test_after_a_while_without_transfers_a_pair_is_tried_again() -> None:
    known = observed()
    for _ in range(2):
        fetched(known, exposed_s=5.0)
    assert known.transfers(FORGET_S)[P, D].predict(39) == pytest.approx(5.0)
    assert not known.transfers(FORGET_S + 0.1)
    for _ in range(2):
        fetched(known, exposed_s=0.01, now=FORGET_S + 1)
    assert known.transfers(FORGET_S + 1)[P, D].predict(39) == pytest.approx(0.01)


def test_one_slow_transfer_is_not_held_against_its_pair() -> None:
    known = observed()
    fetched(known, exposed_s=5.0)
    assert known.transfers(0.0)[P, D].predict(39) == 0
    for number in range(1, 9):
        fetched(known, exposed_s=5.0 if number == 4 else 0.01)
        assert known.transfers(0.0)[P, D].predict(39) == pytest.approx(0.01)


def test_a_hand_over_is_a_mean_of_the_last_ones_of_all_decoders() -> None:
    known = observed()
    for first_step_s in (0.01, *[0.03] * 30):
        fetched(known, exposed_s=0.0, first_step_s=first_step_s)
    known._instances.take(announce("decoder", "e" * 32), 0.0)
    views = known.decoders(offered().prompt)
    assert [view.hand_over_s for view in views] == [pytest.approx(0.03, rel=0.01)] * 2


def test_a_colocated_instance_hands_nothing_over_its_first_step_is_the_end_of_its_prefill() -> None:
    instances = Instances(MODEL, Timings())
    instances.take(announce("colocated", D), 0.0)
    known = Observed(instances)
    told = finished(Waterfall(local_prefill_s=0.001, first_step_s=0.3))
    hears(known, offered(), accepted(uses_lease=False), FIRST, told)
    assert [view.hand_over_s for view in known.decoders(offered().prompt)] == [0.0]


def test_where_local_prefills_are_for_need_alone_they_are_no_choice_while_a_prefiller_is_there() -> None:
    instances = Instances(MODEL, Timings())
    speed = Prefilling(step_s=0.0, rate=900.0, chunk_tokens=64)
    for role, uuid in (("prefiller", P), ("decoder", D), ("colocated", "c" * 32)):
        instances.take(announce(role, uuid), 0.0)
        instances.take(status(uuid, prefill_rate=900.0), 0.0)
    known, wanted = Observed(instances, "needed"), Wanted(num_tokens=20, max_tokens=1)
    decoder, colocated = known.decoders(offered().prompt)
    assert colocated.prefilling == speed and decoder.prefilling != speed
    chosen = route([decoder], known.prefillers(offered().prompt), wanted)
    assert chosen is not None and chosen.prefiller == P
    instances.leave(P, "gone")
    assert known.decoders(offered().prompt)[0].prefilling == speed


def test_a_fit_is_never_negative_and_takes_nothing_for_a_slope_that_is_none() -> None:
    assert fit([(100, 0.5)]) == TransferCost(base_s=0.5)
    assert fit([(100, 0.5), (102, 0.9)]).token_s == 0
    assert fit([(100, 0.5), (1000, 0.1)]) == TransferCost(base_s=pytest.approx(0.1))
    steep = fit([(100, 0.0), (1000, 9.0)])
    assert steep.base_s >= 0 and steep.predict(550) == pytest.approx(4.5)
    level = fit([(100, 0.02), (1000, 0.11), (2000, 0.21)])
    assert (level.base_s, level.token_s) == (pytest.approx(0.01), pytest.approx(1e-4))


# ---- faults ----------------------------------------------------------------------------------------------------


def test_one_fault_of_a_pair_is_an_accident_and_the_second_in_a_row_is_not() -> None:
    known = observed()
    assert known.failed(P, D, 0.0) == 0.0 and known.transfers(0.0) == {}
    assert known.failed(P, D, 1.0) == FIRST_SUSPICION_S
    assert known.transfers(1.0) == {(P, D): SUSPECTED}


def test_a_suspected_pair_is_tried_again_later_and_later() -> None:
    known = observed()
    times = [known.failed(P, D, nth * ONE_EVENT_S) for nth in range(7)]
    assert times == [0.0] + [FIRST_SUSPICION_S * 2**nth for nth in range(4)] + 2 * [LONGEST_SUSPICION_S]
    until = 6 * ONE_EVENT_S + LONGEST_SUSPICION_S
    assert known.transfers(until - 0.1) and known.transfers(until) == {}


def test_tickets_that_fail_together_are_one_accident() -> None:
    known = observed()
    assert [known.failed(P, D, nth * ONE_EVENT_S / 8) for nth in range(8)] == 8 * [0.0]


def test_a_transfer_that_succeeds_clears_its_pair_of_all_suspicion() -> None:
    known = observed()
    known.failed(P, D, 0.0)
    known.failed(P, D, 1.0)
    for _ in range(2):
        fetched(known, exposed_s=0.25)
    assert known.transfers(1.0) == {(P, D): TransferCost(base_s=pytest.approx(0.25))}
    assert known.failed(P, D, 2.0) == 0.0


def test_a_prompt_that_its_decoder_computed_in_the_end_clears_nobody() -> None:
    known = observed()
    known.failed(P, D, 0.0)
    hears(known, offered(), accepted(), FIRST)
    hears(known, offered(), accepted(), finished(Waterfall(local_prefill_s=0.3)))
    assert known.failed(P, D, 1.0) > 0.0


def test_the_faults_of_an_instance_leave_with_it() -> None:
    known = observed()
    known.failed(P, D, 0.0)
    known.left(P)
    assert known.failed(P, D, 1.0) == 0.0
