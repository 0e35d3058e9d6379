"""What a simulation says where one can tell by hand."""

from itertools import pairwise

import numpy as np
import pytest
from deployments import COST, KV, LINK, arrivals, instance, poisson, scenario, split

from headrace.bench import metrics
from headrace.engine.cost import StepSize
from headrace.planner.scenario import LinkModel, Network
from headrace.planner.simulate import simulate

PAGE = 16


def test_a_request_alone_takes_its_prefill_the_last_layer_the_hand_over_and_a_step() -> None:
    record = simulate(split(), arrivals([(1.0, 801, 3)]))[0]
    prefill_s = COST.predict(StepSize().with_chunk(0, 800))
    num_pages = 800 // PAGE
    last_layer_s = LINK.seconds(num_pages * KV.page_bytes, num_pages * KV.page_messages) / KV.num_layers
    steps_s = [COST.predict(StepSize(rows=1, keys=keys)) for keys in (801, 802, 803)]
    first_s = 1e-3 + prefill_s + last_layer_s + LINK.latency_s + 2e-3 + steps_s[0] + 1e-3
    expected = 1.0 + first_s + np.array([0.0, steps_s[1], steps_s[1] + steps_s[2]])
    assert record.token_s == pytest.approx(tuple(expected), abs=1e-12)
    waterfall = record.waterfall
    assert waterfall is not None
    assert waterfall.prefill_s == pytest.approx(prefill_s)
    assert waterfall.exposed_transfer_s == pytest.approx(last_layer_s + LINK.latency_s)
    assert waterfall.hand_over_s == pytest.approx(2e-3)
    assert waterfall.first_step_s == pytest.approx(steps_s[0])


def test_a_slow_link_shows_all_but_the_first_layer_of_the_prefill() -> None:
    slow = LinkModel(bytes_s=1e9)
    record = simulate(split(network=Network(routed=slow)), arrivals([(0.0, 801, 1)]))[0]
    prefill_s = COST.predict(StepSize().with_chunk(0, 800))
    transfer_s = slow.seconds(50 * KV.page_bytes, 0)
    assert transfer_s > prefill_s and record.waterfall is not None
    exposed_s = transfer_s - prefill_s * (1 - 1 / KV.num_layers)
    assert record.waterfall.exposed_transfer_s == pytest.approx(exposed_s)


def test_the_stall_of_a_colocated_stream_is_the_step_with_the_chunk() -> None:
    both = simulate(scenario(instance("c", "colocated", chunk_tokens=256)), arrivals([(0.0, 16, 200), (0.5, 256, 1)]))
    gaps = [late - early for early, late in pairwise(both[0].token_s)]
    nth = int(np.argmax(gaps))
    rows = StepSize(rows=1, keys=16 + nth + 1)  # the gap between tokens n and n+1 is the step that reads 16+n+1 keys
    assert gaps[nth] == pytest.approx(COST.predict(rows.with_chunk(0, 256)))
    assert both.stall_s == pytest.approx(gaps[nth])
    assert metrics.stall_s(both) == pytest.approx(both.stall_s)


def test_constant_prompts_wait_as_in_a_queue_with_constant_service() -> None:
    """Each as Lindley says; on average as M/D/1: rho / (2 (1 - rho)) services, where a step computes one prompt."""
    decoders = [instance(f"d{nth}", "decoder") for nth in range(4)]
    service_s = COST.predict(StepSize().with_chunk(0, 512))
    load = 0.4
    asked = poisson(4_000, load / service_s, prompt=(513, 513), output=(1, 1), seed=3)
    done = simulate(scenario(instance("p", "prefiller", chunk_tokens=512), *decoders), asked)
    waits = np.array([record.waterfall.queue_s for record in done if record.waterfall is not None], dtype=float)
    expected, wait_s = [0.0], 0.0
    for early, late in pairwise(arrival.at_s for arrival in asked.arrivals):
        wait_s = max(0.0, wait_s + service_s - (late - early))
        expected.append(wait_s)
    assert waits == pytest.approx(np.array(expected), abs=1e-9)
    assert waits.mean() == pytest.approx(load / (2 * (1 - load)) * service_s, rel=0.1)  # of so many
