from pathlib import Path

import pytest

from headrace.bench.synthetic import drawn
from headrace.cli.compare.arms import (
    ArmPlan,
    Served,
    colocated_arm,
    gateway_command,
    instance_command,
    ratios,
    split_arm,
    told_commands,
)
from headrace.cli.compare.beginning import _arms, _slo, _target
from headrace.cli.compare.course import (
    common_rates,
    first_rate,
    idle_list,
    mean_by_length,
    next_rate,
    on_grid,
    repetitions,
)
from headrace.cli.compare.energy import Energy
from headrace.cli.compare.gateway_log import read_waterfalls
from headrace.cli.compare.link import read_link
from headrace.errors import InputError
from headrace.gateway.options import LocalPrefill

SERVED = Served(
    model_dir=Path("/models/tiny"),
    dtype="bf16",
    cpus=(4, 5, 6, 7),
    kv_memory_bytes=1 << 20,
    max_running=8,
    prefill_chunk_tokens=256,
)


def searched(limit: float, begin: float) -> dict[float, float]:
    """By an arm that keeps up to `limit`."""
    known: dict[float, float] = {}
    while (rate := next_rate(known, begin)) is not None:
        assert rate not in known and len(known) < 20
        known[rate] = 1.0 if rate <= limit else 0.2
    return known


@pytest.mark.parametrize("limit", [0.3, 1.0, 5.0, 27.0])
@pytest.mark.parametrize("begin", [0.5, 4.0])
def test_a_search_closes_in_on_the_rate_that_an_arm_keeps_up_with(limit: float, begin: float) -> None:
    known = searched(limit, on_grid(begin))
    kept = max(rate for rate, share in known.items() if share >= 0.9)
    missed = min(rate for rate, share in known.items() if share < 0.9)
    assert kept <= limit < missed and missed / kept < 1.25
    assert all(on_grid(rate) == rate for rate in known)


def test_a_search_gives_up_where_every_rate_is_kept_or_missed() -> None:
    for limit in (1e9, 1e-9):
        assert len(searched(limit, 1.0)) == 7


def test_all_arms_are_repeated_at_the_rates_where_any_of_them_changes_sides() -> None:
    known = {"a": searched(2.0, 1.0), "b": searched(5.0, 1.0)}
    rates = common_rates(known)
    assert list(rates) == sorted(rates) and len(rates) == 4
    assert rates[0] <= 2.0 < rates[1] < rates[2] <= 5.0 < rates[3]
    many = {str(limit): searched(limit, 1.0) for limit in (1.0, 2.0, 4.0, 8.0, 16.0)}
    assert len(common_rates(many)) == 5


def test_repetitions_meet_all_arms_in_turn() -> None:
    sessions = repetitions(["a", "b"], {"short": (1.0, 2.0)}, 3)
    assert [session.arm for session in sessions] == ["a", "b", "a", "b"]  # forwards, backwards, forwards
    assert [(one.rate, one.repetition) for one in sessions[1].points] == [(1.0, 1), (2.0, 1), (1.0, 2), (2.0, 2)]


def test_an_idle_arm_is_asked_for_short_and_long_prompts_the_longest_first() -> None:
    every = drawn("mixed", rate=1.0, num_requests=200, seed=1)
    idle = idle_list(every, gap_s=2.0)
    lengths = [one.prompt_tokens for one in idle.arrivals]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 3000 and lengths[-1] < 100
    assert [one.at_s for one in idle.arrivals] == [0.0, 2.0, 4.0, 6.0]
    assert mean_by_length([(100, 1.0), (200, 3.0)], [100, 150, 300]) == pytest.approx(2.0)


def test_the_first_rate_follows_from_how_long_a_device_is_busy() -> None:
    assert first_rate(num_devices=4, busy_s=0.5) == pytest.approx(4.0, rel=0.1)


# ---- arms ------------------------------------------------------------------------------------------------------


def test_every_arm_has_the_same_devices() -> None:
    plans: list[ArmPlan] = [
        colocated_arm(SERVED, 128),
        split_arm(SERVED, 1, local_prefill="cheaper"),
        split_arm(SERVED, 3, local_prefill="needed"),
    ]
    assert [plan.arm.name for plan in plans] == ["colocated, chunk 128", "split 1:3, local prefill", "split 3:1"]
    for plan in plans:
        assert sorted(one.cpu for one in plan.instances) == [4, 5, 6, 7] and plan.arm.devices == 4
    assert [one.role for one in plans[1].instances] == ["prefiller", "decoder", "decoder", "decoder"]


def test_decoders_that_prefill_by_choice_measure_chunks_before_their_first_request() -> None:
    """Else the gateway would never choose it (decision 0019), and two arms would be the same."""

    def bounded(local_prefill: LocalPrefill) -> dict[str, bool]:
        plan = split_arm(SERVED, 2, local_prefill=local_prefill)
        commands = {one.name: instance_command(one, SERVED, directory=Path("d")) for one in plan.instances}
        return {name: "--max-stall-ms" in command for name, command in commands.items()}

    assert {name for name, is_bounded in bounded("cheaper").items() if is_bounded} == {"decoder-0", "decoder-1"}
    assert not any(bounded("needed").values())


def test_commands_are_what_a_person_would_type() -> None:
    plan = split_arm(SERVED, 2, local_prefill="needed")
    gateway, prefiller, *_ = told_commands(plan, SERVED)
    assert gateway.startswith("headrace gateway --name gateway --control ipc://DIR/control.sock --port 8000")
    assert gateway.endswith("--local-prefill needed") and "--cpus 6" in prefiller
    assert "--local-prefill" not in " ".join(
        gateway_command(colocated_arm(SERVED, 64), SERVED, directory=Path("d"), port=1)
    )
    over = instance_command(plan.instances[0], SERVED, directory=Path("d"), address="10.0.0.1")
    assert over[-5:] == ("--fabric-host", "10.0.0.1", "--insecure", "--require-provider", "tcp")


def test_splits_are_the_evenest_first_and_leave_a_decoder() -> None:
    assert ratios(4) == [2, 1, 3] and ratios(2) == [1]
    with pytest.raises(InputError, match="must be two devices at the least"):
        ratios(1)
    with pytest.raises(InputError, match="must leave a decoder: 4 of 4"):
        _arms(SERVED, (64,), (4,), is_quick=False)
    names = [plan.arm.name for plan in _arms(SERVED, (64, 128), (), is_quick=True)]
    assert names == ["colocated, chunk 64", "colocated, chunk 128", "split 2:2, local prefill"]


# ---- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["http://there:1", "http://there:1,", "http://there:1,mill,none", "http://there:1,m,0"]
)
def test_a_target_names_its_model(text: str) -> None:
    with pytest.raises(InputError, match="must be URL,MODEL"):
        _target(text, 2)


def test_a_target_has_as_many_devices_as_it_says_or_as_the_others() -> None:
    assert [_target(text, 2).arm.devices for text in ("http://t,m", "http://t,m,8")] == [2, 8]


@pytest.mark.parametrize("text", ["fast", "10", "1gbit,2ms", "0.1mbit", "900gbit", "1Gbit"])
def test_a_link_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^link: must be a rate"):
        read_link(text)


def test_a_link_says_what_it_is() -> None:
    assert read_link("100mbit").bits_per_s == 1e8
    assert str(read_link("2.5gbit")).startswith("2.5 gbit/s, shaped by tbf")


def test_budgets_come_in_pairs() -> None:
    slo = _slo(500.0, 50.0)
    assert slo is not None and (slo.ttft_s, slo.tpot_s) == (0.5, 0.05) and _slo(None, None) is None
    for given in ((500.0, None), (None, 50.0)):
        with pytest.raises(InputError, match="must be given with the other budget"):
            _slo(*given)


def test_a_requests_waterfall_is_read_from_the_gateways_log() -> None:
    log = (
        "x cmpl-ab-0: length; queue 5.0 ms, prefiller queue 1.0 ms, prefill 100.0 ms, exposed transfer 2.0 ms, "
        "hand-over 1.0 ms, first step 11.0 ms, ttft 121.5 ms; 8 prompt tokens\n"
        "x cmpl-cd-0: failed; queue -, prefiller queue -, prefill -, ttft -; 8 prompt tokens\n"
    )
    found = read_waterfalls(log)
    told = found["cmpl-ab"]
    assert (told.queue_s, told.prefill_s, told.exposed_transfer_s) == pytest.approx((0.006, 0.1, 0.002))
    assert told.gateway_s == pytest.approx(0.0015) and found["cmpl-cd"].prefill_s is None


def test_energy_is_told_where_it_is_counted_and_counters_may_begin_again(tmp_path: Path) -> None:
    assert Energy(tmp_path).joules() is None and not Energy(tmp_path).is_counted
    for name, counted in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 7_000_000), ("intel-rapl:0:0", 1)):
        domain = tmp_path / name
        domain.mkdir()
        (domain / "energy_uj").write_text(str(counted))
        (domain / "max_energy_range_uj").write_text("9999999")
    energy = Energy(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("6500000")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("1000000")
    assert energy.joules() == 1.5 + 4.0
