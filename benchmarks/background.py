"""Background beside interactive traffic: does one keep its budget, and what does the other still get done?

A prefiller and a decoder, a core each. Background: 64 summaries of 1,500 tokens (`service_tier` flex, 32 tokens out),
all asked for at once. Interactive: every 0.5 s a new request (200 tokens in, 64 out), which makes some 4 streams at a
time, with a budget for the first token. Two arms take turns, each in processes of its own:

    alone     the background without anybody beside it, for `--seconds` from its first token
    beside    the same, with interactive requests arriving all the while

A rate counts prompt tokens, of requests whose first token came within that time, since the prefiller is what they
compete for. Target: interactive TTFT p99 within its budget, and background at 0.8 of what it gets alone less what the
interactive prompts take. What is not over at the end is cancelled. Interactive TTFT counts from the intended arrival to
the first token's bytes at the client; percentiles are over the requests of all runs, and one that failed is a miss.

    python benchmarks/background.py [--runs 5] [--seconds 20] [--ttft-ms 1000] [--transport mapped] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from _client import Stream, random_prompt, require
from _deployment import Deployment, split
from _endpoint import add_transport, positive
from _figures import Conditions, add_json, head, keep, row, spread

from headrace.bench.metrics import percentile

NUM_SUMMARIES, SUMMARY_IN, SUMMARY_OUT = 64, 1500, 32
CHAT_IN, CHAT_OUT, CHAT_EVERY_S = 200, 64, 0.5
LEAST_SHARE = 0.8
ARMS = ("alone", "beside")


@dataclass(frozen=True)
class Run:
    arm: str
    background_rate: float  # prompt tokens/s
    interactive_rate: float
    ttft_ms: tuple[float, ...]  # of interactive requests that began in time; infinite of one that failed
    summary_ttft_s: float  # p50, of the summaries that got to it


async def play(running: Deployment, arm: str, seed: int, seconds: float, ttft_ms: int) -> Run:
    summaries = [Stream() for _ in range(NUM_SUMMARIES)]
    tasks = [asyncio.create_task(summarise(running, stream, seed + number)) for number, stream in enumerate(summaries)]
    while not any(stream.times for stream in summaries):
        await asyncio.sleep(0.01)
    begin = time.monotonic()
    chats: list[tuple[float, Stream]] = []
    if arm == "beside":
        tasks += await keep_chatting(running, chats, seed, (begin, seconds), ttft_ms)
    await asyncio.sleep(begin + seconds - time.monotonic())
    end = time.monotonic()
    ttfts = await last_words(chats, seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    require(summaries)
    return Run(
        arm=arm,
        background_rate=SUMMARY_IN * num_begun(summaries, begin, end) / (end - begin),
        interactive_rate=CHAT_IN * num_begun([stream for _, stream in chats], begin, end) / (end - begin),
        ttft_ms=tuple(ttfts),
        summary_ttft_s=percentile([stream.ttft_s for stream in summaries if stream.times], 0.5),
    )


async def summarise(running: Deployment, stream: Stream, seed: int) -> None:
    prompt = random_prompt(SUMMARY_IN, seed)
    await running.complete(prompt, SUMMARY_OUT, into=stream, service_tier="flex")


async def keep_chatting(
    running: Deployment, chats: list[tuple[float, Stream]], seed: int, window: tuple[float, float], ttft_ms: int
) -> list["asyncio.Task[Stream]"]:
    begin, seconds = window
    tasks = []
    for number in range(int(seconds / CHAT_EVERY_S)):
        intended = begin + number * CHAT_EVERY_S
        await asyncio.sleep(max(0.0, intended - time.monotonic()))
        prompt, stream = random_prompt(CHAT_IN, 10_000 + seed + number), Stream()
        chats.append((intended, stream))
        headers = {"x-headrace-ttft-ms": str(ttft_ms)}
        tasks.append(asyncio.create_task(running.complete(prompt, CHAT_OUT, into=stream, headers=headers)))
    return tasks


async def last_words(chats: Sequence[tuple[float, Stream]], most_s: float) -> list[float]:
    """-> TTFT in ms, once every one has its first token or has failed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            while any(not stream.times and not stream.error for _, stream in chats):
                await asyncio.sleep(0.02)
    return [1e3 * (stream.times[0] - intended) if stream.times else math.inf for intended, stream in chats]


def num_begun(streams: Sequence[Stream], begin: float, end: float) -> int:
    return sum(begin <= stream.times[0] < end for stream in streams if stream.times)


def show(runs: Sequence[Run], ttft_ms: int) -> None:
    cells = ("background prompt tokens/s", "interactive", "interactive TTFT p50, ms", "p99", "summaries' TTFT p50, s")
    print("\n" + head("background", *cells))
    of_arm = {arm: [run for run in runs if run.arm == arm] for arm in ARMS}
    for arm, these in of_arm.items():
        ttfts = [ttft for run in these for ttft in run.ttft_ms]
        print(
            row(
                arm,
                spread([run.background_rate for run in these]),
                spread([run.interactive_rate for run in these]),
                *(f"{percentile(ttfts, share):.0f}" if ttfts else "-" for share in (0.5, 0.99)),
                spread([run.summary_ttft_s for run in these], 1),
            )
        )
    shares = [
        beside.background_rate / (alone.background_rate - beside.interactive_rate)
        for alone, beside in zip(of_arm["alone"], of_arm["beside"], strict=True)
    ]
    p99 = percentile([ttft for run in of_arm["beside"] for ttft in run.ttft_ms], 0.99)
    kept = "met" if percentile(shares, 0.5) >= LEAST_SHARE else "missed"
    print(f"\ntargets: interactive TTFT p99 within {ttft_ms} ms: {'met' if p99 <= ttft_ms else 'missed'};")
    print(f"background {LEAST_SHARE} of its rate alone less the interactive prompts': **{spread(shares, 2)}**, {kept}")


async def warm(running: Deployment) -> None:
    require([await running.complete(random_prompt(length, 9), 8) for length in (16, 300, 1500)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="that an arm is measured for")
    parser.add_argument("--ttft-ms", type=positive, default=1000, help="interactive budget for the first token")
    add_transport(parser)
    add_json(parser)
    arguments = parser.parse_args()
    conditions = Conditions(f"{NUM_SUMMARIES} summaries of {SUMMARY_IN} tokens; split over {arguments.transport}")
    runs = []
    for number in range(arguments.runs):
        for arm in ARMS:
            with Deployment(split(arguments.transport)) as running:
                asyncio.run(warm(running))
                runs.append(asyncio.run(play(running, arm, 1000 * number, arguments.seconds, arguments.ttft_ms)))
    show(runs, arguments.ttft_ms)
    conditions.end()
    keep(arguments.json, runs)


if __name__ == "__main__":
    main()
