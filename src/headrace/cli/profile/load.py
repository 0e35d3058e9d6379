"""What is asked of an arm that is profiled, so that steps of every kind come up. Pure: how long one request took alone
in, arrivals out.

    alone     of a split arm: one request after another, short to long, for hand-over and link with nothing to wait for
    low ..    three rates, up to what the arm can do: chunks alone and beside rows, some rows at once
    many      short prompts all at once, with long answers: as many rows as an instance takes

Prompt lengths are spread evenly over the logarithm, and shuffled: at every rate the same work.
"""

import math
import random
from dataclasses import dataclass

from headrace.bench.workload import Arrival, ArrivalList

SHORTEST, LONGEST = 16, 4000
OUTPUTS = (16, 128)
PROBE_PROMPT = 1000
ALONE_LONGEST, ALONE_OUTPUT, NUM_ALONE = 512, 8, 8
LOADS, SPLIT_LOADS = (0.4, 0.7, 1.0), (0.7, 1.0, 1.3)
"""Of what the arm can do. A prefiller's steps are long, so few: it is to be busy all the time."""
ROWS_SHARED = 4.0
"""So many rows of a step, on average, share its time."""
MOST_ROWS = 16
"""Of one instance, in the last phase."""
MOST_REQUESTS = 200
"""In one phase."""
ALONE_SHARE, MANY_SHARE = 0.25, 0.2
"""Of the seconds, at most; the rates have the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of one request alone: for each token of its prompt, and for each of its answer."""

    token_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An arm: who computes prompts, who decodes. `longest`: tokens of a prompt and its answer together. `max_running`:
    of one decoder."""

    num_prefilling: int
    num_decoding: int
    is_split: bool
    longest: int
    max_running: int

    @property
    def longest_prompt(self) -> int:
        return max(SHORTEST, min(LONGEST, self.longest - OUTPUTS[1]))


def probe(asked: Asked, *, seed: int) -> ArrivalList:
    """One request, long enough to tell the pace of both phases."""
    prompt_tokens = min(PROBE_PROMPT, asked.longest_prompt)
    return _listed("probe", [Arrival(at_s=0.0, prompt_tokens=prompt_tokens, max_tokens=OUTPUTS[0])], seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Steps count from `alone_s` on: an instance that has the machine to itself is faster than it will ever be again,
    by an eighth where another decodes beside it."""

    arrivals: ArrivalList
    alone_s: float


def calibrating(asked: Asked, pace: Pace, *, seconds: float, seed: int) -> Load:
    """In about so many seconds."""
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    alone_s = at_s = _alone(arrivals, asked, pace, seconds=ALONE_SHARE * seconds) if asked.is_split else 0.0
    loads = SPLIT_LOADS if asked.is_split else LOADS
    phase_s = (seconds * (1 - MANY_SHARE) - alone_s) / len(loads)
    for load in loads:
        num = min(MOST_REQUESTS, max(2, round(load * phase_s / _busy_s(asked, pace))))
        lengths = _spread(SHORTEST, asked.longest_prompt, num)
        draw.shuffle(lengths)
        begins = sorted(at_s + phase_s * draw.random() for _ in range(num))
        arrivals += [
            Arrival(at_s=begin, prompt_tokens=length, max_tokens=draw.randint(*OUTPUTS))
            for begin, length in zip(begins, lengths, strict=True)
        ]
        at_s += phase_s
    num_rows = asked.num_decoding * min(MOST_ROWS, asked.max_running)
    arrivals += [
        Arrival(at_s=at_s, prompt_tokens=length, max_tokens=draw.randint(OUTPUTS[1] // 4, OUTPUTS[1]))
        for length in _spread(SHORTEST, min(4 * SHORTEST, asked.longest_prompt), num_rows)
    ]
    return Load(arrivals=_listed("calibrating", arrivals, seed), alone_s=alone_s)


def _alone(arrivals: list[Arrival], asked: Asked, pace: Pace, *, seconds: float) -> float:
    """-> when the last one is over."""
    at_s = 0.0
    for length in _spread(SHORTEST, min(ALONE_LONGEST, asked.longest_prompt), NUM_ALONE):
        arrivals.append(Arrival(at_s=at_s, prompt_tokens=length, max_tokens=ALONE_OUTPUT))
        at_s += 0.05 + 1.5 * (length * pace.token_s + (1 + ALONE_OUTPUT) * pace.step_s)
        if at_s > seconds:
            break
    return at_s


def _busy_s(asked: Asked, pace: Pace) -> float:
    """Between two requests, if the arm did just what comes."""
    prompt = (asked.longest_prompt - SHORTEST) / math.log(max(2.0, asked.longest_prompt / SHORTEST))
    prefill_s = prompt * pace.token_s / asked.num_prefilling
    decode_s = sum(OUTPUTS) / 2 * pace.step_s / ROWS_SHARED / asked.num_decoding
    return max(prefill_s, decode_s) if asked.is_split else prefill_s + decode_s


def _spread(least: int, most: int, num: int) -> list[int]:
    """Rising, the middles of `num` equal parts of the logarithm."""
    return [round(least * (most / least) ** ((nth + 0.5) / num)) for nth in range(num)]


def _listed(name: str, arrivals: list[Arrival], seed: int) -> ArrivalList:
    return ArrivalList(name=name, seed=seed, arrivals=tuple(sorted(arrivals, key=lambda one: one.at_s)))
