"""Figures of records: each has one definition, here. Pure; the planner computes the same of what it simulates.

    ttft          from the intended arrival (open loop) to the first token's bytes at the client
    second token  from the first token's bytes to the second's
    tpot          from the first token to the last, by the tokens after the first; of one request
    itl           between two tokens of one request that came one after the other
    stall         the longest itl of a run
    in flight     an itl during any part of which another request waited for its first token, from its arrival on
    attainment    requests that kept both budgets, by all that arrived; whatever failed kept none
    goodput       the highest rate at which the attainment is at least the target

Percentiles are linear between the two nearest. Seconds, and tokens a second, throughout.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, nan
from statistics import fmean

import msgspec
import numpy as np

from headrace.bench.records import RequestRecord, Waterfall

LONG_PROMPT_TOKENS = 1000
"""From so many on a prompt is long; the others are short."""


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request keeps it whose first token came within `ttft_s` and whose others took at most `tpot_s` on average."""

    ttft_s: float
    tpot_s: float


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of some values; None of none. Infinite where what is asked for never came, which JSON tells as null too."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None
    num: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the requests of one run that count. Rates are over the time from the first arrival to the last token.
    `waterfall`: means over those that told it."""

    num_requests: int
    num_failed: int
    duration_s: float
    attainment: float
    prompt_tokens_s: float
    output_tokens_s: float
    ttft: Spread
    second_token: Spread
    tpot: Spread
    itl: Spread
    itl_in_flight: Spread
    stall_s: float | None
    waterfall: Waterfall
    cached_share: float  # of prompt tokens


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


def percentile(values: Sequence[float], share: float) -> float:
    """nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return nan
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    if place == low or ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread()
    p50, p90, p99, most = (percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0))
    return Spread(p50=_told(p50), p90=_told(p90), p99=_told(p99), max=_told(most), num=len(values))


def _told(value: float) -> float | None:
    return None if value in (inf, nan) else value


def attainment(records: Sequence[RequestRecord], slo: Slo) -> float:
    return sum(keeps(record, slo) for record in records) / len(records) if records else 0.0


def all_itls_s(records: Iterable[RequestRecord]) -> list[float]:
    return [gap for record in records for gap in itls_s(record)]


def stall_s(records: Iterable[RequestRecord]) -> float | None:
    return max(all_itls_s(records), default=None)


def itls_in_flight_s(records: Sequence[RequestRecord]) -> list[float]:
    """Those of each request during which another one waited for its first token."""
    # One that failed waited for no time that is known.
    waiting = [record for record in records if record.token_s and record.token_s[0] > record.arrival_s]
    begins = np.sort([record.arrival_s for record in waiting])
    ends = np.sort([record.token_s[0] for record in waiting])
    found: list[float] = []
    for record in records:
        if len(record.token_s) < 2:
            continue
        tokens = np.asarray(record.token_s)
        early, late = tokens[:-1], tokens[1:]
        # Who waited at any time within a gap: began before its end, and did not end before its begin. It itself, whose
        # waiting ended with its first token, is never among them.
        num_waiting = np.searchsorted(begins, late, side="left") - np.searchsorted(ends, early, side="right")
        found += (late - early)[num_waiting > 0].tolist()
    return found


def summarize(records: Sequence[RequestRecord], slo: Slo) -> Summary:
    """Of one run, without its warm-up."""
    begin = min((record.arrival_s for record in records), default=0.0)
    end = max((record.token_s[-1] for record in records if record.token_s), default=begin)
    duration_s = max(end - begin, 1e-9)
    prompt = sum(record.prompt_tokens for record in records if record.token_s)
    cached = sum(record.cached_tokens or 0 for record in records)
    return Summary(
        num_requests=len(records),
        num_failed=sum(not is_whole(record) for record in records),
        duration_s=duration_s,
        attainment=attainment(records, slo),
        prompt_tokens_s=prompt / duration_s,
        output_tokens_s=sum(len(record.token_s) for record in records) / duration_s,
        ttft=spread([ttft_s(record) for record in records]),
        second_token=spread([gap for record in records if (gap := second_token_s(record)) is not None]),
        tpot=spread([pace for record in records if (pace := tpot_s(record)) is not None]),
        itl=spread(all_itls_s(records)),
        itl_in_flight=spread(itls_in_flight_s(records)),
        stall_s=stall_s(records),
        waterfall=mean_waterfall(records),
        cached_share=cached / prompt if prompt else 0.0,
    )


def by_length(records: Sequence[RequestRecord]) -> Mapping[str, Sequence[RequestRecord]]:
    """All of them, and short and long prompts by themselves where there are both."""
    long = [record for record in records if record.prompt_tokens >= LONG_PROMPT_TOKENS]
    if not long or len(long) == len(records):
        return {"all": records}
    short = [record for record in records if record.prompt_tokens < LONG_PROMPT_TOKENS]
    return {"all": records, "short": short, "long": long}


def mean_waterfall(records: Iterable[RequestRecord]) -> Waterfall:
    """Each part over the requests that told any of it; a part that none had is None."""
    told = [record.waterfall for record in records if record.waterfall is not None]
    parts = {
        name: fmean(getattr(one, name) or 0.0 for one in told)
        for name in Waterfall.__struct_fields__
        if any(getattr(one, name) is not None for one in told)
    }
    return Waterfall(**parts)


# ---- of several runs -------------------------------------------------------------------------------------------


class Goodput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests a second. `is_bound`: the highest rate that was tried still kept it, so it is at least this. 0: the
    lowest that was tried did not."""

    rate: float
    is_bound: bool = False


def goodput(points: Sequence[tuple[float, float]], target: float) -> Goodput:
    """Of (rate, attainment) by rising rate: where the attainment first falls below the target, linear between the two
    rates beside that. Points of one rate count by their mean."""
    by_rate: dict[float, list[float]] = {}
    for rate, kept in points:
        by_rate.setdefault(rate, []).append(kept)
    before: tuple[float, float] | None = None
    for rate, kept in sorted((rate, fmean(each)) for rate, each in by_rate.items()):
        if kept < target:
            if before is None:
                return Goodput(rate=0.0)
            share = (before[1] - target) / (before[1] - kept)
            return Goodput(rate=before[0] + share * (rate - before[0]))
        before = rate, kept
    return Goodput(rate=0.0) if before is None else Goodput(rate=before[0], is_bound=True)


class Interval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mean, and where it lies in 95 of 100 cases. None of both bounds: one value tells no interval."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def interval(values: Sequence[float], *, seed: int = 0, num_draws: int = 2000) -> Interval:
    """Bootstrap over the values: of paired differences, one for each repetition. Widened as Student's t is against the
    normal law, without which an interval of three values holds the mean in two of three cases only (Hesterberg, "What
    teachers should know about the bootstrap", 2014)."""
    mean, num = fmean(values), len(values)
    if num < 2:
        return Interval(mean=mean)
    draws = np.random.default_rng(seed).choice(np.asarray(values), size=(num_draws, num)).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    wider = student_t(num - 1) / NORMAL_975 * (num / (num - 1)) ** 0.5
    return Interval(mean=mean, low=mean - wider * (mean - low), high=mean + wider * (high - mean))


NORMAL_975 = 1.960
STUDENT_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student_t(freedom: int) -> float:
    """Its 97.5 % point; beyond the table by the first term of its expansion (Fisher and Cornish)."""
    if freedom <= len(STUDENT_975):
        return STUDENT_975[freedom - 1]
    return NORMAL_975 + (NORMAL_975**3 + NORMAL_975) / (4 * freedom)
