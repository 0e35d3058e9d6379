"""Comparisons whose outcome is known: records made by plain cost formulas, with noise by seed."""

import random
from collections.abc import Iterator, Sequence

from headrace.bench.comparison import Arm, Comparison, Workload
from headrace.bench.metrics import Slo
from headrace.bench.records import RequestRecord, Run, RunEnd, RunHead
from headrace.bench.workload import Arrival, ArrivalList

STEP_S, ROW_S, TOKEN_S = 0.01, 0.001, 0.0008  # of a step, a decode row, a prompt token
KV_BYTES = 23_040  # of a token
COLOCATED = [Arm(name=f"colocated, chunk {size}", kind="colocated", devices=2, chunk_tokens=size) for size in (64, 512)]
SPLIT = Arm(name="split 1:1", kind="split", devices=2, num_prefillers=1, num_decoders=1)


def colocated(arrivals: Sequence[Arrival], chunk: int, draw: random.Random) -> list[RequestRecord]:
    """Two instances by turns; each step computes a chunk of the first prompt in line beside all streams."""
    records: list[RequestRecord] = []
    for instance in range(2):
        own = [(index, one) for index, one in enumerate(arrivals) if index % 2 == instance]
        records += _instance(own, chunk, draw)
    return sorted(records, key=lambda record: record.index)


def _instance(own: Sequence[tuple[int, Arrival]], chunk: int, draw: random.Random) -> Iterator[RequestRecord]:
    now, left = 0.0, {index: one.prompt_tokens for index, one in own}
    times: dict[int, list[float]] = {index: [] for index, _ in own}
    arrival = dict(own)
    while len([index for index in times if len(times[index]) < arrival[index].max_tokens]):
        waiting = [index for index, one in own if one.at_s <= now and left[index]]
        running = [index for index in times if times[index] and len(times[index]) < arrival[index].max_tokens]
        if not waiting and not running:
            now = min(one.at_s for index, one in own if left[index])
            continue
        size = min(chunk, left[waiting[0]]) if waiting else 0
        now += (STEP_S + ROW_S * len(running) + TOKEN_S * size) * draw.uniform(0.97, 1.03)
        if waiting:
            left[waiting[0]] -= size
        done = [waiting[0]] if waiting and not left[waiting[0]] else []
        for index in (*running, *done):
            times[index].append(now)
    yield from (_record(index, one, times[index]) for index, one in own)


def split(arrivals: Sequence[Arrival], bytes_per_s: float, draw: random.Random) -> list[RequestRecord]:
    """One prefiller, then the link, then one decoder."""
    free, link, ready = 0.0, 0.0, []
    for one in arrivals:
        begin = max(free, one.at_s)
        free = begin + (STEP_S + TOKEN_S * one.prompt_tokens) * draw.uniform(0.97, 1.03)
        # Layer by layer: a link that keeps pace adds hardly anything.
        link = max(link, begin) + one.prompt_tokens * KV_BYTES / bytes_per_s
        link = max(link, free)
        ready.append(link)
    now, times = 0.0, [list[float]() for _ in arrivals]
    while any(len(found) < one.max_tokens for found, one in zip(times, arrivals, strict=True)):
        rows = [nth for nth, one in enumerate(arrivals) if ready[nth] <= now and len(times[nth]) < one.max_tokens]
        if not rows:
            now = min(at_s for nth, at_s in enumerate(ready) if not times[nth])
            continue
        now += (STEP_S + ROW_S * len(rows)) * draw.uniform(0.97, 1.03)
        for nth in rows:
            times[nth].append(now)
    return [_record(nth, one, times[nth]) for nth, one in enumerate(arrivals)]


def _record(index: int, one: Arrival, token_s: Sequence[float]) -> RequestRecord:
    return RequestRecord(
        index=index,
        arrival_s=one.at_s,
        sent_s=one.at_s,
        prompt_tokens=one.prompt_tokens,
        max_tokens=one.max_tokens,
        token_s=tuple(token_s),
        num_reported=len(token_s),
    )


def arrivals_at(rate: float, seed: int, prompt_tokens: int, max_tokens: int, num_requests: int) -> ArrivalList:
    draw, now, found = random.Random(f"{rate}, {seed}"), 0.0, []
    for _ in range(num_requests):
        found.append(Arrival(at_s=now, prompt_tokens=prompt_tokens, max_tokens=max_tokens))
        now += draw.expovariate(rate)
    return ArrivalList(name="planted", seed=seed, arrivals=tuple(found))


def planted(
    *,
    prompt_tokens: int,
    rates: Sequence[float],
    slo: Slo,
    seed: int,
    bytes_per_s: float = 1e9,
    max_tokens: int = 25,
    num_requests: int = 30,
    repetitions: int = 4,
    are_equal: bool = False,
) -> tuple[Comparison, list[Run]]:
    """`are_equal`: the split arm's records are another colocated arm's."""
    runs = []
    for rate in rates:
        for repetition in range(repetitions):
            asked = arrivals_at(rate, 1000 * seed + repetition, prompt_tokens, max_tokens, num_requests)
            for arm in (*COLOCATED, SPLIT):
                draw = random.Random(f"{arm.name}, {rate}, {repetition}, {seed}")
                if arm.kind == "colocated" or are_equal:
                    records = colocated(asked.arrivals, arm.chunk_tokens or 64, draw)
                else:
                    records = split(asked.arrivals, bytes_per_s, draw)
                head = RunHead(
                    arm=arm.name,
                    workload="planted",
                    digest=asked.digest,
                    rate=rate,
                    repetition=repetition,
                    num_warm=5,
                    began="2026-01-01T00:00:00Z",
                    devices=arm.devices,
                )
                end = RunEnd(num_requests=len(records), steal_share=0.0)
                runs.append(Run(head=head, requests=tuple(records), end=end))
    comparison = Comparison(
        began="2026-01-01T00:00:00Z",
        command="headrace compare",
        versions={"headrace": "0"},
        machine="none",
        model="planted",
        seed=seed,
        slo=slo,
        slo_source="given",
        link="none",
        arms=(*COLOCATED, SPLIT),
        workloads=(Workload(name="planted"),),
        rates={"planted": tuple(rates)},
        repetitions=repetitions,
        is_whole=True,
    )
    return comparison, runs
