"""Scenarios and arrivals that tests of the simulation are made of."""

import random
from collections.abc import Iterable
from typing import Any

from headrace.bench.workload import Arrival, ArrivalList
from headrace.engine.cost import StepCost
from headrace.planner.scenario import Instance, KvModel, LinearSteps, LinkModel, Network, Scenario

COST = StepCost(step_s=6e-3, row_s=2e-5, token_s=5e-5, key_s=2e-8, pair_s=1e-9)
KV = KvModel(num_layers=32, page_bytes=2 << 20, page_messages=64)
LINK = LinkModel(bytes_s=25e9, latency_s=1e-5, message_s=1e-6)


def instance(name: str, role: Any, **more: Any) -> Instance:
    return Instance(**{"name": name, "role": role, "steps": LinearSteps(COST), "num_pages": 10_000, **more})


def scenario(*instances: Instance, **more: Any) -> Scenario:
    beside = {"kv": KV, "network": Network(routed=LINK), "gateway_s": 1e-3, "hand_over_s": 2e-3}
    return Scenario(instances=instances, **{**beside, **more})


def split(num_prefillers: int = 1, num_decoders: int = 1, **more: Any) -> Scenario:
    prefillers = [instance(f"p{nth}", "prefiller", chunk_tokens=1024) for nth in range(num_prefillers)]
    return scenario(*prefillers, *[instance(f"d{nth}", "decoder") for nth in range(num_decoders)], **more)


def arrivals(requests: Iterable[tuple[float, int, int]]) -> ArrivalList:
    """(seconds, prompt tokens, output tokens)"""
    listed = [Arrival(at_s=at, prompt_tokens=prompt, max_tokens=output) for at, prompt, output in requests]
    return ArrivalList(name="test", seed=1, arrivals=tuple(sorted(listed, key=lambda one: one.at_s)))


def poisson(num: int, rate: float, *, prompt: tuple[int, int], output: tuple[int, int], seed: int = 1) -> ArrivalList:
    rng, at = random.Random(seed), 0.0
    requests = []
    for _ in range(num):
        at += rng.expovariate(rate)
        requests.append((at, rng.randint(*prompt), rng.randint(*output)))
    return arrivals(requests)
