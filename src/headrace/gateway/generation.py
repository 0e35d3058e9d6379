"""What the HTTP side asks of the dispatch side, and what it gets: plain records and one protocol. Owns nothing.

`Dispatch.generate` is an async generator over one request's life. Closing it (or cancelling its task) is an
abort: everything the request holds anywhere is freed.
"""

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from headrace.errors import HeadraceError
from headrace.gateway.budgets import NO_BUDGET, Budget
from headrace.protocol.control import Limits, Sampling
from headrace.protocol.messages import Tier

FinishReason = Literal["stop", "length"]
Latency = Literal["ttft", "tpot"]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one prompt. max_tokens None: as many as fit."""

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int | None
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    tier: Tier
    budget: Budget = NO_BUDGET
    deadline_s: float


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The next tokens, and with the last of them how it ended."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_tokens: int = 0  # with finish_reason: completion tokens, the stop token included
    cached_tokens: int = 0  # of the prompt


class Overloaded(HeadraceError):
    """No room now (429), or nobody who could serve it (503). `retry_after_s` None: coming back does not help."""

    def __init__(self, text: str, *, status: Literal[429, 503], retry_after_s: float | None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s


class BudgetExceeded(Overloaded):
    """It would come later than it may (429). `retry_after_s` None: on an idle fleet too."""

    def __init__(
        self, text: str, *, latency: Latency, predicted_s: float, budget_s: float, retry_after_s: float | None
    ) -> None:
        super().__init__(text, status=429, retry_after_s=retry_after_s)
        self.latency = latency
        self.predicted_s = predicted_s
        self.budget_s = budget_s


class GenerationFailed(HeadraceError):
    """Accepted, and could not be finished: an error inside, or the deadline passed (`status` 500 or 504)."""

    def __init__(self, text: str, *, status: Literal[500, 504] = 500) -> None:
        super().__init__(text)
        self.status = status


class Dispatch(Protocol):
    def limits(self) -> Limits | None:
        """Of the smallest decoder; None while there is none."""
        ...

    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        ...

    def generate(self, generation: Generation) -> AsyncGenerator[Progress, None]:
        """Raises InputError (a 400 that names the field), Overloaded before the first Progress, GenerationFailed."""
        ...
