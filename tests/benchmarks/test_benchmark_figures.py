"""What benchmarks compute from what they saw: when throughput was back, and what the gateway's log says of requests."""

from math import inf

from _gateway_log import decoders, moved
from abort_storm import recovery_s
from split_ttft import PARTS, parts

from headrace.bench.metrics import percentile
from headrace.cli.compare.gateway_log import read_parts
from headrace.gateway.dispatch.figures import Waterfall


def test_throughput_is_back_with_the_first_of_three_good_windows_in_a_row() -> None:
    assert recovery_s([100, 95, 91, 5], before=100) == 0
    assert recovery_s([0, 95, 95, 20, 95, 95, 95], before=100) == 4
    assert recovery_s([0, 95, 95, 20, 95, 95], before=100) is None


def test_the_parts_of_a_waterfall_are_read_as_the_gateway_writes_them_and_add_up() -> None:
    whole = Waterfall(
        queue_s=0.003,
        prefiller_queue_s=0.001,
        prefill_s=0.1,
        exposed_transfer_s=0.002,
        hand_over_s=0.004,
        first_step_s=0.025,
        ttft_s=0.137,
    )
    said = read_parts(f"gateway debug cmpl-1a-0: length; {whole}; 128 prompt tokens\n")["cmpl-1a"]
    assert said["prefill"] == 100 and said["prefiller queue"] == 1
    of_it = parts(said, 141.0)
    assert tuple(of_it) == PARTS
    assert round(of_it["gateway"], 3) == 4 and round(of_it["messages"], 3) == 2 and round(sum(of_it.values()), 3) == 141


def test_a_part_that_a_request_did_not_come_to_is_none_of_its_waterfall() -> None:
    colocated = Waterfall(queue_s=0.003, prefill_s=0.0002, first_step_s=0.1, ttft_s=0.104)
    said = read_parts(f"cmpl-1a-0: length; {colocated}; 128 prompt tokens")["cmpl-1a"]
    assert said == {"queue": 3.0, "prefill": 0.2, "first step": 100.0, "ttft": 104.0}


def test_who_served_a_request_and_who_was_moved_are_read_from_the_log() -> None:
    log = (
        "gateway debug cmpl-2b-0: its decoder is gone: silent for 2 s; it goes on elsewhere after 3 tokens\n"
        f"gateway debug cmpl-2b-0: length; {Waterfall()}; 9 prompt tokens (0 cached), 2 tokens; decoder decoder-1, "
        "prefiller -; predicted -\n"
    )
    assert decoders(log) == {"cmpl-2b": "decoder-1"} and moved(log) == {"cmpl-2b"}


def test_what_never_came_is_infinite_in_a_percentile_that_it_reaches_and_in_no_other() -> None:
    assert percentile([1.0, 2.0, 3.0, inf], 0.5) == 2.5
    assert percentile([1.0, 2.0, inf], 0.5) == 2.0
    assert percentile([1.0, inf, inf], 0.99) == inf and percentile([1.0, 2.0, inf], 0.75) == inf
