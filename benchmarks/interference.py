"""What long prompts do to running streams: colocated with chunked prefill against prefill and decode apart.

Workload: 4 streams (64 tokens in), and while they run a 2,000-token prompt every 6 s (1 token out, seeded random token
ids, nothing of them in a prefix cache). All arms on the same two cores: colocated as one instance with two threads, for
each chunk size and each stall budget; two colocated instances of one thread, among which the gateway chooses; split as
a prefiller on one core and a decoder on the other. Arms take turns, `--runs` times.

Stall: each run's longest gap between two tokens of a running stream while a long prompt is in flight; the median over
the runs, with lowest and highest. Beside it the quiet p99 (no long prompt in flight), and a control arm: the same
streams on a decoder alone, and a plain spin loop on the other core instead of long prompts. Clock: at the client,
where the bytes of a token arrive. At the end the two ratios that have targets.

    python benchmarks/interference.py [--runs 5] [--chunks 64 256 512] [--max-stalls 100] [--transport mapped]
        [--json FILE] [--picture FILE]
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _client import Stream, random_prompt, require
from _deployment import Deployment, InstanceSpec, split
from _endpoint import add_transport, positive
from _figures import Conditions, add_json, head, keep, row, spread
from _schedules import Schedule, draw

from headrace.bench.metrics import percentile

NUM_STREAMS, STREAM_PROMPT = 4, 64
LONG_PROMPT, NUM_LONG, FIRST_LONG_S, LONG_EVERY_S = 2000, 3, 3.0, 6.0
SPIN = "while True: pass"
SPLIT = "split: prefiller + decoder"
CONTROL = "control: decoder + spin loop"
MOST_OF_QUIET, MOST_OF_CONTROL = 2.5, 1.3


@dataclass(frozen=True)
class Arm:
    name: str
    instances: tuple[InstanceSpec, ...]
    spins: bool = False


@dataclass
class Run:
    arm: str
    quiet_p50_ms: float
    quiet_p99_ms: float
    busy_p50_ms: float
    busy_p99_ms: float
    stall_ms: float
    long_ttft_ms: float
    token_times: list[list[float]]  # by stream, seconds from the run's begin
    long_spans: list[tuple[float, float]]


def arms(chunks: Sequence[int], max_stalls: Sequence[int], transport: str) -> list[Arm]:
    made = [colocated(f"chunk {chunk}", "--chunk-tokens", str(chunk)) for chunk in chunks]
    made += [colocated(f"stall of {ms} ms at most", "--max-stall-ms", str(ms)) for ms in max_stalls]
    made.append(Arm("two colocated, a core each", (InstanceSpec("colocated", "0"), InstanceSpec("colocated", "1"))))
    made.append(Arm(SPLIT, split(transport, "--chunk-tokens", "512")))
    made.append(Arm(CONTROL, (InstanceSpec("colocated", cores="0"),), spins=True))
    return made


def colocated(name: str, *options: str) -> Arm:
    """One instance on both cores."""
    return Arm(f"colocated, {name}", (InstanceSpec("colocated", cores="0,1", options=("--threads", "2", *options)),))


async def play(deployment: Deployment, arm: Arm, seed: int) -> Run:
    # Streams run a little longer than the last long prompt: quiet time before and after it.
    begin = time.monotonic()
    streams = [Stream() for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(endless(deployment, stream, seed + number)) for number, stream in enumerate(streams)]
    longs: list[Stream] = []
    spans: list[tuple[float, float]] = []
    spinner = None
    await asyncio.sleep(FIRST_LONG_S)
    for number in range(NUM_LONG):
        next_at = time.monotonic() + LONG_EVERY_S
        if arm.spins:
            spinner = spinner or subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", SPIN])
            spans.append((time.monotonic(), time.monotonic() + LONG_EVERY_S / 2))
        else:
            long = await deployment.complete(random_prompt(LONG_PROMPT, seed + 100 + number), 1)
            require([long])
            longs.append(long)
            spans.append((long.started, long.times[0]))
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    if spinner is not None:
        spinner.kill()
        spinner.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    require(streams)
    gaps = [gap for stream in streams for gap in stream.gaps]
    busy = [gap for at, gap in gaps if any(at - gap < end and at > start for start, end in spans)]
    quiet = [gap for at, gap in gaps if not any(at - gap < end and at > start for start, end in spans)]
    return Run(
        arm=arm.name,
        quiet_p50_ms=1e3 * percentile(quiet, 0.5),
        quiet_p99_ms=1e3 * percentile(quiet, 0.99),
        busy_p50_ms=1e3 * percentile(busy, 0.5),
        busy_p99_ms=1e3 * percentile(busy, 0.99),
        stall_ms=1e3 * max(busy),
        long_ttft_ms=1e3 * statistics.median(long.ttft_s for long in longs) if longs else 0.0,
        token_times=[[at - begin for at in stream.times] for stream in streams],
        long_spans=[(start - begin, end - begin) for start, end in spans],
    )


async def endless(deployment: Deployment, stream: Stream, seed: int) -> None:
    """One client's stream, until it is cancelled."""
    await deployment.complete(random_prompt(STREAM_PROMPT, seed), 4000, into=stream)


CELLS = {
    "quiet p50": "quiet_p50_ms",
    "quiet p99": "quiet_p99_ms",
    "busy p50": "busy_p50_ms",
    "busy p99": "busy_p99_ms",
    "**stall**": "stall_ms",
    "TTFT of the long prompt": "long_ttft_ms",
}


def shown(runs: Sequence[Run]) -> str:
    return row(runs[0].arm, *(spread([getattr(run, name) for run in runs]) for name in CELLS.values()))


def show_ratios(split_runs: Sequence[Run], control: Sequence[Run]) -> None:
    """Of the split arm: its stall over its own quiet p99, its busy p99 over the control arm's; of the same turn."""
    stalls = [run.stall_ms / run.quiet_p99_ms for run in split_runs]
    busy = [run.busy_p99_ms / beside.busy_p99_ms for run, beside in zip(split_runs, control, strict=True)]
    print(f"\n{head('split', 'ratio', 'target', '')}")
    for name, ratios, most in (
        ("stall / quiet p99", stalls, MOST_OF_QUIET),
        ("p99 while a prefill is in flight / the control arm's", busy, MOST_OF_CONTROL),
    ):
        print(row(name, spread(ratios, 2), f"{most} at most", "met" if statistics.median(ratios) <= most else "missed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--chunks", type=positive, nargs="+", default=[64, 256, 512])
    parser.add_argument("--max-stalls", type=positive, nargs="*", default=[100], help="ms, of colocated instances")
    add_transport(parser)
    add_json(parser)
    parser.add_argument("--picture", type=Path, help="draw the last run of the largest chunk and of split, as SVG")
    arguments = parser.parse_args()
    conditions = Conditions(f"{NUM_STREAMS} streams, prompts of {LONG_PROMPT} tokens; split over {arguments.transport}")
    runs: dict[str, list[Run]] = {}
    for number in range(arguments.runs):
        for arm in arms(arguments.chunks, arguments.max_stalls, arguments.transport):
            with Deployment(arm.instances) as deployment:
                asyncio.run(warm(deployment))
                runs.setdefault(arm.name, []).append(asyncio.run(play(deployment, arm, 1000 * number)))
            print(shown(runs[arm.name][-1:]), flush=True)
    print(f"\nITL in ms, median of the runs (lowest-highest)\n\n{head('', *CELLS)}")
    for of_arm in runs.values():
        print(shown(of_arm))
    show_ratios(runs[SPLIT], runs[CONTROL])
    conditions.end()
    keep(arguments.json, [run for of_arm in runs.values() for run in of_arm])
    if arguments.picture:
        largest = f"colocated, chunk {max(arguments.chunks)}"
        arguments.picture.write_text(picture([runs[largest][-1], runs[SPLIT][-1]]))


def picture(runs: Sequence[Run]) -> str:
    schedules = [
        Schedule(
            title=run.arm,
            streams=run.token_times,
            prompt=run.long_spans[0],
            note=f"longest gap of the run {run.stall_ms:.0f} ms",
        )
        for run in runs
    ]
    return draw(schedules, before_s=1.0, after_s=max(end - start for start, end in (r.long_spans[0] for r in runs)) + 1)


async def warm(deployment: Deployment) -> None:
    require([await deployment.complete(random_prompt(length, 9), 8) for length in (16, 300)])


if __name__ == "__main__":
    main()
