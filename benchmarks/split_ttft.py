"""What splitting costs a request: time to first token of one request at a time, split against colocated.

The same one core computes the prompt in both: colocated on one core with one thread, split as a prefiller on that core
and a decoder on the other. The difference is what the split adds: lease, ticket, exposed transfer, hand-over, and the
first decode step, which colocated does not need since it samples from the prefill's last row. Arms take turns; random
prompts, so no prefix is cached. Clock: at the client, from the request's first byte to the first token's bytes.

    python benchmarks/split_ttft.py [--runs 5] [--requests 20] [--lengths 128 1000] [--transport mapped]
"""

import argparse
import asyncio
import re
import statistics
from collections.abc import Sequence

from _client import random_prompt, require
from _deployment import Deployment, InstanceSpec, percentile, split
from _endpoint import add_transport, positive

from headrace.cli.machine import describe_machine


def arms(transport: str) -> dict[str, Sequence[InstanceSpec]]:
    return {
        "colocated": (InstanceSpec("colocated", cores="1", options=("--chunk-tokens", "512")),),
        "split": split(transport, "--chunk-tokens", "512"),
    }


async def ask(running: Deployment, lengths: Sequence[int], num_requests: int, seed: int) -> dict[int, list[float]]:
    """-> TTFT in ms, by length."""
    require([await running.complete(random_prompt(length, seed), 2) for length in (16, *lengths)])
    told: dict[int, list[float]] = {}
    for length in lengths:
        for number in range(num_requests):
            stream = await running.complete(random_prompt(length, 1000 * seed + 10 * number + length), 2)
            require([stream])
            told.setdefault(length, []).append(1e3 * stream.ttft_s)
    return told


def waterfall(log: str) -> str:
    """Medians of what the gateway said of all requests, in ms."""
    names = ("queue", "exposed transfer", "hand-over", "first step")
    found = {name: [float(value) for value in re.findall(rf"\b{name} ([\d.]+) ms", log)] for name in names}
    return ", ".join(f"{name} {statistics.median(values):.1f}" for name, values in found.items() if values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=20)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[128, 1000])
    add_transport(parser)
    arguments = parser.parse_args()
    print(f"{describe_machine()}; split over {arguments.transport}")
    medians: dict[tuple[str, int], list[float]] = {}
    for number in range(arguments.runs):
        for name, instances in arms(arguments.transport).items():
            with Deployment(instances, log_level="debug", gateway_cores="0") as running:
                told = asyncio.run(ask(running, arguments.lengths, arguments.requests, number + 1))
                for length, values in told.items():
                    medians.setdefault((name, length), []).append(percentile(values, 0.5))
                print(f"{name}: {waterfall(running.log())} (ms, all lengths)", flush=True)
    for length in arguments.lengths:
        for name in arms(arguments.transport):
            values = medians[name, length]
            median = statistics.median(values)
            print(f"{length:5} tokens, {name:9}: TTFT {median:.0f} ms ({min(values):.0f}-{max(values):.0f})")


if __name__ == "__main__":
    main()
