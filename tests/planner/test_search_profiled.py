"""Shapes of deployments where steps were measured."""

from dataclasses import replace

import msgspec
import pytest
from profiled import profiled, steps_profiled

from headrace.bench.metrics import Slo
from headrace.planner.costs.hardware import read_hardware
from headrace.planner.profile import Profile, StepProfile
from headrace.planner.scenario import Role
from headrace.planner.search.profiled import CHUNKS, ProfiledSite
from headrace.planner.search.site import Lengths

LENGTHS = Lengths(mean_prompt=500, mean_output=50, p90_prompt=1000, longest=1200)


def site(tpot_s: float = 0.03, **roles: StepProfile) -> ProfiledSite:
    return ProfiledSite(
        profile=profiled("smollm2-135m-instruct", **roles),
        device=read_hardware().device("cpu-core"),
        lengths=LENGTHS,
        slo=Slo(ttft_s=2.0, tpot_s=tpot_s),
    )


def test_every_chunk_size_is_a_colocated_shape_and_there_is_one_split_one() -> None:
    assert [one.pools[0].kind.chunk_tokens for one in site().colocated()] == list(CHUNKS)
    (split,) = site().split()
    assert [pool.kind.role for pool in split.pools] == ["prefiller", "decoder"]
    assert split.around.gateway_s == 0.001 and split.kv.page_bytes == 368_640 and split.num_devices == 2


def test_batches_are_as_large_as_the_budget_allows_and_no_larger_than_was_profiled() -> None:
    (split,) = site().split()
    assert split.pools[1].kind.max_running == 21  # 8 ms + 21 * (1 ms + 525 keys)
    (split,) = site(tpot_s=1.0).split()
    assert split.pools[1].kind.max_running == 32 and split.pools[1].kind.tpot_s == 1.0


@pytest.mark.parametrize("tight", [{"num_pages": 10}, {"step_s": 0.05}])
def test_what_has_no_room_or_no_step_short_enough_is_no_shape(tight: dict[str, float]) -> None:
    assert not list(site(decoder=steps_profiled(**tight)).split())
    assert not list(site(colocated=steps_profiled(**tight)).colocated())


def test_a_role_that_was_not_profiled_is_in_no_shape() -> None:
    alone = site()
    own = replace(alone, profile=_without(alone.profile, "prefiller"))
    assert not list(own.split()) and len(list(own.colocated())) == len(CHUNKS)


def _without(profile: Profile, role: Role) -> Profile:
    return msgspec.structs.replace(profile, steps={name: one for name, one in profile.steps.items() if name != role})
