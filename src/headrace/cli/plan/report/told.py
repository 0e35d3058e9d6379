"""A plan as values: what was asked, what was found, and how wrong it may be. Pure."""

from collections.abc import Sequence

import msgspec

from headrace.bench.metrics import Slo
from headrace.bench.verdict import Verdict
from headrace.planner.costs.roofline import Sharding
from headrace.planner.search.candidate import Candidate, Objective
from headrace.planner.search.frontier import FrontierPoint
from headrace.planner.search.least import Found
from headrace.planner.search.region import RegionPoint
from headrace.planner.search.sensitivity import Case
from headrace.planner.search.wanted import Held


class PoolTold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`num_pages`: of a group."""

    role: str
    device: str
    count: int
    tp: int
    dp: int
    chunk_tokens: int
    max_running: int
    page_size: int
    num_pages: int

    @property
    def words(self) -> str:
        shared = Sharding(tp=self.tp, dp=self.dp)
        plural = {"prefiller": "prefillers", "decoder": "decoders"}.get(self.role, self.role)
        name = self.role if self.count == 1 else plural
        return f"{self.count} {name}, {shared} {self.device}, chunk {self.chunk_tokens}, {self.max_running} rows"


class DeploymentTold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pools: tuple[PoolTold, ...]
    is_paired: bool
    devices: int
    price_hour: float
    watts: float
    held: Held

    @property
    def words(self) -> str:
        text = "; ".join(pool.words for pool in self.pools)
        if len(self.pools) < 2:
            return text
        return f"{text}; {'on the same hosts' if self.is_paired else 'each pool on hosts of its own'}"


class ChunkTold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Colocated, with chunks of that size, the least that holds; None: nothing does."""

    chunk_tokens: int
    least: DeploymentTold | None


class PlanTold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`error`: of step times, relative, and `error_source` where that is from. `assumed`: what the answer stands on.
    `is_measured`: on a profile of headrace's own instances."""

    command: str
    made: str  # ISO 8601, UTC
    version: str
    model: str
    devices: str
    link: str
    workload: str
    notes: tuple[str, ...]
    rate: float
    slo: Slo
    target: float
    objective: Objective
    is_with_one_less: bool
    error: float
    error_source: str
    is_measured: bool
    assumed: tuple[str, ...]
    verdict: Verdict
    chunks: tuple[ChunkTold, ...]
    colocated: DeploymentTold | None
    split: DeploymentTold | None
    best: DeploymentTold | None
    cases: tuple[Case, ...]
    frontier: tuple[FrontierPoint, ...] = ()
    region: tuple[RegionPoint, ...] = ()
    num_simulated: int = 0


def deployment_told(found: Found | None) -> DeploymentTold | None:
    if found is None:
        return None
    candidate = found.candidate
    return DeploymentTold(
        pools=tuple(pools_told(candidate)),
        is_paired=candidate.is_paired,
        devices=candidate.num_devices,
        price_hour=candidate.price_hour,
        watts=candidate.watts,
        held=found.held,
    )


def pools_told(candidate: Candidate) -> Sequence[PoolTold]:
    return [
        PoolTold(
            role=pool.kind.role,
            device=pool.kind.device,
            count=pool.count,
            tp=pool.kind.sharding.tp,
            dp=pool.kind.sharding.dp,
            chunk_tokens=pool.kind.chunk_tokens,
            max_running=pool.kind.max_running,
            page_size=pool.kind.page_size,
            num_pages=pool.kind.num_pages,
        )
        for pool in candidate.pools
    ]
