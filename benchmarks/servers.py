"""Servers with an OpenAI-compatible API beside each other: decode of 1 and 8 streams, and the first token of prompts.

One instance each, on one core, all of them running at once and asked in turns, `--runs` times, greedy, random token ids
that no prefix cache has. headrace is started here (colocated, and with `--split` a prefiller on the other core);
others must be running: `--server NAME=PORT,MODEL`, once for each. How they are started belongs beside the figures.

    decode    tokens/s between the first and the last token of each stream, 128 in and 128 out; of 8 their sum
    prefill   prompt tokens / time to the first token

Medians, lowest and highest of the runs, and the ratio of medians to each other server. Clock: at the client, where the
bytes of a token arrive.

    python benchmarks/servers.py [--runs 5] [--core 1] [--split [--transport mapped]] [--server vllm=8101,smol ..]
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack

from _client import Endpoint, Stream, random_prompt, require
from _deployment import Deployment, InstanceSpec, split
from _endpoint import add_transport, positive

from headrace.cli.machine import describe_machine, steal_share, ticks

NUM_IN, NUM_OUT, NUM_STREAMS = 128, 128, 8
PROMPTS = (128, 512, 2000)

Measure = Callable[[Endpoint, int], Coroutine[None, None, float]]


def rate(streams: Sequence[Stream]) -> float:
    """Tokens/s from when all of them had their first token to when the first of them had its last."""
    begin, end = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    return sum(begin < at <= end for stream in streams for at in stream.times) / (end - begin)


async def decode_one(server: Endpoint, seed: int) -> float:
    streams = [await server.complete(random_prompt(NUM_IN, seed), NUM_OUT)]
    require(streams)
    return rate(streams)


async def decode_many(server: Endpoint, seed: int) -> float:
    prompts = [random_prompt(NUM_IN, seed * 100 + number) for number in range(NUM_STREAMS)]
    streams = await asyncio.gather(*(server.complete(prompt, NUM_OUT) for prompt in prompts))
    require(streams)
    return rate(streams)


def prefill(num_tokens: int) -> Measure:
    async def measure(server: Endpoint, seed: int) -> float:
        stream = await server.complete(random_prompt(num_tokens, seed * 1000 + num_tokens), 1)
        require([stream])
        return num_tokens / stream.ttft_s

    return measure


CELLS: dict[str, Measure] = {
    "decode, 1 stream, tok/s": decode_one,
    "decode, 8 streams, tok/s": decode_many,
    **{f"prefill of {length}, tok/s": prefill(length) for length in PROMPTS},
}


async def ask(servers: dict[str, Endpoint], runs: int, seed: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {cell: {name: [] for name in servers} for cell in CELLS}
    for run in range(runs + 1):  # the first is a warm-up
        for cell, measure in CELLS.items():
            for name, server in servers.items():
                value = await measure(server, seed + run)
                if run:
                    found[cell][name].append(value)
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    for cell, of_server in found.items():
        first = statistics.median(next(iter(of_server.values())))
        for name, values in of_server.items():
            median = statistics.median(values)
            spread = f"{median:8.1f} ({min(values):.1f}-{max(values):.1f})"
            print(f"{cell:26} {name:16} {spread:28} {first / median:.2f}x", flush=True)


def named(word: str) -> tuple[str, Endpoint]:
    name, where = word.split("=", 1)
    port, model = where.split(",", 1)
    return name, Endpoint(int(port), model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", default="1", help="that each instance runs on")
    parser.add_argument("--split", action="store_true", help="headrace with a prefiller on core 0 too")
    add_transport(parser)
    parser.add_argument("--server", type=named, action="append", default=[])
    arguments = parser.parse_args()
    print(describe_machine() + (f"; split over {arguments.transport}" if arguments.split else ""))
    begin = ticks()
    with ExitStack() as stack:
        servers = {"headrace": _ours(stack, [InstanceSpec("colocated", arguments.core)])}
        if arguments.split:
            both = split(arguments.transport, cores=("0", arguments.core))
            servers["headrace, split"] = _ours(stack, both)
        servers.update(arguments.server)
        found = asyncio.run(ask(servers, arguments.runs, arguments.seed))
    show(found)
    print(f"steal time {100 * steal_share(begin):.1f} %")


def _ours(stack: ExitStack, instances: Sequence[InstanceSpec]) -> Endpoint:
    return stack.enter_context(Deployment(instances, common=("--chunk-tokens", "512"))).endpoint


if __name__ == "__main__":
    main()
