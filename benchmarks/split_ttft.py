"""What splitting costs a request: time to first token of one request at a time, split against colocated, part by part.

The same one core computes the prompt in both: colocated on one core with one thread, split as a prefiller on that core
and a decoder on the other. The gateway runs on whichever is free: held to the decoder's, it would share it with the
step after the first token, and with nobody where the instance is colocated. Arms take turns; random prompts, so no
prefix is cached. Clock: at the client, from the request's first byte to the first token's bytes.

The waterfall is the mean over the requests of all runs whose TTFT lies in the middle half of their arm's, so that its
parts add up to its last line:

    gateway            HTTP and tokens, both ways: the client's time less the gateway's own
    queue              admission until a decoder had accepted it: lease and pages
    prefill            at the prefiller. Colocated it is part of the first step, which draws from the prefill's last row
    exposed transfer   what its way to the decoder added to queue and prefill; Prefill's own way is part of it
    hand-over          the last byte there until the decode step began: digests, waiting
    first step         which ends with the first token
    messages           what is left: that token's way to the gateway, less Accepted's, which is in the queue too

A decode step is what the split arm's second to last token took, by the median.

    python benchmarks/split_ttft.py [--runs 5] [--requests 20] [--lengths 128 1000] [--transport mapped] [--json FILE]
"""

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _client import random_prompt, require
from _deployment import Deployment, InstanceSpec, split
from _endpoint import add_transport, positive
from _figures import Conditions, add_json, head, keep, row, spread

from headrace.bench.metrics import percentile
from headrace.cli.compare.gateway_log import read_parts

NUM_OUT = 4
TOLD = ("queue", "prefiller queue", "prefill", "exposed transfer", "hand-over", "first step")
PARTS = ("gateway", *TOLD, "messages")
ALLOWED_MS = 10.0  # beside one decode step


@dataclass(frozen=True)
class Asked:
    """Milliseconds; `parts` add up to `ttft_ms`."""

    arm: str
    run: int
    length: int
    ttft_ms: float
    step_ms: float
    parts: Mapping[str, float]


def arms(transport: str) -> dict[str, Sequence[InstanceSpec]]:
    return {
        "colocated": (InstanceSpec("colocated", cores="1", options=("--chunk-tokens", "512")),),
        "split": split(transport, "--chunk-tokens", "512"),
    }


async def ask(running: Deployment, arm: str, lengths: Sequence[int], num_requests: int, run: int) -> list[Asked]:
    require([await running.complete(random_prompt(length, run), NUM_OUT) for length in (16, *lengths)])
    asked = []
    for length in lengths:
        streams = []
        for number in range(num_requests):
            seed = 1000 * run + 10 * number + length
            streams.append(await running.complete(random_prompt(length, seed), NUM_OUT))
        require(streams)
        told = read_parts(running.log())
        for stream in streams:
            ttft_ms, step_ms = 1e3 * stream.ttft_s, 1e3 * statistics.median(gap for _, gap in stream.gaps)
            asked.append(Asked(arm, run, length, ttft_ms, step_ms, parts(told[stream.id], ttft_ms)))
    return asked


def parts(told: Mapping[str, float], ttft_ms: float) -> dict[str, float]:
    known = {name: told.get(name, 0.0) for name in TOLD}
    return {"gateway": ttft_ms - told["ttft"], **known, "messages": told["ttft"] - sum(known.values())}


def middle_half(asked: Sequence[Asked]) -> list[Asked]:
    low, high = (percentile([one.ttft_ms for one in asked], share) for share in (0.25, 0.75))
    return [one for one in asked if low <= one.ttft_ms <= high]


def show(asked: Sequence[Asked], length: int) -> None:
    of_arm = {arm: [one for one in asked if (one.arm, one.length) == (arm, length)] for arm in ("colocated", "split")}
    middle = {arm: middle_half(these) for arm, these in of_arm.items()}
    print("\n" + head(f"{length} tokens, ms", *of_arm, "difference"))
    lines = {part: {arm: statistics.mean(one.parts[part] for one in middle[arm]) for arm in middle} for part in PARTS}
    lines["**TTFT**"] = {arm: statistics.mean(one.ttft_ms for one in middle[arm]) for arm in middle}
    for name, ms in lines.items():
        print(row(name, *(f"{value:.1f}" for value in ms.values()), f"{ms['split'] - ms['colocated']:.1f}"))
    medians = {arm: by_run(these) for arm, these in of_arm.items()}
    costs = [late - early for early, late in zip(*medians.values(), strict=True)]
    step_ms = statistics.median(one.step_ms for one in of_arm["split"])
    print(row("TTFT, each run's median", *(spread(values) for values in medians.values()), f"**{spread(costs)}**"))
    met = "met" if statistics.median(costs) <= step_ms + ALLOWED_MS else "missed"
    print(f"\ntarget, a decode step of {step_ms:.0f} ms and {ALLOWED_MS:.0f} ms: {met}")


def by_run(asked: Sequence[Asked]) -> list[float]:
    runs = sorted({one.run for one in asked})
    return [statistics.median(one.ttft_ms for one in asked if one.run == run) for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=20)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[128, 1000])
    add_transport(parser)
    add_json(parser)
    arguments = parser.parse_args()
    conditions = Conditions(f"one request at a time; split over {arguments.transport}")
    asked: list[Asked] = []
    for number in range(arguments.runs):
        for arm, instances in arms(arguments.transport).items():
            with Deployment(instances, log_level="debug") as running:
                asked += asyncio.run(ask(running, arm, arguments.lengths, arguments.requests, number + 1))
    for length in arguments.lengths:
        show(asked, length)
    conditions.end()
    keep(arguments.json, asked)


if __name__ == "__main__":
    main()
