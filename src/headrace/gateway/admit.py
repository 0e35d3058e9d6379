"""Whether a request is let in, and with how many tokens to come. Pure: the planner asks the same functions.

    never       what no instance could run is a 400 that names the field and both numbers
    not now     too many wait already, or its first token is predicted for after its budget: a 429 that says when to
                come back. One that would be late on an idle fleet too is told so, and what would help
    let in      it waits by the deadline of its first token, and is served, however late it then is

A pace that is all its tier's is no reason to refuse: while decoders have no room for it, it waits. One that a request
alone asks for must be there when it comes, or others would wait behind it.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from headrace.errors import InputError
from headrace.gateway.budgets import TPOT_HEADER, TTFT_HEADER, Budget
from headrace.gateway.forecast import NOBODY, Ahead, Fleet, Forecast, forecast, idle, room_s
from headrace.gateway.generation import BudgetExceeded, Latency, Overloaded
from headrace.gateway.route import Wanted
from headrace.protocol.control import MAX_PROMPT_TOKENS, Limits

MAX_TOKEN_ID = 2**31 - 1
LEAST_RETRY_S = 1.0
MOST_RETRY_S = 60.0


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of its tier that wait for a lease or for pages. `placed_at`: when the last ones of any tier stopped
    waiting, oldest first."""

    num_queued: int
    max_queued: int
    placed_at: Sequence[float]


def admit(token_ids: Sequence[int], max_tokens: int | None, limits: Limits, queue: Queue, now: float) -> int:
    """-> max_tokens; without a wish, as many as fit. Raises InputError, Overloaded (429)."""
    admitted = _admit_length(token_ids, max_tokens, limits)
    if queue.num_queued >= queue.max_queued:
        wait_s = predicted_wait_s(queue, now)
        raise Overloaded(
            f"{queue.num_queued} requests wait already, of at most {queue.max_queued}; "
            f"the next one would start in about {wait_s:.0f} s",
            status=429,
            retry_after_s=wait_s,
        )
    return admitted


def require_in_time(fleet: Fleet, wanted: Wanted, budget: Budget, ahead: Ahead = NOBODY) -> Forecast:
    """-> what is predicted of it. Raises BudgetExceeded (429)."""
    expected = forecast(fleet, wanted, ahead)
    late = _is_over(expected.ttft_s, budget.ttft_s)
    if late or _is_over(expected.tpot_s, budget.tpot_s):
        least = forecast(idle(fleet), wanted)
        _require_possible("ttft", least.ttft_s, budget.ttft_s)
        _require_possible("tpot", least.tpot_s, budget.tpot_s)
    if late:
        assert expected.ttft_s is not None and budget.ttft_s is not None
        raise _exceeded(
            "ttft",
            expected.ttft_s,
            budget.ttft_s,
            f"{ahead.num_requests} requests wait before it",
            retry_after_s=_bounded(expected.ttft_s - budget.ttft_s),
        )
    is_its_own = budget.tpot_s is not None and (fleet.tpot_s is None or budget.tpot_s < fleet.tpot_s)
    if is_its_own and expected.tpot_s is not None and _is_over(expected.tpot_s, budget.tpot_s):
        assert budget.tpot_s is not None
        raise _exceeded(
            "tpot",
            expected.tpot_s,
            budget.tpot_s,
            "that is what decodes now",
            retry_after_s=_bounded(room_s(replace(fleet, tpot_s=budget.tpot_s), wanted, ahead)),
        )
    return expected


def _require_possible(latency: Latency, least_s: float | None, budget_s: float | None) -> None:
    if least_s is None or budget_s is None or least_s <= budget_s:
        return
    header, shorter = (TTFT_HEADER, "a shorter prompt, or ") if latency == "ttft" else (TPOT_HEADER, "")
    hint = f"on an idle fleet too, so that coming back does not help: {shorter}a longer budget ({header}) would"
    raise _exceeded(latency, least_s, budget_s, hint, retry_after_s=None)


def _exceeded(
    latency: Latency, predicted_s: float, budget_s: float, why: str, *, retry_after_s: float | None
) -> BudgetExceeded:
    what = {"ttft": "its first token would take", "tpot": "each further token would take"}[latency]
    text = f"{what} about {predicted_s * 1e3:,.0f} ms, of a budget of {budget_s * 1e3:,.4g} ms: {why}"
    return BudgetExceeded(
        text, latency=latency, predicted_s=predicted_s, budget_s=budget_s, retry_after_s=retry_after_s
    )


def _is_over(predicted_s: float | None, budget_s: float | None) -> bool:
    return predicted_s is not None and budget_s is not None and predicted_s > budget_s


def _bounded(wait_s: float) -> float:
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, wait_s))


def _admit_length(token_ids: Sequence[int], max_tokens: int | None, limits: Limits) -> int:
    num_tokens = len(token_ids)
    if not token_ids:
        raise InputError("prompt", "must be at least one token, is empty")
    if max_tokens is not None and max_tokens < 1:
        raise InputError("max_tokens", f"must be at least 1, is {max_tokens}")
    smallest, largest = min(token_ids), max(token_ids)
    if smallest < 0 or largest > MAX_TOKEN_ID:
        wrong = smallest if smallest < 0 else largest
        raise InputError("prompt", f"token ids must be in 0..{MAX_TOKEN_ID}, one is {wrong}")
    longest = longest_sequence(limits)
    room = longest - num_tokens
    if room < 1:
        raise InputError(
            "prompt",
            f"must be at most {longest - 1} tokens, is {num_tokens}: with max_tokens {max_tokens or 1} that is more "
            f"than the {longest} that are served",
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise InputError(
            "max_tokens",
            f"must be at most {room}, is {max_tokens}: with the prompt's {num_tokens} tokens that is more than the "
            f"{longest} that are served",
        )
    return max_tokens


def longest_sequence(limits: Limits) -> int:
    """Prompt and output together, tokens."""
    return min(limits.max_model_len, limits.pool_tokens, MAX_PROMPT_TOKENS)


def predicted_wait_s(queue: Queue, now: float) -> float:
    """Until everybody who waits now has started, at the rate at which the last ones did."""
    if not queue.placed_at:
        return LEAST_RETRY_S
    rate = len(queue.placed_at) / max(now - queue.placed_at[0], 1e-3)
    return _bounded(queue.num_queued / rate)
