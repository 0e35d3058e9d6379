"""The table of a profile: parts, shares and bounds as they are in its numbers."""

from dataclasses import replace

import pytest

from headrace.cli.profile_step.report import NAMES, Part, Profile, Spread, StreamsProfile, rendered


def spread(value: float) -> Spread:
    return Spread(median=value, low=value - 0.25, high=value + 1)


def streams(num: int, **parts: float) -> StreamsProfile:
    return StreamsProfile(
        num_streams=num,
        num_steps=64,
        parts={name: Part(ms=spread(parts.get(name, 0.5)), share=parts.get(name, 0.5) / 20) for name in NAMES},
        step_ms=spread(20),
        itl_ms=spread(21),
        gateway_cpu_ms=0.346,
        stopwatch_ms=0.0451,
        key_bytes=10e6 * num,
    )


def profile(read_gbps: float | None = 10.0) -> Profile:
    return Profile(
        machine="a machine",
        kernels="native (fast), 1 thread",
        workload="a model",
        weight_bytes=200_000_000,
        chooses_weights=False,
        read_gbps=read_gbps,
        streams=[streams(1, linear=12.34), streams(8, linear=14.0, attention=3.5)],
    )


def cells(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_spread_is_median_and_tenths() -> None:
    assert Spread.of([float(value) for value in range(101)][::-1]) == Spread(median=50, low=10, high=90)


def test_every_part_has_its_row_with_a_column_for_each_number_of_streams() -> None:
    text = rendered(profile())
    assert cells(text, "ms a step") == ["1 stream", "share", "8 streams", "share"]
    assert cells(text, "linear layers") == ["12.34 (12.09-13.34)", "61.7 %", "14.00 (13.75-15.00)", "70.0 %"]
    assert cells(text, "attention")[2:] == ["3.50 (3.25-4.50)", "17.5 %"]
    assert cells(text, "from step to step") == ["20.00 (19.75-21.00)", "100 %"] * 2
    for name in NAMES.values():
        assert len(cells(text, name)) == 4


def test_the_table_is_markdown_of_one_width() -> None:
    lines = [line for line in rendered(profile()).splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1 and set(lines[1]) == {"|", "-", ":"}


def test_the_bound_is_weights_and_keys_at_the_rate_that_memory_is_read_at() -> None:
    assert cells(rendered(profile()), "beside it: what a step reads, read once") == ["21.00", "", "28.00", ""]
    assert "200 MB of weights and 10, 80 MB of keys and values, at 10.0 GB/s" in rendered(profile())


def test_without_native_kernels_there_is_no_bound() -> None:
    text = rendered(profile(read_gbps=None))
    assert "read once" not in text and "GB/s" not in text and "200 MB of weights" in text


def test_where_a_step_reads_some_experts_only_there_is_no_bound_but_a_most() -> None:
    text = rendered(replace(profile(), chooses_weights=True))
    assert "read once" not in text and "A step reads at most 200 MB of weights" in text


@pytest.mark.parametrize("said", ["machine: a machine", "kernels: native (fast), 1 thread", "workload: a model"])
def test_what_it_was_measured_on_stands_above(said: str) -> None:
    assert said in rendered(profile()).splitlines()[:3]
