"""Where a request's time went: sums of what three processes say, and the line that a person reads."""

from headrace.gateway.dispatch.figures import Waterfall, waterfall_of
from headrace.protocol.control import Finished, Prefilled
from headrace.protocol.control import Waterfall as AtDecoder

UUID = "a" * 32


def finished(**times: float) -> Finished:
    return Finished(
        sender=UUID,
        request_id="r",
        reason="stop",
        text="",
        num_tokens=1,
        cached_tokens=0,
        waterfall=AtDecoder(**times),
    )


def prefilled(queue_s: float, prefill_s: float) -> Prefilled:
    return Prefilled(sender=UUID, request_id="r", num_computed=1, queue_s=queue_s, prefill_s=prefill_s)


def test_what_the_fetch_took_beyond_the_prefill_is_exposed_transfer() -> None:
    told = finished(fetch_s=0.5, hand_over_s=0.01, first_step_s=0.02)
    waterfall = waterfall_of(told, prefilled(0.125, 0.25), queue_s=0.1, ttft_s=0.7)
    assert waterfall == Waterfall(
        queue_s=0.1,
        prefiller_queue_s=0.125,
        prefill_s=0.25,
        exposed_transfer_s=0.125,
        hand_over_s=0.01,
        first_step_s=0.02,
        ttft_s=0.7,
    )


def test_exposed_transfer_is_never_negative() -> None:
    waterfall = waterfall_of(finished(fetch_s=0.2), prefilled(0.1, 0.2), queue_s=None, ttft_s=None)
    assert waterfall.exposed_transfer_s == 0


def test_a_prompt_that_was_prefilled_at_the_decoder_has_no_transfer_whatever_a_prefiller_says() -> None:
    waterfall = waterfall_of(finished(local_prefill_s=0.3), prefilled(0.1, 0.2), queue_s=0.0, ttft_s=0.4)
    assert (waterfall.prefill_s, waterfall.exposed_transfer_s, waterfall.prefiller_queue_s) == (0.3, None, None)


def test_what_the_prefiller_did_not_tell_is_unknown_and_not_guessed() -> None:
    waterfall = waterfall_of(finished(fetch_s=0.5), None, queue_s=0.0, ttft_s=0.6)
    assert (waterfall.prefill_s, waterfall.exposed_transfer_s) == (None, None)


def test_a_person_reads_milliseconds_and_a_dash_for_what_never_was() -> None:
    line = str(waterfall_of(None, None, queue_s=0.0123, ttft_s=None))
    assert line.startswith("queue 12.3 ms, prefiller queue -, prefill -") and line.endswith("ttft -")
