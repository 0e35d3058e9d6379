"""Which runs a comparison makes, in which order. Pure: what is known so far in, the next step out.

    idle       one colocated arm, one request at a time, short to long: what budgets and the first rate follow from
    sweep      every chunk size at one rate: the best is the rival
    search     of the rival and each split arm: rates up and down to where nine of ten requests keep both budgets,
               halved on a common grid, so that all arms are asked at the same rates
    repeat     the rates on both sides of every such point, all arms in turn, again and again: pairs

All arms are asked the same list at the same (workload, rate, repetition). No two runs share a prompt but by blocks that
a trace names, so prefix caches help every arm alike, or not at all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from headrace.bench.workload import ArrivalList

GRID = 2**0.25
"""Between neighbouring rates: 19 %."""
MOST_STEPS = 6
"""Up or down: a factor of 64."""
MOST_RATES = 5
IDLE_SHARES = (0.98, 0.65, 0.35, 0.05)
TARGET = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of an arm. Repetition 1 has the sweep and the search, too."""

    workload: str
    rate: float
    repetition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """An arm that is started once: `points` in this order."""

    arm: str
    points: Sequence[Point]


def on_grid(rate: float) -> float:
    """The nearest of GRID's powers, to three digits, so that a file is named the same in every session."""
    return float(f"{GRID ** round(math.log(rate, GRID)):.3g}")


def idle_list(arrivals: ArrivalList, *, gap_s: float) -> ArrivalList:
    """Of its requests those at IDLE_SHARES of all prompt lengths, the longest first, `gap_s` apart."""
    by_length = sorted(arrivals.arrivals, key=lambda one: (one.prompt_tokens, one.at_s))
    picked = [by_length[round(share * (len(by_length) - 1))] for share in IDLE_SHARES]
    spaced = [msgspec.structs.replace(one, at_s=nth * gap_s) for nth, one in enumerate(picked)]
    return msgspec.structs.replace(arrivals, arrivals=tuple(spaced))


def mean_by_length(known: Sequence[tuple[int, float]], lengths: Sequence[int]) -> float:
    """Of something that is known for some prompt lengths: linear between them, and beyond the ends as there."""
    ordered = sorted(known)
    told = np.interp(lengths, [length for length, _ in ordered], [value for _, value in ordered])
    return float(told.mean())


def first_rate(*, num_devices: int, busy_s: float) -> float:
    """Half of what devices could do that are `busy_s` with each request and take one at a time."""
    return on_grid(0.5 * num_devices / max(busy_s, 1e-3))


def next_rate(known: Mapping[float, float], begin: float) -> float | None:
    """Of a search, from attainments by rate; None: it is over. From `begin` on by twos to a rate of the other side,
    then halved until the two are neighbours."""
    if not known:
        return begin
    kept = [rate for rate, share in known.items() if share >= TARGET]
    missed = [rate for rate, share in known.items() if share < TARGET]
    if not missed:
        return on_grid(2 * max(kept)) if len(kept) <= MOST_STEPS else None
    if not kept:
        return on_grid(min(missed) / 2) if len(missed) <= MOST_STEPS else None
    low, high = max(kept), min(missed)
    if low > high:  # it kept them at a higher rate than one that it missed: noise, which repetitions will tell
        return None
    middle = on_grid(math.sqrt(low * high))
    return None if middle in known or not low < middle < high else middle


def common_rates(known: Mapping[str, Mapping[float, float]]) -> tuple[float, ...]:
    """By arm, what its search found: the rates next to where each changes sides. At most MOST_RATES, evenly picked."""
    chosen: set[float] = set()
    for by_rate in known.values():
        kept = [rate for rate, share in by_rate.items() if share >= TARGET]
        missed = [rate for rate, share in by_rate.items() if share < TARGET]
        chosen |= {max(kept)} if kept else set()
        chosen |= {min(missed)} if missed else set()
    ordered = sorted(chosen)
    if len(ordered) <= MOST_RATES:
        return tuple(ordered)
    picks = {round(nth * (len(ordered) - 1) / (MOST_RATES - 1)) for nth in range(MOST_RATES)}
    return tuple(ordered[nth] for nth in sorted(picks))


def repetitions(arms: Sequence[str], rates: Mapping[str, Sequence[float]], num_repetitions: int) -> list[Session]:
    """All arms forwards, then all backwards: whatever drifts meets all of them alike. An arm whose turn comes twice
    running is not started anew."""
    sessions: list[Session] = []
    for nth in range(1, num_repetitions + 1):
        points = tuple(
            Point(workload=workload, rate=rate, repetition=nth) for workload, each in rates.items() for rate in each
        )
        for arm in arms if nth % 2 else arms[::-1]:
            if sessions and sessions[-1].arm == arm:
                sessions[-1] = Session(arm=arm, points=(*sessions[-1].points, *points))
            else:
                sessions.append(Session(arm=arm, points=points))
    return sessions


def num_requests(rate: float, seconds: float, *, fewest: int) -> int:
    return max(fewest, math.ceil(rate * seconds))


def num_warm(num: int) -> int:
    """Of a run's first requests: they find nobody running."""
    return max(1, num // 10)
