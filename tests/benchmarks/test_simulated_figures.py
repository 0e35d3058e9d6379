"""What the benchmark of the simulation says of two columns of figures."""

import pytest
from simulated import compared, half_width, scenario_of_arm

from headrace.bench.comparison import Arm
from headrace.planner.profile import LinkProfile, Profile, StepProfile

STEPS = StepProfile(
    step_s=0.01,
    row_s=0.001,
    token_s=0.001,
    key_s=0.0,
    pair_s=0.0,
    num_steps=9,
    error_p50=0.1,
    error_p90=0.1,
    chunk_tokens=256,
    max_running=8,
    num_pages=99,
)
PROFILE = Profile(
    headrace="0",
    measured="",
    machine="",
    model="",
    dtype="bf16",
    page_size=16,
    num_layers=2,
    page_bytes=64,
    page_messages=1,
    steps={"colocated": STEPS, "prefiller": STEPS, "decoder": STEPS},
    gateway_s=0.001,
    hand_over_s=0.001,
    link=LinkProfile(bytes_s=1e9, latency_s=0.0, message_s=0.0),
)


def test_near_is_a_tenth_or_the_interval_whichever_is_wider() -> None:
    assert half_width([9.0, 10.0, 11.0]) == pytest.approx(4.303 / 3**0.5)
    assert compared([9.0, 10.0, 11.0], [12.4])[1] and not compared([9.0, 10.0, 11.0], [12.6])[1]
    assert compared([10.0, 10.0, 10.0], [10.9, 10.9])[1] and not compared([10.0, 10.0, 10.0], [11.1, 11.1])[1]
    assert compared([9.0, 10.0, 11.0], [12.4])[0] == ["10.0", "± 2.5", "12.4", "+24%", "ok"]


def test_an_arm_is_simulated_with_its_own_instances() -> None:
    split = Arm(name="a", kind="split", devices=3, chunk_tokens=128, num_prefillers=1, num_decoders=2)
    assert [(one.name, one.chunk_tokens) for one in scenario_of_arm(PROFILE, split).instances] == [
        ("prefiller-0", 128),
        ("decoder-0", 128),
        ("decoder-1", 128),
    ]
    colocated = Arm(name="b", kind="colocated", devices=2, chunk_tokens=64, num_decoders=2)
    assert [one.name for one in scenario_of_arm(PROFILE, colocated).instances] == ["colocated-0", "colocated-1"]
