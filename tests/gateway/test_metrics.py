"""What Prometheus reads: parsed with its own parser, with names and values that it would refuse otherwise."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec
from gateway_fleet import fleet, generation, is_answered
from prometheus_client.parser import text_string_to_metric_families
from scripted_instance import announce, on_loop, status

from headrace.gateway.exchange import DispatchStatistics
from headrace.gateway.instances import Instance
from headrace.gateway.metrics import GatewayMetrics
from headrace.gateway.route import Price
from headrace.protocol.control import Role

NOTHING = DispatchStatistics(num_queued={}, num_running=0, num_events={}, num_dropped={})


class Standing:
    def __init__(self, *instances: Instance, statistics: DispatchStatistics = NOTHING) -> None:
        self._instances, self._statistics = instances, statistics

    def statistics(self) -> DispatchStatistics:
        return self._statistics

    def alive(self) -> Sequence[Instance]:
        return self._instances


def instance(
    uuid: str, role: Role = "decoder", *, name: str = "", gauges: Mapping[str, float], counters: Mapping[str, float]
) -> Instance:
    stands = msgspec.structs.replace(status(uuid), gauges=dict(gauges), counters=dict(counters))
    return Instance(announce=announce(role, uuid, name=name), heard_at=0.0, is_alive=True, status=stands)


def samples(metrics: GatewayMetrics) -> dict[tuple[str, ...], float]:
    """By name and label values."""
    read: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            key = (sample.name, *sample.labels.values())
            assert key not in read, f"twice: {key}"
            read[key] = sample.value
    return read


def rendered(*instances: Instance) -> dict[tuple[str, ...], float]:
    metrics = GatewayMetrics()
    metrics.expose(Standing(*instances))
    return samples(metrics)


def test_every_instances_figures_are_passed_through() -> None:
    read = rendered(
        instance("a" * 32, name="decoder-0", gauges={"pages_held": 3}, counters={"steps_total": 7}),
        instance("b" * 32, "prefiller", name="prefiller-0", gauges={"pages_held": 4}, counters={"steps": 8}),
    )
    assert read["headrace_instance_pages_held", "decoder-0", "decoder"] == 3
    assert read["headrace_instance_pages_held", "prefiller-0", "prefiller"] == 4
    assert read["headrace_instance_steps_total", "decoder-0", "decoder"] == 7
    assert read["headrace_instance_steps_total", "prefiller-0", "prefiller"] == 8
    assert read["headrace_instance_free_pages", "decoder-0", "decoder"] == 64
    assert read["headrace_instance_draining", "decoder-0", "decoder"] == 0
    assert (read["headrace_instances_alive", "decoder"], read["headrace_instances_alive", "colocated"]) == (1, 0)


def test_names_that_prometheus_forbids_are_made_valid() -> None:
    read = rendered(instance("a" * 32, name='odd "name"\n', gauges={"9 pages/held-é": 3}, counters={}))
    assert read["headrace_instance_9_pages_held__", 'odd "name"\n', "decoder"] == 3


def test_names_that_fall_together_appear_once() -> None:
    read = rendered(
        instance("a" * 32, name="d", gauges={"a.b": 1, "a-b": 2}, counters={}),
        instance("b" * 32, name="d", gauges={"a.b": 3}, counters={}),
        instance("c" * 32, gauges={"a.b": 4}, counters={}),
    )
    assert read["headrace_instance_a_b", "d", "decoder"] in (1, 2)
    assert read["headrace_instance_a_b", f"d-{'b' * 8}", "decoder"] == 3
    assert read["headrace_instance_a_b", f"-{'c' * 8}", "decoder"] == 4


def test_a_name_is_a_gauge_or_a_counter_and_never_both() -> None:
    read = rendered(
        instance("a" * 32, name="d", gauges={"x": 1}, counters={}),
        instance("b" * 32, name="e", gauges={}, counters={"x_total": 2}),
    )
    assert read["headrace_instance_x", "d", "decoder"] == 1
    assert not any("e" in key and key[0].startswith("headrace_instance_x") for key in read)


def test_an_instance_that_has_not_said_how_it_stands_is_counted_as_alive() -> None:
    silent = Instance(announce=announce("decoder", "a" * 32), heard_at=0.0, is_alive=True)
    assert rendered(silent)["headrace_instances_alive", "decoder"] == 1


def test_what_goes_on_is_shown_by_tier_event_and_fault() -> None:
    metrics = GatewayMetrics()
    going_on = DispatchStatistics(
        num_queued={"interactive": 3, "flex": 1},
        num_running=5,
        num_events={"wait": 7, "no_room": 2},
        num_dropped={"malformed": 1},
    )
    metrics.expose(Standing(statistics=going_on))
    read = samples(metrics)
    assert (read["headrace_queued", "interactive"], read["headrace_queued", "flex"]) == (3, 1)
    assert read["headrace_running",] == 5
    assert (read["headrace_dispatch_events_total", "wait"], read["headrace_dispatch_events_total", "no_room"]) == (7, 2)
    assert read["headrace_dropped_messages_total", "malformed"] == 1


def test_times_and_tokens_of_a_request_are_counted_once() -> None:
    metrics = GatewayMetrics()
    metrics.placed("interactive", 0.02)
    metrics.first_tokens("interactive", 0.2, 1, prompt_tokens=40)
    metrics.next_tokens("interactive", 0.03, 2)
    metrics.finished(cached_tokens=16, prefill_s=0.1, exposed_transfer_s=0.002)
    metrics.over("interactive", "stop", tpot_s=0.015)
    read = samples(metrics)
    kinds = ("prompt", "cached", "completion")
    assert [read["headrace_tokens_total", kind] for kind in kinds] == [40, 16, 3]
    for name, total in (("ttft", 0.2), ("itl", 0.03), ("tpot", 0.015), ("queue", 0.02)):
        assert read[f"headrace_{name}_seconds_sum", "interactive"] == total
        assert read[f"headrace_{name}_seconds_count", "interactive"] == 1
    assert (read["headrace_prefill_seconds_sum",], read["headrace_exposed_transfer_seconds_sum",]) == (0.1, 0.002)
    assert read["headrace_requests_total", "stop", "interactive"] == 1


def test_a_prediction_is_shown_by_its_terms_and_by_how_far_it_was_off() -> None:
    metrics = GatewayMetrics()
    price = Price(wait_s=0.25, prefill_s=0.5, transfer_s=0.125, hand_over_s=0.125, stall_s=8.0)
    metrics.predicted(price, 1.5)
    metrics.predicted(price, 0.75)
    read = samples(metrics)
    terms = ("wait", "prefill", "transfer", "hand_over")
    assert [read["headrace_predicted_ttft_seconds_total", term] for term in terms] == [0.5, 1.0, 0.25, 0.25]
    assert read["headrace_ttft_prediction_error_seconds_sum", "later"] == 0.5
    assert read["headrace_ttft_prediction_error_seconds_sum", "sooner"] == 0.25


def test_the_rate_at_which_an_instance_prefills_is_shown_once_it_is_measured() -> None:
    measured = Instance(
        announce=announce("prefiller", "a" * 32, name="p"),
        heard_at=0.0,
        is_alive=True,
        status=status("a" * 32, prefill_rate=1500.0),
    )
    read = rendered(measured, instance("b" * 32, name="d", gauges={}, counters={}))
    assert read["headrace_instance_prefill_tokens_per_second", "p", "prefiller"] == 1500
    assert read["headrace_instance_prefill_step_seconds", "p", "prefiller"] == 0
    assert ("headrace_instance_prefill_tokens_per_second", "d", "decoder") not in read


@on_loop
async def test_a_running_gateway_shows_its_requests_and_instances(tmp_path: Path) -> None:
    async with fleet(tmp_path) as around:
        around.prefiller.num_waits = 1
        around.decoder.token_s = 0.02  # the prefiller's word is here first, as it is when tokens take time
        await is_answered(around.dispatcher, generation())
        read = samples(around.dispatcher.metrics)
        assert read["headrace_requests_total", "length", "interactive"] == 1
        assert read["headrace_tokens_total", "completion"] == 5
        assert read["headrace_tokens_total", "cached"] == 2
        assert read["headrace_dispatch_events_total", "wait"] == 1
        assert read["headrace_exposed_transfer_seconds_count",] == 1
        assert read["headrace_predicted_ttft_seconds_total", "prefill"] == 0.039  # at the rate that is assumed
        errors = [read.get(("headrace_ttft_prediction_error_seconds_count", came), 0) for came in ("later", "sooner")]
        assert sum(errors) == 1
        assert read["headrace_instance_pages_held", around.decoder.announce.name, "decoder"] == 3
        assert read["headrace_running",] == 0


@on_loop
async def test_a_request_that_is_closed_has_had_its_prompt_tokens_and_its_pace(tmp_path: Path) -> None:
    """A stop string ends a choice at the gateway: closed, as by a client that leaves."""
    async with fleet(tmp_path) as around:
        around.decoder.token_s = 0.005
        async with aclosing(around.dispatcher.generate(generation(max_tokens=200))) as stream:
            num_tokens = 0
            async for progress in stream:
                num_tokens += len(progress.token_ids)
                if num_tokens >= 3:
                    break
        read = samples(around.dispatcher.metrics)
        assert read["headrace_requests_total", "closed", "interactive"] == 1
        assert read["headrace_tokens_total", "prompt"] == 40
        assert read["headrace_tokens_total", "completion"] == num_tokens
        assert read["headrace_tpot_seconds_count", "interactive"] == 1
