"""What steps cost on devices that are not here: counted work, a roofline, files of hardware, fits of profiles."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.deploy.known import FILE_OF, known_config
from headrace.deploy.weights import Held
from headrace.engine.cost import StepSize
from headrace.errors import InputError
from headrace.model.families import FAMILIES
from headrace.model.shape import ModelShape
from headrace.planner.costs.fitting import fit, leave_out, steps_of, told_errors
from headrace.planner.costs.hardware import read_hardware
from headrace.planner.costs.published import Group, Measured, read_distserve, read_splitwise
from headrace.planner.costs.roofline import Efficiency, RooflineSteps, Sharding, norm
from headrace.planner.costs.work import Work

HARDWARE = read_hardware()
SPLITWISE = (
    "model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,prompt_time,token_time,e2e_time,"
    "tensor_parallel\n"
)


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(known_config(name))


def roofline(name: str, device: str, **sharding: int) -> RooflineSteps:
    return RooflineSteps(work=Work.of(shape_of(name)), device=HARDWARE.device(device), sharding=Sharding(**sharding))


@pytest.mark.parametrize("name", FILE_OF)
def test_counted_weights_are_those_of_the_models_tensors(name: str) -> None:
    shape = shape_of(name)
    tensors = FAMILIES[shape.architecture].tensor_shapes(shape)
    counted = Work.of(shape).weight_bytes
    tied = 2 * shape.vocab_size * shape.hidden_size if shape.tie_word_embeddings else 0
    assert counted - tied == pytest.approx(Held.on_disk(shape).num_bytes(tensors), rel=0.01)


def test_all_experts_are_read_by_many_tokens_and_as_many_as_are_chosen_by_one() -> None:
    work = Work.of(shape_of("deepseek-ai/DeepSeek-R1"))
    assert work.num_experts_read(1) == pytest.approx(8) and work.num_experts_read(4096) == pytest.approx(256)
    assert Work.of(shape_of("meta-llama/Llama-3.1-8B")).num_experts_read(4) == 0


def test_a_decode_step_takes_as_long_as_its_bytes_where_they_are_what_counts() -> None:
    steps = roofline("meta-llama/Llama-3.1-70B", "h100", tp=2)
    read_s = 139e9 / 2 / 3.35e12 / HARDWARE.device("h100").efficiency.memory
    assert steps.step_s(StepSize(rows=1, keys=1)) == pytest.approx(read_s, rel=0.05)
    alone, full = (steps.step_s(StepSize(rows=16, keys=keys)) for keys in (16, 16 * 8192))
    assert full - alone == pytest.approx(16 * 8192 * 327_680 / 2 / 3.35e12 / 0.583, rel=0.1)


def test_a_latent_is_read_by_every_rank_and_heads_are_shared() -> None:
    keys = StepSize(rows=64, keys=64 * 32_768)
    for name, shares in (("deepseek-ai/DeepSeek-R1", False), ("meta-llama/Llama-3.1-70B", True)):
        few, many = (roofline(name, "h200", tp=tp)._memory_s(keys) for tp in (4, 8))
        bare = [roofline(name, "h200", tp=tp)._memory_s(replace(keys, keys=0)) for tp in (4, 8)]
        assert ((few - bare[0]) > 1.9 * (many - bare[1])) is shares


@given(
    rows=st.integers(0, 64),
    chunk=st.integers(0, 8192),
    keys=st.integers(0, 10**6),
    more=st.integers(1, 10**6),
)
def test_steps_are_convex_in_their_keys_and_never_shorter_for_more(rows: int, chunk: int, keys: int, more: int) -> None:
    steps = roofline("deepseek-ai/DeepSeek-R1", "h200", tp=8)

    def seconds(num: int) -> float:
        return steps.step_s(StepSize(rows=rows, chunk_tokens=chunk, keys=num, pairs=chunk * (chunk + 1) // 2))

    few, some, many = seconds(keys), seconds(keys + more), seconds(keys + 2 * more)
    assert few <= some <= many and some <= (few + many) / 2 + 1e-12
    assert steps.step_s(StepSize(rows=rows + 1, chunk_tokens=chunk, keys=keys)) >= steps.step_s(
        StepSize(rows=rows, chunk_tokens=chunk, keys=keys)
    )


def test_a_norm_is_between_the_larger_one_and_the_sum() -> None:
    assert norm(0, 0, 6) == 0 and norm(1, 0, 6) == 1 and 1 < norm(1, 1, 6) < 2 and norm(1, 1, 1) == 2


# ---- files -----------------------------------------------------------------------------------------------------


def test_a_file_of_ones_own_adds_and_replaces(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[devices.h100]\nprice_hour = 1.5\n[links.mine]\ngbps = 50\nlatency_us = 9\n")
    read = read_hardware(own)
    assert read.device("h100").price_hour == 1.5 and read.device("h100").flops == HARDWARE.device("h100").flops
    assert read.link("mine").bytes_s == pytest.approx(0.9 * 50e9 / 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[devices.h100]\nflops = 'many'\n", r"devices\.h100\.flops: must be a number from 1e-09 to 1e\+18, is 'many'"),
        ("[devices.mine]\nflops = 1e12\n", r"devices\.mine\.memory: must be a size such as \"80GB\", is missing"),
        ("[devices.h100]\nspeed = 1\n", r"devices\.h100\.speed: must not be there, known are flops"),
        ("[devices.h100]\nefficiency = 'x'\n", r"devices\.h100\.efficiency: must be one of .*h100.*, is 'x'"),
        ("[efficiencies.h100]\nmemory = 1.5\n", r"efficiencies\.h100\.memory: must be a number from 1e-09 to 1,"),
        ("[links]\nfast = 3\n", r"own\.toml: links\.fast: must be a table"),
        ("[device.h100]\n", r"own\.toml: device: must be one of devices, efficiencies, links"),
        ("[devices", r"own\.toml: must be TOML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_by_its_key(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(InputError, match=said):
        read_hardware(tmp_path / "own.toml")


def test_who_is_not_known_is_told_who_is() -> None:
    with pytest.raises(InputError, match=r"device: must be one of a100, .*, is 'h300'"):
        HARDWARE.device("h300")


# ---- profiles --------------------------------------------------------------------------------------------------


def test_a_setting_is_the_median_of_its_repeats(tmp_path: Path) -> None:
    file = tmp_path / "profile.csv"
    times = ((100, 40), (90, 42), (200, 41))
    rows = "".join(f"llama2-70b,a100-80gb,512,2,128,1,1,{prompt},{token},0,2\n" for prompt, token in times)
    file.write_text(SPLITWISE + rows)
    prefill, decode = read_splitwise(file)
    assert (prefill.phase, prefill.seconds, prefill.size) == (
        *("prefill", 0.1),
        StepSize(chunk_tokens=1024, keys=1024, pairs=512 * 513),
    )
    assert (decode.phase, decode.seconds, decode.size) == ("decode", 0.041, StepSize(rows=2, keys=2 * 576))


def test_a_wrong_profile_is_told_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "profile.csv"
    file.write_text(SPLITWISE + "llama2-70b,a100-80gb,many,2,128,1,1,1,1,0,2\n")
    with pytest.raises(InputError, match=r"profile\.csv:2: must be numbers"):
        read_splitwise(file)
    file.write_text("model,hardware\n")
    with pytest.raises(InputError, match=r"profile\.csv:1: must have the columns .* no tensor_parallel"):
        read_splitwise(file)


def test_distserves_line_is_the_cost_of_a_step(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(
        '{"facebook/opt-13b": {"1": {"decoding_large_small_bs_threshold": 95, "prefill": [18.0, 0.1, 7e-06],'
        ' "decoding_smallbs": [15.0, 0.0006, 0.04], "decoding_largebs": [7.0, 0.0006, 0.16]}}}'
    )
    (line,) = read_distserve(file)
    assert line.cost.predict(StepSize().with_chunk(0, 1000)) == pytest.approx(line.prefill_s(1000), rel=0.01)
    assert line.decode_s(10, 5000) == pytest.approx(0.0184) and line.decode_s(100, 5000) == pytest.approx(0.026)
    file.write_text("[]")
    with pytest.raises(InputError, match="must be DistServe's profile"):
        read_distserve(file)


# ---- fits ------------------------------------------------------------------------------------------------------

DEVICES = {"a100-80gb": HARDWARE.device("a100"), "h100-80gb": HARDWARE.device("h100")}
TRUE = {name: HARDWARE.device(f"{name[:4]}").efficiency for name in DEVICES}


def planted(truth: dict[str, Efficiency]) -> list[Measured]:
    sizes = [("prefill", StepSize().with_chunk(0, num)) for num in (128, 512, 1024, 2048, 4096, 8192)]
    sizes += [("prefill", StepSize(chunk_tokens=512 * num, keys=512 * num, pairs=512 * 256 * num)) for num in (2, 16)]
    sizes += [("decode", StepSize(rows=num, keys=600 * num)) for num in (1, 2, 4, 8, 16, 32, 64)]
    groups = [Group(model="llama2-70b", hardware=name, tp=tp) for name in DEVICES for tp in (2, 4, 8)]
    return [
        Measured(
            group=group,
            phase="prefill" if phase == "prefill" else "decode",
            size=size,
            batch=max(1, size.rows),
            seconds=steps_of(group, DEVICES[group.hardware], truth[group.hardware]).step_s(size),
        )
        for group in groups
        for phase, size in sizes
    ]


def eager() -> dict[str, Efficiency]:
    """Shares that none of the starting values has."""
    one = replace(TRUE["a100-80gb"], launch_s=5e-4, chunk_launch=1.4, row_s=3e-4, late_row_s=2e-4)
    two = replace(TRUE["h100-80gb"], launch_s=4e-4, chunk_launch=1.6, row_s=2e-4, late_row_s=2e-4, experts=1.0)
    return {"a100-80gb": one, "h100-80gb": two}


def test_a_fit_finds_what_was_planted() -> None:
    truth = eager()
    fitted = fit(planted(truth), DEVICES)
    for hardware, efficiency in truth.items():
        found = fitted.efficiencies[hardware]
        assert found.memory == pytest.approx(efficiency.memory, rel=0.05)
        assert found.compute == pytest.approx(efficiency.compute, rel=0.05)
        assert found.launch_s == pytest.approx(efficiency.launch_s, rel=0.05)


def test_a_group_that_is_left_out_is_told_from_the_others() -> None:
    left_out = leave_out(planted(eager()), DEVICES)
    assert len(left_out) == 12 and sum(one.is_inside for one in left_out) == 4
    mean, p90 = told_errors(left_out)
    assert mean < 0.04 and p90 < 0.1
