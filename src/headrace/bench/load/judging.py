"""What is wrong with a run itself, so that no figure may be taken from it. Pure."""

from collections.abc import Sequence

from headrace.bench.metrics import percentile, ttft_s
from headrace.bench.records import RequestRecord
from headrace.bench.workload import ArrivalList

MOST_LATE_S = 0.05
"""The 99th percentile of how much later than intended requests were sent: a client that is later measures itself."""


def judge_run(arrivals: ArrivalList, records: Sequence[RequestRecord]) -> list[str]:
    """Reasons, each a sentence; none: it counts. A request that failed is no reason: it counts as a miss."""
    reasons = []
    if [record.index for record in records] != list(range(len(arrivals.arrivals))):
        reasons.append(f"{len(records)} records of {len(arrivals.arrivals)} requests")
    late_s = percentile([record.sent_s - record.arrival_s for record in records], 0.99) if records else 0.0
    if late_s > MOST_LATE_S:
        reasons.append(
            f"the client was late: p99 {late_s * 1e3:.0f} ms after the intended time, at most {MOST_LATE_S * 1e3:.0f}"
        )
    if instant := [record for record in records if record.token_s and ttft_s(record) <= 0]:
        reasons.append(f"{len(instant)} first tokens came no later than their request, the first of {instant[0].index}")
    sound = [record for record in records if record.error is None]
    if short := [record for record in sound if len(record.token_s) != record.max_tokens]:
        one = short[0]
        seen = f"{len(one.token_s)} of {one.max_tokens} tokens of request {one.index}"
        reasons.append(f"{len(short)} answers have another number of tokens than was asked for: {seen}")
    if uneven := [record for record in sound if record.num_reported not in {None, len(record.token_s)}]:
        one = uneven[0]
        told = f"{one.num_reported} told, {len(one.token_s)} seen of request {one.index}"
        reasons.append(f"{len(uneven)} answers tell another number of tokens than came: {told}")
    return reasons
