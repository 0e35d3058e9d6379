"""Figures of records: each has one definition, here. Pure; the planner computes the same of what it simulates.

ttft          from the intended arrival (open loop) to the first token's bytes at the client
second token  from the first token's bytes to the second's
tpot          from the first token to the last, by the tokens after the first; of one request
itl           between two tokens of one request that came one after the other
stall         the longest itl of a run
in flight     an itl during any part of which another request waited for its first token, from its arrival on
attainment    requests that kept both budgets, by all that arrived; whatever failed kept none
goodput       the highest rate at which the attainment is at least the target
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from headrace.bench.records import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Seconds: a request keeps it whose first token came within `ttft_s` and whose others took at most `tpot_s` on
    average."""

    ttft_s: float
    tpot_s: float


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest; nan of nothing. What never came is infinite."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    if place == low or ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# ---- of one request --------------------------------------------------------------------------------------------


def is_whole(record: RequestRecord) -> bool:
    """All that it asked for came."""
    return record.error is None and len(record.token_s) == record.max_tokens


def ttft_s(record: RequestRecord) -> float:
    """Infinite where no token came."""
    return record.token_s[0] - record.arrival_s if record.token_s else inf


def second_token_s(record: RequestRecord) -> float | None:
    return record.token_s[1] - record.token_s[0] if len(record.token_s) > 1 else None


def tpot_s(record: RequestRecord) -> float | None:
    """None of fewer than two tokens."""
    if len(record.token_s) < 2:
        return None
    return (record.token_s[-1] - record.token_s[0]) / (len(record.token_s) - 1)


def itls_s(record: RequestRecord) -> list[float]:
    return [late - early for early, late in zip(record.token_s, record.token_s[1:], strict=False)]


def keeps(record: RequestRecord, slo: Slo) -> bool:
    pace = tpot_s(record)
    return is_whole(record) and ttft_s(record) <= slo.ttft_s and (pace is None or pace <= slo.tpot_s)


# ---- of a run --------------------------------------------------------------------------------------------------


def attainment(records: Sequence[RequestRecord], slo: Slo) -> float:
    return sum(keeps(record, slo) for record in records) / len(records) if records else 0.0


def all_itls_s(records: Iterable[RequestRecord]) -> list[float]:
    return [gap for record in records for gap in itls_s(record)]


def itls_in_flight_s(records: Sequence[RequestRecord]) -> list[float]:
    """Those of each request during which another one waited for its first token."""
    waiting = sorted((record.arrival_s, _first_s(record), record.index) for record in records)
    found = []
    for record in records:
        for early, late in zip(record.token_s, record.token_s[1:], strict=False):
            if _somebody_waits(waiting, early, late, record.index):
                found.append(late - early)
    return found


def stall_s(records: Iterable[RequestRecord]) -> float:
    return max(all_itls_s(records), default=float("nan"))


def _first_s(record: RequestRecord) -> float:
    """When it stopped waiting; one that failed waited no longer than it arrived."""
    return record.token_s[0] if record.token_s else record.arrival_s


def _somebody_waits(waiting: Sequence[tuple[float, float, int]], early: float, late: float, index: int) -> bool:
    for begin, end, other in waiting:
        if begin >= late:
            return False
        if end > early and other != index:
            return True
    return False
