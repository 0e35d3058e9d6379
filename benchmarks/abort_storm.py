"""500 requests, of which 90 % are cancelled at random moments: how soon is the throughput back?

A prefiller and a decoder, a core each. Eight clients ask one request after another (128 tokens in, 64 out); in the
middle, 500 more of the same come within `--within` seconds, and nine of ten leave: in line, while their prompt is
computed or travels, or while they decode, at a moment drawn anew for each. Throughput: tokens at all clients, in
windows of 1 s. Before: the median window of the eight alone. Back: the first of three windows in a row, after the last
one has left, at 0.9 of that or more; recovery counts from that leaving to the window's begin. Those who stay have to be
served too, and are in no way cut short. At last everything is idle: no page held or quarantined, no ticket open.

    python benchmarks/abort_storm.py [--runs 5] [--requests 500] [--within 5] [--transport mapped] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from _client import Stream, random_prompt, require
from _deployment import Deployment, split
from _endpoint import add_transport, positive
from _figures import Conditions, add_json, head, keep, row, spread

from headrace.bench.metrics import percentile

NUM_CLIENTS, NUM_IN, NUM_OUT = 8, 128, 64
LEAVING_SHARE = 0.9
LONGEST_STAY_S = 6.0
QUIET_S, IDLE_S = 10.0, 15.0
BACK_SHARE, BACK_WINDOWS, MOST_S = 0.9, 3, 10.0
BUSY = ("pages_held", "pages_quarantined", "tickets_open", "pages_held_by_decoders")


@dataclass(frozen=True)
class Run:
    before: float  # tokens/s
    windows: list[float]  # after the last one has left
    recovery_s: float | None  # None: not back while it was watched
    num_left: int
    num_unserved: int  # of those, that left before their first token
    num_stayed: int
    left_over: float  # pages and tickets, when all is idle


class Traffic:
    """Every request that was asked; each prompt is another."""

    def __init__(self, running: Deployment, seed: int) -> None:
        self._running = running
        self._seeds = count(100_000 * seed)
        self.streams: list[Stream] = []

    def stream(self) -> Stream:
        """Of the next request."""
        self.streams.append(Stream())
        return self.streams[-1]

    async def ask(self, stream: Stream) -> None:
        await self._running.complete(random_prompt(NUM_IN, next(self._seeds)), NUM_OUT, into=stream)

    async def keep_asking(self) -> None:
        while True:
            await self.ask(self.stream())

    def windows(self, begin: float, end: float) -> list[float]:
        """Tokens/s in each whole second of it."""
        counts = [0.0] * int(end - begin)
        for at in (at for stream in self.streams for at in stream.times):
            if 0 <= at - begin < len(counts):
                counts[int(at - begin)] += 1
        return counts


async def play(running: Deployment, seed: int, num_requests: int, within_s: float) -> Run:
    traffic, draw = Traffic(running, seed), random.Random(seed)
    clients = [asyncio.create_task(traffic.keep_asking()) for _ in range(NUM_CLIENTS)]
    await asyncio.sleep(2.0)
    quiet_from = time.monotonic()
    await asyncio.sleep(QUIET_S)
    storm_from = time.monotonic()
    left, stayed = await storm(traffic, draw, num_requests, within_s)
    calm_from = time.monotonic()
    await asyncio.gather(asyncio.sleep(MOST_S + BACK_WINDOWS), *stayed)
    calm_until = time.monotonic()
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    require(traffic.streams)
    before = percentile(traffic.windows(quiet_from, storm_from), 0.5)
    windows = traffic.windows(calm_from, calm_until)
    return Run(
        before=before,
        windows=windows,
        recovery_s=recovery_s(windows, before),
        num_left=len(left),
        num_unserved=sum(not stream.times for stream in left),
        num_stayed=len(stayed),
        left_over=await left_over(running),
    )


async def storm(
    traffic: Traffic, draw: random.Random, num_requests: int, within_s: float
) -> tuple[list[Stream], list["asyncio.Task[None]"]]:
    """-> the requests whose client has left, and those that go on; when the last one has left."""
    leaving, stayed = [], []
    for _ in range(num_requests):
        stream = traffic.stream()
        request = asyncio.create_task(traffic.ask(stream))
        if draw.random() < LEAVING_SHARE:
            leaving.append((stream, asyncio.create_task(leave(request, LONGEST_STAY_S * draw.random() ** 2))))
        else:
            stayed.append(request)
        await asyncio.sleep(within_s / num_requests)
    return [stream for stream, leaver in leaving if await leaver], stayed


async def leave(request: "asyncio.Task[None]", after_s: float) -> bool:
    """False where it was over by then."""
    await asyncio.sleep(after_s)
    if request.done():
        return False
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    return True


def recovery_s(windows: Sequence[float], before: float) -> float | None:
    """The begin of the first windows in a row that are as good as before."""
    good = [window >= BACK_SHARE * before for window in windows]
    for number in range(len(good) - BACK_WINDOWS + 1):
        if all(good[number : number + BACK_WINDOWS]):
            return float(number)
    return None


async def left_over(running: Deployment) -> float:
    """What instances hold once they have had time to let go."""
    until = time.monotonic() + IDLE_S
    while True:
        gauges = await running.gauges()
        held = sum(value for (_, name), value in gauges.items() if name in BUSY)
        if not held or time.monotonic() > until:
            return held
        await asyncio.sleep(0.5)


def show(runs: Sequence[Run]) -> None:
    back = [run.recovery_s for run in runs if run.recovery_s is not None]
    lasting = [percentile(run.windows, 0.5) for run in runs]
    print(
        "\n"
        + head("runs", "tokens/s before", "after", "back after, s", "left", "before a token", "stayed", "left over")
    )
    print(
        row(
            str(len(runs)),
            spread([run.before for run in runs]),
            spread(lasting),
            f"**{spread(back)}**" + (f", {len(runs) - len(back)} never" if len(back) < len(runs) else ""),
            *(str(sum(getattr(run, name) for run in runs)) for name in ("num_left", "num_unserved", "num_stayed")),
            f"{sum(run.left_over for run in runs):.0f}",
        )
    )
    is_met = len(back) == len(runs) and max(back) <= MOST_S
    print(f"\ntarget, back within {MOST_S:.0f} s in every run: {'met' if is_met else 'missed'}")


async def warm(running: Deployment) -> None:
    require([await running.complete(random_prompt(length, 9), 8) for length in (16, 300)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=500, help="of the storm")
    parser.add_argument("--within", type=float, default=5.0, help="seconds in which they come")
    add_transport(parser)
    add_json(parser)
    arguments = parser.parse_args()
    conditions = Conditions(
        f"{arguments.requests} requests in {arguments.within:g} s; split over {arguments.transport}"
    )
    with Deployment(split(arguments.transport), gateway=("--max-queued", str(arguments.requests + 100))) as running:
        asyncio.run(warm(running))
        runs = [
            asyncio.run(play(running, number + 1, arguments.requests, arguments.within))
            for number in range(arguments.runs)
        ]
    show(runs)
    conditions.end()
    keep(arguments.json, runs)


if __name__ == "__main__":
    main()
