"""How much a device does over the TPOT budget. Pure.

The rate that a deployment holds is found by halving, on lists of the same requests at other rates.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.bench.metrics import Slo
from headrace.planner.search.candidate import Candidate
from headrace.planner.search.least import decode_s, prefill_s
from headrace.planner.search.site import MOST_RUNNING, Lengths, most_rows
from headrace.planner.search.wanted import Note, Wanted, holds

TPOT_FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0)
STEPS = 5
"""Halvings: the rate is found within 3 % of the first span."""
DOUBLINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """Requests a second and device, 0 where the budget is not kept at any rate; None: there is no such arm."""

    tpot_s: float
    colocated: float | None
    split: float | None


def frontier(
    colocated: Candidate | None, split: Candidate | None, wanted: Wanted, lengths: Lengths, note: Note
) -> Iterator[FrontierPoint]:
    for factor in TPOT_FACTORS:
        slo = Slo(ttft_s=wanted.slo.ttft_s, tpot_s=factor * wanted.slo.tpot_s)
        own = replace(wanted, slo=slo)
        note(f"{1e3 * slo.tpot_s:.3g} ms a token")
        yield FrontierPoint(
            tpot_s=slo.tpot_s,
            colocated=None if colocated is None else rate_of_a_device(colocated, own, lengths),
            split=None if split is None else rate_of_a_device(split, own, lengths),
        )


def rate_of_a_device(candidate: Candidate, wanted: Wanted, lengths: Lengths) -> float:
    """0 where not even one row keeps the budget."""
    paced = with_pace(candidate, wanted.slo.tpot_s, lengths)
    return 0.0 if paced is None else highest_rate(paced, wanted, lengths) / candidate.num_devices


def with_pace(candidate: Candidate, tpot_s: float, lengths: Lengths) -> Candidate | None:
    """Its batch limits as another budget has them. None: not even one row keeps it."""
    pools = []
    for pool in candidate.pools:
        kind = pool.kind
        if kind.role != "prefiller":
            rows = most_rows(kind.steps, lengths, tpot_s, most=MOST_RUNNING)
            if not rows:
                return None
            kind = replace(kind, max_running=rows, tpot_s=tpot_s if kind.role == "decoder" else None)
        pools.append(replace(pool, kind=kind))
    return replace(candidate, pools=tuple(pools))


def highest_rate(candidate: Candidate, wanted: Wanted, lengths: Lengths) -> float:
    """At which it holds; 0 where it does at none."""

    def keeps(rate: float) -> bool:
        return holds(candidate, replace(wanted, rate=rate))

    low, high = 0.0, capacity(candidate, lengths)
    for _ in range(DOUBLINGS):
        if not keeps(high):
            break
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low + high) / 2 if low else high / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def capacity(candidate: Candidate, lengths: Lengths) -> float:
    """Requests a second, if nothing ever waited."""
    if not candidate.is_split:
        pool = candidate.pools[0]
        return pool.count * pool.kind.sharding.dp / (prefill_s(pool.kind, lengths) + decode_s(pool.kind, lengths))
    prefill, decode = candidate.pools
    return min(
        prefill.count * prefill.kind.sharding.dp / prefill_s(prefill.kind, lengths),
        decode.count * decode.kind.sharding.dp / decode_s(decode.kind, lengths),
    )
