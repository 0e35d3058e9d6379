"""From what was logged to what a simulation takes: coefficients of steps; gateway, hand-over and link. Pure.

A fit minimises squares of relative errors, as `engine.measured_cost` does, but relative to what it predicts, not to
what was measured: so a thousand steps take together what it says, the disturbed ones among them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from headrace.bench.metrics import percentile
from headrace.bench.records import RequestRecord
from headrace.cli.profile.step_log import Timed
from headrace.engine.cost import FINEST_STEP_S, StepCost
from headrace.engine.measured_cost import nonnegative
from headrace.errors import InputError
from headrace.planner.profile import LinkProfile

Doubles = NDArray[np.float64]

HOLD_OUT = 5
"""Every so many-th step is in no fit."""
FEWEST_STEPS = 10
ROUNDS = 8
"""Of a fit, each relative to what the one before it predicted."""
ALIKE = 1.1
"""How much worse a fit of the link is that is still as good: what no transfer shows is no limit."""
RATES_BYTES_S: Doubles = np.geomspace(1e11, 1e5, 121)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """`error_p50`, `error_p90`: relative, of the steps that were held out."""

    cost: StepCost
    num_steps: int
    error_p50: float
    error_p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """One request, with nobody else there, as it was prefilled elsewhere: bytes of its KV, and of the last chunk's."""

    num_bytes: int
    last_bytes: int
    prefill_s: float
    exposed_s: float


def fit_steps(role: str, timed: Sequence[Timed], beside: Sequence[Timed] = ()) -> Fitted:
    """`beside`: steps of others like it, of kinds that it had none of; they are in the fit, not in the errors. Raises
    InputError for too few."""
    if len(timed) < FEWEST_STEPS:
        raise InputError("seconds", f"must be long enough for {FEWEST_STEPS} steps of a {role}, were {len(timed)}")
    kept = [one for nth, one in enumerate(timed) if nth % HOLD_OUT]
    cost = _fit([*kept, *beside])
    errors = [abs(cost.predict(one.size) / max(one.seconds, FINEST_STEP_S) - 1) for one in timed[::HOLD_OUT]]
    return Fitted(
        cost=cost,
        num_steps=len(timed),
        error_p50=percentile(errors, 0.5),
        error_p90=percentile(errors, 0.9),
    )


def _fit(timed: Sequence[Timed]) -> StepCost:
    features = np.array([one.size.features for one in timed], dtype=np.float64)
    seconds = np.array([max(one.seconds, FINEST_STEP_S) for one in timed])
    predicted = seconds
    for _ in range(ROUNDS):
        rows = features / predicted[:, None]
        coefficients = nonnegative(rows.T @ rows, rows.T @ (seconds / predicted))
        predicted = np.maximum(features @ coefficients, FINEST_STEP_S)
    step_s, row_s, token_s, key_s, pair_s = coefficients.tolist()
    return StepCost(step_s=step_s, row_s=row_s, token_s=token_s, key_s=key_s, pair_s=pair_s)


# ---- of requests -----------------------------------------------------------------------------------------------


def were_alone(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those during which no other was there."""
    whole = [record for record in records if record.token_s]

    def meets(one: RequestRecord, other: RequestRecord) -> bool:
        return one is not other and other.arrival_s < one.token_s[-1] and one.arrival_s < other.token_s[-1]

    return [one for one in whole if not any(meets(one, other) for other in whole)]


def came_by_themselves(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those that were not sent at the same instant as another: of many at once each waits for the others' messages."""
    num = Counter(record.arrival_s for record in records)
    return [record for record in records if num[record.arrival_s] == 1]


def left_over_s(
    records: Sequence[RequestRecord], parts: Callable[[RequestRecord], dict[str, float] | None], names: Sequence[str]
) -> list[float]:
    """Of each request what its time to first token has beyond those parts of it, which are milliseconds by name."""
    found = []
    for record in records:
        told = parts(record)
        if told is not None and record.token_s and "first step" in told:
            known_s = sum(told.get(name, 0.0) for name in names) / 1e3
            found.append(max(0.0, record.token_s[0] - record.arrival_s - known_s))
    return found


def median_or(values: Sequence[float], otherwise: float) -> float:
    return median(values) if values else otherwise


def fit_link(alone: Sequence[Alone], *, num_layers: int, bytes_s: float | None) -> LinkProfile:
    """What a transfer adds to a prompt that is computed meanwhile: a latency, and either its last layer or, on a link
    that is slower than the prefill, what is left of all. `bytes_s` where it is known. None seen: no limit."""
    rates = RATES_BYTES_S if bytes_s is None else np.array([bytes_s])
    if not alone:
        return LinkProfile(bytes_s=float(rates[0]), latency_s=0.0, message_s=0.0)
    last, whole, prefill_s, exposed_s = np.array(
        [(one.last_bytes, one.num_bytes, one.prefill_s, one.exposed_s) for one in alone], dtype=np.float64
    ).T
    needs_s = np.maximum(last / num_layers / rates[:, None], whole / rates[:, None] - prefill_s)
    latency_s = np.maximum(0.0, np.median(exposed_s - needs_s, axis=1))
    errors = np.abs(exposed_s - needs_s - latency_s[:, None]).sum(axis=1)
    best = int(np.argmax(errors <= ALIKE * errors.min()))  # the fastest of those that are as good
    return LinkProfile(bytes_s=float(rates[best]), latency_s=float(latency_s[best]), message_s=0.0)
