"""What a deployment has to hold, and whether one does: simulated, with the definitions of `bench.metrics`. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.bench.metrics import Slo
from headrace.bench.workload import ArrivalList
from headrace.planner.scenario import Role
from headrace.planner.search.candidate import Candidate
from headrace.planner.simulate import simulate

WARM_SHARE = 0.1
"""Of the arrivals: they find nobody running, and count in no figure."""

ListOf = Callable[[float], ArrivalList]
"""Of a rate, in requests a second."""
Note = Callable[[str], None]
"""Is told what is simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`target`: of all requests, the share that is to keep both budgets."""

    slo: Slo
    target: float
    rate: float
    lists: ListOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Of the requests that count. `late_ttft`, `late_tpot`: the shares that missed that budget. None where no request
    has the figure."""

    attainment: float
    late_ttft: float
    late_tpot: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    stall_s: float | None
    tokens_s: float
    busy: dict[str, float]


def held(candidate: Candidate, arrivals: ArrivalList, slo: Slo, *, without: Role | None = None) -> Held:
    """`busy`: by role, the share of the time in which its instances compute."""
    scenario = candidate.scenario(without=without)
    run = simulate(scenario, arrivals)
    warm = int(len(run) * WARM_SHARE)
    whole, ttft, tpot = run.is_whole[warm:], run.ttft_s[warm:], run.tpot_s[warm:]
    late_ttft, late_tpot = ttft > slo.ttft_s, tpot > slo.tpot_s
    lasts = max(run.ended_at, 1e-9)
    by_role: dict[str, list[float]] = {}
    for did in run.did:
        by_role.setdefault(did.role, []).append(did.busy_s / lasts)
    return Held(
        attainment=float((whole & ~late_ttft & ~late_tpot).mean()) if len(whole) else 0.0,
        late_ttft=float((late_ttft | ~whole).mean()) if len(whole) else 0.0,
        late_tpot=float(late_tpot.mean()) if len(whole) else 0.0,
        ttft_p50_s=_at(ttft, 50),
        ttft_p90_s=_at(ttft, 90),
        tpot_p50_s=_at(tpot, 50),
        tpot_p90_s=_at(tpot, 90),
        stall_s=run.stall_s,
        tokens_s=run.num_tokens / lasts,
        busy={role: float(np.mean(shares)) for role, shares in by_role.items()},
    )


def holds(candidate: Candidate, wanted: Wanted) -> bool:
    return held(candidate, wanted.lists(wanted.rate), wanted.slo).attainment >= wanted.target


def _at(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", percent: int) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.percentile(known, percent)) if len(known) else None
