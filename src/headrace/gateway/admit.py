"""Whether a request is let in, and with how many tokens to come. Pure: the planner asks the same function.

What can never run is a 400 that names the field and both numbers; what could run some other time is a 429 that says
when to come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InputError
from headrace.gateway.generation import Overloaded
from headrace.protocol.control import MAX_PROMPT_TOKENS, Limits

MAX_TOKEN_ID = 2**31 - 1
LEAST_RETRY_S = 1.0
MOST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Requests that wait for a lease or for pages. `placed_at`: when the last ones stopped waiting, oldest first."""

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
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, queue.num_queued / rate))
