"""One prefiller, three decoders: do equal requests become equal batches, and whom does a bad decoder hold up?

A tiny model with seeded weights, so that what is measured is everything but the model; five processes. Every prompt is
another, and every text is compared with what a colocated instance writes, token by token: a page or a count that went
to the wrong decoder would show, as would the decoders' own counts of wrong bytes and of arrivals that nobody awaited.

    balance   `--requests` equal requests, 12 at once: how many decode together in a step of each decoder, how many each
              served (a faster one serves more), and how far from their mean that is
    faults    bursts of 6 requests every 0.75 s, for `--seconds`; then as long with one decoder killed, or slow (stopped
              for 80 of each 100 ms), or stopped. The rate: tokens at the client, of requests that the other two
              decoders served alone, before and during in the same run. Faults take turns, and so do the decoders

Bursts are an open loop well below what two cores can do: at their limit a dead decoder would leave the others its CPU,
and a stopped one its requests. That the others take over what the bad one was given can only raise their rate; what
would lower it is a prefiller or a gateway that waits for it. Clock: at the client. In brackets: lowest and highest run.

    python benchmarks/fan_out.py [--runs 5] [--requests 240] [--seconds 6] [--transport mapped] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from _client import Stream, random_prompt, require
from _deployment import Deployment, InstanceSpec
from _endpoint import add_transport, positive
from _figures import Conditions, add_json, head, keep, row, spread
from _gateway_log import decoders, moved
from _tiny_model import VOCABULARY, write_tiny_model

from headrace.bench.metrics import percentile

DECODERS = ("decoder-1", "decoder-2", "decoder-3")
FAULTS = ("killed", "slow", "stopped")
NUM_IN, NUM_OUT, AT_ONCE = 64, 32, 12
BURST, BURST_EVERY_S = 6, 0.75
IN_FLIGHT_S = 0.03  # after a burst's begin: the fault meets requests in every state
SETTLE_S = 2.5  # a gateway takes 2 s to miss somebody
STOPPED_S, GOING_S = 0.08, 0.02
LEAST_SHARE, MOST_APART = 0.95, 0.10

Right = Mapping[int, Sequence[int]]
"""The text of each prompt, by its seed."""


@dataclass(frozen=True)
class Balance:
    requests: Mapping[str, int]
    batches: Mapping[str, float]  # requests in a step, on average
    num_wrong: int


@dataclass(frozen=True)
class Run:
    fault: str
    decoder: str
    rate_before: float  # tokens/s of the other two
    rate_during: float
    ttft_before_ms: float  # p50 of requests that they served
    ttft_during_ms: float
    longest_ms: float  # to a first token, of all requests that began during the fault
    num_requests: int
    num_moved: int  # lost their decoder, and went on elsewhere
    num_wrong: int
    num_failed: int

    @property
    def share(self) -> float:
        return self.rate_during / self.rate_before


class Load:
    """The requests of one deployment: each has a prompt of its own, known by its seed."""

    def __init__(self, running: Deployment, right: Right) -> None:
        self._running = running
        self._right = right
        self._seeds = count()
        self.streams: list[tuple[int, Stream]] = []

    async def ask(self) -> None:
        seed, stream = next(self._seeds), Stream()
        self.streams.append((seed, stream))
        await self._running.complete(prompt(seed), NUM_OUT, into=stream)

    def num_wrong(self) -> int:
        """Of those that ended well."""
        return sum(list(self._right[seed]) != stream.token_ids for seed, stream in self.streams if not stream.error)


def prompt(seed: int) -> list[int]:
    return random_prompt(NUM_IN, seed, VOCABULARY)


async def texts(alone: Deployment, num_prompts: int) -> Right:
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> Stream:
        async with turn:
            return await alone.complete(prompt(seed), NUM_OUT)

    streams = await asyncio.gather(*(one(seed) for seed in range(num_prompts)))
    require(streams)
    return {seed: stream.token_ids for seed, stream in enumerate(streams)}


# ---- equal batches -------------------------------------------------------------------------------------------------


async def balance(running: Deployment, load: Load, num_requests: int) -> Balance:
    left, before = count(1), await running.gauges()

    async def client() -> None:
        while next(left) <= num_requests:
            await load.ask()

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    require([stream for _, stream in load.streams])
    await asyncio.sleep(1.0)  # what is logged and told is there by then
    served = decoders(running.log())
    requests = Counter(served[stream.id] for _, stream in load.streams)
    after = await running.gauges()

    def grown(name: str, counter: str) -> float:
        return after[name, counter] - before.get((name, counter), 0.0)  # nothing may have been told yet

    return Balance(
        requests={name: requests[name] for name in DECODERS},
        batches={name: grown(name, "decode_tokens_total") / grown(name, "steps_total") for name in DECODERS},
        num_wrong=load.num_wrong(),
    )


def _farthest(counts: Sequence[float]) -> float:
    mean = sum(counts) / len(counts)
    return max(abs(one - mean) for one in counts) / mean


# ---- one bad decoder -----------------------------------------------------------------------------------------------


async def play(running: Deployment, load: Load, fault: str, decoder: str, seconds: float) -> Run:
    first = len(load.streams)
    bursts = asyncio.create_task(keep_bursting(load, round(2 * seconds / BURST_EVERY_S)))
    begin = time.monotonic()
    await asyncio.sleep(seconds + IN_FLIGHT_S)
    async with bad(running, fault, decoder):
        await asyncio.sleep(begin + 2 * seconds - time.monotonic())
    await bursts
    await running.wait_ready()
    await asyncio.sleep(SETTLE_S)
    return told(running.log(), [stream for _, stream in load.streams[first:]], fault, decoder, (begin, seconds))


async def keep_bursting(load: Load, num_bursts: int) -> None:
    begin = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_bursts):
            await asyncio.sleep(max(0.0, begin + number * BURST_EVERY_S - time.monotonic()))
            for _ in range(BURST):
                tasks.create_task(load.ask())


@asynccontextmanager
async def bad(running: Deployment, fault: str, decoder: str) -> AsyncIterator[None]:
    """It is well again afterwards, or its successor starts."""
    if fault == "killed":
        running.kill(decoder)
        yield
        running.start(decoder)
        return
    if fault == "stopped":
        running.signal(decoder, signal.SIGSTOP)
        yield
    else:
        stutter = asyncio.create_task(keep_stuttering(running, decoder))
        yield
        stutter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stutter
    running.signal(decoder, signal.SIGCONT)


async def keep_stuttering(running: Deployment, decoder: str) -> None:
    while True:
        running.signal(decoder, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        running.signal(decoder, signal.SIGCONT)
        await asyncio.sleep(GOING_S)


def told(log: str, streams: Sequence[Stream], fault: str, decoder: str, window: tuple[float, float]) -> Run:
    begin, seconds = window
    middle, end = begin + seconds, begin + 2 * seconds
    served, elsewhere = decoders(log), moved(log)
    others = [s for s in streams if not s.error and s.id not in elsewhere and served[s.id] != decoder]
    before = [stream for stream in others if stream.started < middle]
    during = [stream for stream in others if stream.started >= middle]

    def rate(since: float, until: float) -> float:
        return sum(since <= at < until for stream in others for at in stream.times) / seconds

    return Run(
        fault=fault,
        decoder=decoder,
        rate_before=rate(begin, middle),
        rate_during=rate(middle, end),
        ttft_before_ms=1e3 * percentile([stream.ttft_s for stream in before], 0.5),
        ttft_during_ms=1e3 * percentile([stream.ttft_s for stream in during], 0.5),
        longest_ms=1e3 * max(s.ttft_s for s in streams if s.started >= middle and not s.error),
        num_requests=len(streams),
        num_moved=sum(stream.id in elsewhere for stream in streams),
        num_wrong=0,
        num_failed=sum(bool(stream.error) for stream in streams),
    )


# ---- the report ----------------------------------------------------------------------------------------------------


async def strange(running: Deployment) -> str:
    """What decoders count that should not be."""
    gauges = await running.gauges()
    names = {"wrong_bytes_total": "wrong bytes", "fabric_surplus_total": "surplus arrivals"}
    return ", ".join(f"{said} {sum(gauges[name, key] for name in DECODERS):.0f}" for key, said in names.items())


def show_balance(balance: Balance) -> None:
    print("\n" + head("equal requests", *DECODERS, "farthest from their mean"))
    apart = _farthest(list(balance.batches.values()))
    for said, numbers in (("in a step", balance.batches), ("requests", balance.requests)):
        told = (f"{numbers[name]:.4g}" for name in DECODERS)
        print(row(said, *told, f"{100 * _farthest(list(numbers.values())):.1f} %"))
    met = "met" if apart <= MOST_APART else "missed"
    print(f"\ntarget, batches within {100 * MOST_APART:.0f} % of their mean: {met}; wrong texts {balance.num_wrong}")


def show_faults(runs: Sequence[Run]) -> None:
    cells = ("tokens/s of the others, before", "during", "share", "TTFT p50 there, before", "during, ms")
    print("\n" + head("a decoder is", *cells, "longest TTFT, ms", "requests", "moved", "failed"))
    for fault in FAULTS:
        of_fault = [run for run in runs if run.fault == fault]
        print(
            row(
                fault,
                spread([run.rate_before for run in of_fault]),
                spread([run.rate_during for run in of_fault]),
                f"**{spread([run.share for run in of_fault], 2)}**",
                spread([run.ttft_before_ms for run in of_fault]),
                spread([run.ttft_during_ms for run in of_fault]),
                spread([run.longest_ms for run in of_fault]),
                *(str(sum(getattr(run, name) for run in of_fault)) for name in ("num_requests", "num_moved")),
                str(sum(run.num_failed for run in of_fault)),
            )
        )
    shares = {fault: percentile([run.share for run in runs if run.fault == fault], 0.5) for fault in FAULTS}
    missed = [fault for fault, share in shares.items() if share < LEAST_SHARE]
    print(f"\ntarget, the others keep {LEAST_SHARE}: {'missed where ' + ', '.join(missed) if missed else 'met'}")


async def measure(running: Deployment, right: Right, arguments: argparse.Namespace) -> list[Run]:
    load = Load(running, right)
    show_balance(await balance(running, load, arguments.requests))
    runs = []
    for number in range(arguments.runs):
        for turn, fault in enumerate(FAULTS):
            decoder = DECODERS[(number + turn) % len(DECODERS)]
            runs.append(await play(running, load, fault, decoder, arguments.seconds))
    show_faults(runs)
    print(f"wrong texts {load.num_wrong()} of {len(load.streams)}; {await strange(running)}")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5, help="of each fault")
    parser.add_argument("--requests", type=positive, default=240, help="equal ones")
    parser.add_argument("--seconds", type=float, default=6.0, help="before a fault, and during it")
    add_transport(parser)
    add_json(parser)
    arguments = parser.parse_args()
    conditions = Conditions(f"1 prefiller, 3 decoders over {arguments.transport}; {NUM_IN} tokens in, {NUM_OUT} out")
    num_prompts = arguments.requests + arguments.runs * len(FAULTS) * BURST * round(
        2 * arguments.seconds / BURST_EVERY_S
    )
    options = ("--require-provider", arguments.transport, "--kv-memory", "64MiB")
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        with Deployment([InstanceSpec("colocated")], model=model) as alone:
            right = asyncio.run(texts(alone, num_prompts))
        fleet = [InstanceSpec(role, options=options) for role in ("prefiller", *["decoder"] * len(DECODERS))]
        with Deployment(fleet, model=model, log_level="debug") as running:
            runs = asyncio.run(measure(running, right, arguments))
    conditions.end()
    keep(arguments.json, runs)


if __name__ == "__main__":
    main()
