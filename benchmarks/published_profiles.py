"""What devices reach of their peaks, found in published profiles, and how wrong that is for what was left out.

    python benchmarks/published_profiles.py --splitwise FILE.csv [--distserve FILE.json]

Prints the tables of docs/measurements.md, "What a step takes on devices that are not here", and the numbers that stand
in src/headrace/planner/costs/hardware.toml. No clock: the same output every time.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from headrace.deploy.known import known_config
from headrace.engine.cost import StepSize
from headrace.model.shape import ModelShape
from headrace.planner.costs.fitting import fit, leave_out, told_errors
from headrace.planner.costs.hardware import Hardware, read_hardware
from headrace.planner.costs.published import (
    WORKS,
    DistServeLine,
    Measured,
    read_distserve,
    read_splitwise,
)
from headrace.planner.costs.roofline import Device, RooflineSteps, Sharding
from headrace.planner.costs.work import Work

DEVICES = {"a100-80gb": "a100", "h100-80gb": "h100"}
"""Of Splitwise's hardware. Its third, H100 with capped power, repeats H100: prompts times 1.3, tokens as they are."""

OUT_OF_MEMORY = (2, 64)
"""TP and batch: 64 prompts of 512 tokens in a tenth of the time of 32 cannot have been computed."""

QWEN3 = "Qwen/Qwen3-235B-A22B"
QWEN3_TTFT_MS: Mapping[int, float] = {4096: 214, 8192: 433, 16384: 929, 32768: 2179, 65536: 5681, 131072: 16735}
"""Colocated, TP4 on H200, by prompt tokens. Source: the published table of KV transfer over EFA (FABRIC)."""
QWEN3_FITTED = (4096, 16384)


def usable(measured: Sequence[Measured]) -> list[Measured]:
    return [one for one in measured if one.group.hardware in DEVICES and (one.group.tp, one.batch) != OUT_OF_MEMORY]


def splitwise(file: Path, hardware: Hardware) -> Iterator[str]:
    devices = {name: hardware.device(ours) for name, ours in DEVICES.items()}
    measured = usable(read_splitwise(file))
    fitted = fit(measured, devices)
    for name, efficiency in fitted.efficiencies.items():
        yield f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in asdict(efficiency).items())
    for model, launches in fitted.launches.items():
        yield f"kernels of {model}: launches x{launches:.2f}, products x{fitted.products[model]:.2f}"
    left_out = leave_out(measured, devices)
    yield "\n| left out | phase | mean error | largest | |\n|---|---|---|---|---|"
    for one in left_out:
        largest = max(one.errors, key=abs)
        yield f"| {one.group} | {one.phase} | {one.mean:.1%} | {largest:+.0%} | {'inside' if one.is_inside else ''} |"
    inside, all_of_them = told_errors([one for one in left_out if one.is_inside]), told_errors(left_out)
    yield f"inside the fitted range: mean {inside[0]:.1%}, p90 {inside[1]:.1%}"
    yield f"all groups: mean {all_of_them[0]:.1%}, p90 {all_of_them[1]:.1%}"


def distserve(file: Path, hardware: Hardware) -> Iterator[str]:
    """Its lines are of another engine, without a measured row: whether ours has the same form is all that they tell."""
    yield "\n| DistServe's A100 | prefill: ours by theirs at 256, 512, 1,024, 2,048 tokens | decode: 1, 16, 64 rows |"
    yield "|---|---|---|"
    for line in read_distserve(file):
        steps = a100_steps(line, hardware.device("a100"))
        prefill = [steps.step_s(StepSize().with_chunk(0, num)) / line.prefill_s(num) for num in (256, 512, 1024, 2048)]
        decode = [
            steps.step_s(StepSize(rows=num, keys=num * 512)) / line.decode_s(num, num * 512) for num in (1, 16, 64)
        ]
        told = " | ".join(", ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in (prefill, decode))
        yield f"| {line.model} TP{line.tp} | {told} |"


def a100_steps(line: DistServeLine, device: Device) -> RooflineSteps:
    return RooflineSteps(work=WORKS[line.model], device=device, sharding=Sharding(tp=line.tp))


def qwen3_steps(hardware: Hardware, experts: float) -> RooflineSteps:
    device = hardware.device("h200")
    device = replace(device, efficiency=replace(device.efficiency, experts=experts))
    work = Work.of(ModelShape.from_config(known_config(QWEN3)))
    return RooflineSteps(work=work, device=device, sharding=Sharding(tp=4))


def qwen3_ms(hardware: Hardware, experts: float, num_tokens: int) -> float:
    return 1e3 * qwen3_steps(hardware, experts).step_s(StepSize().with_chunk(0, num_tokens))


def fitted_experts(hardware: Hardware) -> float:
    """To a thousandth: the least sum of squared logarithms over the two rows that it may see."""

    def loss(thousandths: int) -> float:
        told = {num: qwen3_ms(hardware, thousandths / 1e3, num) for num in QWEN3_FITTED}
        return sum(math.log(ms / QWEN3_TTFT_MS[num]) ** 2 for num, ms in told.items())

    return min(range(100, 1001), key=loss) / 1e3


def qwen3(hardware: Hardware) -> Iterator[str]:
    experts = fitted_experts(hardware)
    yield f"\nexperts {experts}, from {QWEN3_FITTED[0]:,} and {QWEN3_FITTED[1]:,} tokens"
    yield "| Qwen3-235B, TP4, H200 | published | told | error | |\n|---|---|---|---|---|"
    for num, ms in QWEN3_TTFT_MS.items():
        told = qwen3_ms(hardware, experts, num)
        kind = "fitted" if num in QWEN3_FITTED else "held out"
        yield f"| {num:,} tokens | {ms:,.0f} ms | {told:,.0f} ms | {told / ms - 1:+.1%} | {kind} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splitwise", type=Path, required=True)
    parser.add_argument("--distserve", type=Path)
    given = parser.parse_args()
    hardware = read_hardware()
    for text in splitwise(given.splitwise, hardware):
        print(text)
    if given.distserve is not None:
        for text in distserve(given.distserve, hardware):
            print(text)
    for text in qwen3(hardware):
        print(text)


if __name__ == "__main__":
    main()
