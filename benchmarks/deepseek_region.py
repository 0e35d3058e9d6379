"""The published deployment of DeepSeek-R1 on hosts of eight H200, simulated over lengths of prompts and answers.

    python benchmarks/deepseek_region.py [--quick]

Prints, for each pair of lengths, tokens/s of a stream, the longest gap and the median time to first token of three
deployments at the published rates, and which of the published facts hold there. No clock: the same output every time.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from headrace.bench.metrics import Slo
from headrace.bench.synthetic import POISSON
from headrace.bench.workload import Arrival, ArrivalList
from headrace.deploy.known import known_config
from headrace.model.shape import ModelShape
from headrace.planner.costs.hardware import read_hardware
from headrace.planner.costs.roofline import RooflineSteps, Sharding
from headrace.planner.costs.work import Work
from headrace.planner.scenario import LinkModel, Role
from headrace.planner.search.candidate import Candidate, Kind, Pool, Surroundings
from headrace.planner.search.site import Lengths, Site
from headrace.planner.search.wanted import Held, held

MODEL, DEVICE, LINK = "deepseek-ai/DeepSeek-R1", "h200", "400gbit"
PROMPTS, OUTPUTS = (1000, 2000, 3000, 4000, 5000, 6000, 8000), (300, 600, 800, 1000, 1200, 1500)
QUICK_PROMPTS, QUICK_OUTPUTS = (2000, 4000), (600, 1000)
NUM_REQUESTS = 240
PAGE_SIZE, CHUNK, MOST_RUNNING = 64, 8192, 256
SLO = Slo(ttft_s=5.0, tpot_s=0.05)
WHOLE, SPREAD = Sharding(tp=8), Sharding(dp=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Split: one prefiller, three decoders, 3 requests/s. Colocated: four instances, 1 request/s each. Groups: a
    decoder of eight data-parallel ranks, 1 request/s each, with prefillers enough."""

    prompt: int
    output: int
    split: Held
    colocated: Held
    groups: Held

    def facts(self) -> dict[str, bool]:
        """What was published, as ranges: about 50 is 40 to 60, hundreds of ms 150 to 999, about 100 ms 30 to 200."""
        more_s = (self.split.ttft_p50_s or 0) - (self.colocated.ttft_p50_s or 0)
        return {
            "split over 90": _pace(self.split) > 90,
            "colocated about 50": 40 <= _pace(self.colocated) <= 60,
            "stalls": 0.15 <= (self.colocated.stall_s or 0) < 1,
            "100 ms more": 0.03 <= more_s <= 0.2,
            "groups about 50": 40 <= _pace(self.groups) <= 60,
        }


def points(prompts: Sequence[int], outputs: Sequence[int]) -> Iterator[Point]:
    for prompt in prompts:
        for output in outputs:
            yield Point(
                prompt=prompt,
                output=output,
                split=simulated(prompt, output, {"prefiller": (WHOLE, 1), "decoder": (WHOLE, 3)}, rate=3.0),
                colocated=simulated(prompt, output, {"colocated": (WHOLE, 4)}, rate=4.0),
                groups=simulated(prompt, output, {"prefiller": (WHOLE, 6), "decoder": (SPREAD, 1)}, rate=8.0),
            )


def simulated(prompt: int, output: int, pools: dict[Role, tuple[Sharding, int]], *, rate: float) -> Held:
    gaps = islice(POISSON.gaps_s(rate, random.Random(1)), NUM_REQUESTS - 1)
    arrivals = tuple(
        Arrival(at_s=at_s, prompt_tokens=prompt, max_tokens=output) for at_s in accumulate(gaps, initial=0.0)
    )
    candidate = deployment(Lengths(mean_prompt=prompt, mean_output=output, p90_prompt=prompt, longest=0), pools)
    return held(candidate, ArrivalList(name="published", seed=1, arrivals=arrivals), SLO)


def deployment(lengths: Lengths, pools: dict[Role, tuple[Sharding, int]]) -> Candidate:
    hardware, shape = read_hardware(), ModelShape.from_config(known_config(MODEL))
    device = hardware.device(DEVICE)
    around = Surroundings(
        routed=hardware.link(LINK),
        same_host=LinkModel(bytes_s=0.8 * device.fabric_bytes_s, latency_s=5e-6),
        gateway_s=0.002,
        hand_over_s=0.002,
    )
    site = Site(shape=shape, dtype="bf16", prefill=device, decode=device, around=around, lengths=lengths, slo=SLO)
    kinds = [
        Pool(
            kind=Kind(
                role=role,
                device=DEVICE,
                sharding=sharding,
                steps=RooflineSteps(work=Work.of(shape), device=device, sharding=sharding),
                num_pages=site.num_pages(device, sharding, PAGE_SIZE),
                page_size=PAGE_SIZE,
                chunk_tokens=CHUNK,
                max_running=MOST_RUNNING,
                tpot_s=None,
                price_hour=device.price_hour,
                watts=device.watts,
                per_host=device.per_host,
            ),
            count=count,
        )
        for role, (sharding, count) in pools.items()
    ]
    kv = site.kv(kinds[0].kind.sharding, kinds[-1].kind.sharding, PAGE_SIZE)
    return Candidate(pools=tuple(kinds), kv=kv, around=around)


def _pace(told: Held) -> float:
    """Tokens a second of a stream."""
    return 1 / told.tpot_p50_s if told.tpot_p50_s else 0.0


def _figures(told: Held) -> str:
    return f"{_pace(told):.0f}, {1e3 * (told.stall_s or 0):.0f}, {1e3 * (told.ttft_p50_s or 0):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four points")
    quick = parser.parse_args().quick
    found = list(points(QUICK_PROMPTS if quick else PROMPTS, QUICK_OUTPUTS if quick else OUTPUTS))
    print("| prompt + output | split 1:3, 3/s | colocated x 4, 4/s | DP8, 8/s | holds |")
    print("|---|---|---|---|---|")
    for point in found:
        misses = [name for name, is_so in point.facts().items() if not is_so]
        holds = f"all but {', '.join(misses)}" if misses else "all"
        figures = " | ".join(_figures(one) for one in (point.split, point.colocated, point.groups))
        print(f"| {point.prompt:,} + {point.output:,} | {figures} | {holds} |")
    print("Figures: tokens/s of a stream (median), longest gap in ms, median time to first token in ms.")


if __name__ == "__main__":
    main()
