"""How long a client waits when a process that works for it is killed: the first token without its prefiller, the next
one without its decoder.

Two decoders, and one prefiller or two; the decoders share a core, the prefillers the other. SIGKILL, so that nothing is
said. Cases take turns, `--runs` times; what was killed is started again between them. Random prompts of `--tokens`.

    another prefiller    two prompts, one at each of two prefillers; the one that computes the first is killed
    no prefiller left    the same with one, which computes the first and has the second queued: decoders compute both
    decoder              one stream; its decoder is killed after some tokens. The other one goes on

Beside each stands one prefill, which a recovery cannot be spared: the time to first token of such a prompt in the same
deployment just before, alone. The clock starts at the kill and stops at the client, with the first token of each
request that waits, or with the next one of the stream. The stream's tokens are compared with those of one that nothing
happened to.

    python benchmarks/recovery.py [--runs 5] [--tokens 1000] [--transport mapped] [--json FILE]
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from _client import Stream, random_prompt, require
from _deployment import Deployment, InstanceSpec
from _endpoint import add_transport, positive
from _figures import Conditions, add_json, head, keep, row, spread
from _gateway_log import moved

from headrace.bench.metrics import percentile
from headrace.cli.machine import cpu_ns

ALLOWED_S = 2.0  # beside one prefill
NUM_OUT, LOOKED_AT = 64, 8
INTO_PREFILL = 0.3  # of a prefill's time, when its prefiller is killed
WATCHED_S, ON_ITS_WAY_S = 0.1, 0.05
SETTLE_S = 3.0  # a gateway misses somebody after 2 s; decoders and prefillers meet again

PREFILLERS = {"another prefiller": 2, "no prefiller left": 1}
DECODER = "decoder"


@dataclass(frozen=True)
class Run:
    case: str
    prefill_s: float
    first_s: float  # the kill to the first token of the request whose process died, or to the next token
    last_s: float  # to that of whoever waited longest
    num_wrong: int  # texts that differ from an undisturbed one


class Prompts:
    """Each another."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._seeds = count(1)

    def next(self) -> list[int]:
        return random_prompt(self._num_tokens, next(self._seeds))


def fleet(num_prefillers: int, transport: str) -> list[InstanceSpec]:
    over = ("--require-provider", transport)
    prefillers = [InstanceSpec("prefiller", cores="1", options=(*over, "--chunk-tokens", "512"))] * num_prefillers
    return [*prefillers, *[InstanceSpec("decoder", cores="0", options=over)] * 2]


async def one_prefill(running: Deployment, prompts: Prompts) -> float:
    stream = await running.complete(prompts.next(), 1)
    require([stream])
    return stream.ttft_s


async def busiest(running: Deployment, role: str) -> str:
    """Of a role, whose CPU time grows most just now."""
    pids = {name: pid for name, pid in running.pids.items() if name.startswith(role)}
    before = {name: cpu_ns(pid) for name, pid in pids.items()}
    await asyncio.sleep(WATCHED_S)
    return max(pids, key=lambda name: cpu_ns(pids[name]) - before[name])


async def lose_prefiller(running: Deployment, case: str, prompts: Prompts) -> Run:
    prefill_s = await one_prefill(running, prompts)
    waiting = [prompts.next(), prompts.next()]
    streams = [Stream(), Stream()]
    first = asyncio.create_task(running.complete(waiting[0], NUM_OUT, into=streams[0]))
    name = await busiest(running, "prefiller")
    second = asyncio.create_task(running.complete(waiting[1], NUM_OUT, into=streams[1]))
    await asyncio.sleep(max(0.0, INTO_PREFILL * prefill_s - WATCHED_S))
    if streams[0].times:
        raise SystemExit("the prompt was computed before its prefiller could be killed: --tokens must be more")
    killed_at = time.monotonic()
    running.kill(name)
    await asyncio.gather(first, second)
    require(streams)
    await come_back(running, name)
    return Run(
        case=case,
        prefill_s=prefill_s,
        first_s=streams[0].times[0] - killed_at,
        last_s=max(stream.times[0] for stream in streams) - killed_at,
        num_wrong=await num_wrong(running, waiting, streams),
    )


async def lose_decoder(running: Deployment, prompts: Prompts) -> Run:
    prefill_s = await one_prefill(running, prompts)
    prompt, stream = prompts.next(), Stream()
    task = asyncio.create_task(running.complete(prompt, NUM_OUT, into=stream))
    while len(stream.times) < LOOKED_AT:
        await asyncio.sleep(0.005)
    name = await busiest(running, "decoder")
    killed_at = time.monotonic()
    running.kill(name)
    await task
    require([stream])
    if stream.id not in moved(running.log()):
        raise SystemExit(f"{name} was killed, and did not have the stream")
    # What was on its way at the kill has come before: another decoder has to compute the prompt first.
    waited_s = next(at for at in stream.times if at > killed_at + ON_ITS_WAY_S) - killed_at
    await come_back(running, name)
    return Run(DECODER, prefill_s, waited_s, waited_s, await num_wrong(running, [prompt], [stream]))


async def come_back(running: Deployment, name: str) -> None:
    running.start(name)
    await running.wait_ready()
    await asyncio.sleep(SETTLE_S)


async def num_wrong(running: Deployment, prompts: Sequence[Sequence[int]], streams: Sequence[Stream]) -> int:
    again = [await running.complete(prompt, NUM_OUT) for prompt in prompts]
    require(again)
    return sum(one.token_ids != other.token_ids for one, other in zip(streams, again, strict=True))


def show(runs: Sequence[Run]) -> None:
    print("\n" + head("killed", "one prefill, s", "until the token, s", "less one prefill", "the last one's", "wrong"))
    for case in dict.fromkeys(run.case for run in runs):
        of_case = [run for run in runs if run.case == case]
        beyond = [run.first_s - run.prefill_s for run in of_case]
        met = "met" if percentile(beyond, 0.5) <= ALLOWED_S else "missed"
        print(
            row(
                case,
                spread([run.prefill_s for run in of_case], 2),
                spread([run.first_s for run in of_case], 2),
                f"**{spread(beyond, 2)}** {met}",
                spread([run.last_s for run in of_case], 2),
                str(sum(run.num_wrong for run in of_case)),
            )
        )
    print(f"\ntarget: {ALLOWED_S:.0f} s and one prefill; n = {len(runs) // (len(PREFILLERS) + 1)} each")


async def measure(running: Deployment, case: str, prompts: Prompts, runs: int) -> list[Run]:
    for _ in range(2):  # prefixes, speeds and peers are known by then
        await one_prefill(running, prompts)
    done = []
    for _ in range(runs):
        done.append(await lose_prefiller(running, case, prompts))
        if PREFILLERS[case] > 1:
            done.append(await lose_decoder(running, prompts))
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--tokens", type=positive, default=1000, help="of a prompt")
    add_transport(parser)
    add_json(parser)
    arguments = parser.parse_args()
    conditions = Conditions(f"prompts of {arguments.tokens} tokens over {arguments.transport}")
    prompts, runs = Prompts(arguments.tokens), []
    for case, num_prefillers in PREFILLERS.items():
        with Deployment(fleet(num_prefillers, arguments.transport), log_level="debug") as running:
            runs += asyncio.run(measure(running, case, prompts, arguments.runs))
    show(runs)
    conditions.end()
    keep(arguments.json, runs)


if __name__ == "__main__":
    main()
