"""What came of a simulation: its requests, as records that are made when they are read, and what its instances did.

Tokens by the ten million are nobody's business until then: the figures that a search looks at are here as arrays, by
the definitions of `bench.metrics` (a test holds both to be equal).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from headrace.bench.metrics import Slo
from headrace.bench.records import RequestRecord
from headrace.planner.requests import Request
from headrace.planner.scenario import Role

Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Did:
    """One instance. `way_bytes`, `way_busy_s`: out of a prefiller, into a decoder."""

    name: str
    role: Role
    busy_s: float
    num_steps: int
    num_prefill_tokens: int
    num_preemptions: int
    num_evicted: int
    way_bytes: int
    way_busy_s: float


class Simulation(Sequence[RequestRecord]):
    """Records in the order of the arrivals. `ended_at`: seconds of the simulation."""

    def __init__(self, requests: Sequence[Request], did: Sequence[Did], *, gateway_s: float, ended_at: float) -> None:
        self.did = tuple(did)
        self.ended_at = ended_at
        self._requests = requests
        self._gateway_s = gateway_s

    @overload
    def __getitem__(self, index: int) -> RequestRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestRecord]: ...
    def __getitem__(self, index: int | slice) -> RequestRecord | Sequence[RequestRecord]:
        if isinstance(index, slice):
            return [request.record(self._gateway_s) for request in self._requests[index]]
        return self._requests[index].record(self._gateway_s)

    def __len__(self) -> int:
        return len(self._requests)

    # ---- figures -----------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> Flags:
        return np.array(
            [one.error is None and one.generated == one.arrival.max_tokens for one in self._requests], dtype=np.bool_
        )

    @property
    def ttft_s(self) -> Doubles:
        """Infinite where no token came."""
        return np.array([self._ttft_s(one) for one in self._requests])

    @property
    def tpot_s(self) -> Doubles:
        """nan of fewer than two tokens."""
        return np.array([_tpot_s(one) for one in self._requests])

    def attainment(self, slo: Slo) -> float:
        """As `metrics.attainment`, of all of them."""
        if not self._requests:
            return 0.0
        is_late = (self.ttft_s > slo.ttft_s) | (self.tpot_s > slo.tpot_s)
        return float((self.is_whole & ~is_late).mean())

    @property
    def stall_s(self) -> float | None:
        """As `metrics.stall_s`."""
        longest = [one.longest_gap_s() for one in self._requests]
        known = [gap for gap in longest if gap is not None]
        return max(known, default=None)

    @property
    def num_tokens(self) -> int:
        return sum(one.generated for one in self._requests)

    def facts(self) -> dict[str, float]:
        """As a run keeps them beside its requests."""
        return {
            "kv_bytes": float(sum(did.way_bytes for did in self.did if did.role == "prefiller")),
            "busy_s": sum(did.busy_s for did in self.did),
            "preemptions": float(sum(did.num_preemptions for did in self.did)),
        }

    def _ttft_s(self, request: Request) -> float:
        if request.first_at is None:
            return float("inf")
        return request.first_at + self._gateway_s - request.arrival.at_s


def _tpot_s(request: Request) -> float:
    if request.first_at is None or request.last_at is None or request.generated < 2:
        return float("nan")
    return (request.last_at - request.first_at) / (request.generated - 1)
