import asyncio
from typing import Any

from headrace.protocol.control import Generate, Sampling, Waterfall
from headrace.roles.links import GatewayUuid
from headrace.roles.served import Served


def served(**fields: Any) -> Served:
    loop = asyncio.new_event_loop()
    generate = Generate(
        sender="0" * 32,
        request_id="one",
        token_ids=(1,),
        num_prompt_tokens=1,
        max_tokens=1,
        sampling=Sampling(),
        stop_token_ids=(),
        prefill=None,
        tier="interactive",
        remaining_s=1.0,
    )
    timer, patience = (loop.call_later(60, print) for _ in range(2))
    loop.close()
    return Served(
        gateway=GatewayUuid("1" * 32),
        generate=generate,
        deadline=1.0,
        deadline_timer=timer,
        patience_timer=patience,
        **fields,
    )


def test_it_is_known_by_the_id_of_its_generate() -> None:
    assert served().request_id == "one"


def test_what_has_been_decided_is_not_waited_for() -> None:
    one = served(is_parked=True)
    patience = one.patience_timer
    assert patience is not None
    one.unpark()
    one.unpark()
    assert patience.cancelled() and one.patience_timer is None and not one.is_parked
    assert not one.deadline_timer.cancelled()


def test_at_its_end_no_timer_is_left() -> None:
    one = served()
    patience = one.patience_timer
    assert patience is not None
    one.cancel_timers()
    assert patience.cancelled() and one.deadline_timer.cancelled()


def test_the_waterfall_of_a_fetched_request() -> None:
    one = served(asked_at=1.0, landed_at=3.0, first_step_at=3.5, first_step_s=0.25)
    assert one.waterfall() == Waterfall(fetch_s=2.0, hand_over_s=0.5, first_step_s=0.25)


def test_the_waterfall_of_one_that_is_prefilled_where_it_decodes() -> None:
    one = served(started_at=1.0, first_step_at=3.5, first_step_s=0.25)
    assert one.waterfall() == Waterfall(local_prefill_s=2.5, first_step_s=0.25)


def test_a_request_that_ended_early_knows_what_it_knows() -> None:
    assert served().waterfall() == Waterfall()
    assert served(asked_at=1.0).waterfall() == Waterfall()
    assert served(asked_at=1.0, landed_at=3.0).waterfall() == Waterfall(fetch_s=2.0)
    assert served(started_at=1.0).waterfall() == Waterfall()


def test_clocks_that_disagree_by_a_rounding_give_no_negative_time() -> None:
    assert served(asked_at=1.0, landed_at=3.0, first_step_at=2.9).waterfall().hand_over_s == 0.0
