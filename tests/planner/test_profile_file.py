"""A profile as a file, and the scenarios that follow from it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from deployments import poisson

from headrace.engine.cost import StepCost
from headrace.errors import InputError
from headrace.planner.profile import (
    LinkProfile,
    Profile,
    StepProfile,
    read_profile,
    scenario_of,
    steps_of,
    write_profile,
)
from headrace.planner.simulate import simulate

STEPS = StepProfile(
    step_s=0.01,
    row_s=0.001,
    token_s=0.001,
    key_s=1e-6,
    pair_s=1e-7,
    num_steps=100,
    error_p50=0.1,
    error_p90=0.2,
    chunk_tokens=256,
    max_running=32,
    num_pages=500,
)
PROFILE = Profile(
    headrace="0.1",
    measured="2026-01-31T12:00:00+00:00",
    machine="a machine",
    model="tiny",
    dtype="bf16",
    page_size=16,
    num_layers=4,
    page_bytes=1 << 16,
    page_messages=8,
    steps={
        "prefiller": msgspec.structs.replace(STEPS, num_pages=400),
        "decoder": STEPS,
        "colocated": msgspec.structs.replace(STEPS, step_s=0.02),
    },
    gateway_s=0.001,
    hand_over_s=0.002,
    link=LinkProfile(bytes_s=1e9, latency_s=1e-4, message_s=1e-6),
)


def changed(tmp_path: Path, **fields: Any) -> Path:
    file = tmp_path / "profile.json"
    told = msgspec.to_builtins(PROFILE)
    file.write_bytes(msgspec.json.encode({**told, **fields}))
    return file


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", PROFILE)
    assert read_profile(tmp_path / "profile.json") == PROFILE
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": 2}, "profile.json: format: must be 1"),
        ({"page_size": "16"}, "profile.json: page_size: must be as in a profile: Expected `int`"),
        ({"colour": 1}, "profile.json: must be a profile: .*colour"),
        ({"steps": {"gateway": {}}}, "profile.json: .*Invalid enum value 'gateway'"),
        ({"steps": {"decoder": {**msgspec.to_builtins(STEPS), "row_s": -1.0}}}, "profile.json: row_s: must be"),
        ({"link": {"bytes_s": 0.0, "latency_s": 0.0, "message_s": 0.0}}, "profile.json: bytes_s: must be"),
        ({"num_layers": 0}, "profile.json: num_layers: must be at least 1"),
        ({"gateway_s": -0.1}, "profile.json: gateway_s: must be a number of seconds"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_field(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_profile(changed(tmp_path, **fields))


def test_a_file_that_is_not_there_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent.json: must be a profile that can be read"):
        read_profile(tmp_path / "absent.json")


def test_a_scenario_has_the_instances_of_an_arm_with_what_was_measured_of_their_role() -> None:
    colocated = scenario_of(PROFILE, colocated=2, chunk_tokens=64)
    assert [(one.name, one.chunk_tokens, one.num_pages) for one in colocated.instances] == [
        ("colocated-0", 64, 500),
        ("colocated-1", 64, 500),
    ]
    split = scenario_of(PROFILE, prefillers=1, decoders=2, prefills=True)
    assert [one.name for one in split.instances] == ["prefiller-0", "decoder-0", "decoder-1"]
    assert [one.prefills for one in split.instances] == [False, True, True]
    assert split.instances[0].num_pages == 400 and split.instances[0].chunk_tokens == 256
    assert split.gateway_s == 0.001 and split.hand_over_s == 0.002 and split.kv.page_messages == 8
    assert steps_of(PROFILE, "decoder").cost == StepCost(
        step_s=0.01, row_s=0.001, token_s=0.001, key_s=1e-6, pair_s=1e-7
    )
    came = simulate(split, poisson(20, 2.0, prompt=(16, 400), output=(2, 20)))
    assert all(record.error is None for record in came)


def test_a_role_that_was_not_measured_has_no_scenario() -> None:
    profile = msgspec.structs.replace(PROFILE, steps={"colocated": STEPS})
    with pytest.raises(InputError, match="steps: must be of a prefiller too, are of colocated"):
        scenario_of(profile, prefillers=1, decoders=1)
