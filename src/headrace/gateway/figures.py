"""What is measured of one request, as it happens: for the metrics, and for its line in the log. Owned by its task."""

import logging
from dataclasses import dataclass

from headrace.gateway.attempt import Arrived, Attempt
from headrace.gateway.generation import Generation
from headrace.gateway.metrics import GatewayMetrics, Outcome
from headrace.gateway.waterfall import waterfall_of

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Figures:
    """Times of the gateway's clock; None: it has not come to that."""

    metrics: GatewayMetrics
    generation: Generation
    admitted_at: float
    placed_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    decoder: str = "-"
    prefiller: str = "-"

    def placed(self, now: float, *, decoder: str, prefiller: str) -> None:
        """A decoder has accepted it. Resumed, it has not been queued anew as far as its client is concerned."""
        self.decoder, self.prefiller = decoder, prefiller
        if self.placed_at is None:
            self.placed_at = now
            self.metrics.placed(self.generation.tier, now - self.admitted_at)

    def arrived(self, arrived: Arrived) -> None:
        tier, num_tokens = self.generation.tier, len(arrived.token_ids)
        if self.last_at is None:
            self.first_at = arrived.at
            self.metrics.first_tokens(tier, arrived.at - self.admitted_at, num_tokens)
        else:
            self.metrics.next_tokens(tier, arrived.at - self.last_at, num_tokens)
        self.last_at = arrived.at
        self.num_tokens += num_tokens

    def over(self, outcome: Outcome, attempt: Attempt | None) -> None:
        tier = self.generation.tier
        finished = None if attempt is None else attempt.finished
        waterfall = waterfall_of(
            finished,
            None if attempt is None else attempt.prefilled,
            queue_s=None if self.placed_at is None else self.placed_at - self.admitted_at,
            ttft_s=None if self.first_at is None else self.first_at - self.admitted_at,
        )
        self.metrics.over(tier, outcome)
        num_prompt = len(self.generation.token_ids)
        cached = 0 if finished is None else min(num_prompt, finished.cached_tokens)
        if outcome in ("stop", "length"):
            self.metrics.finished(
                tier, waterfall, prompt_tokens=num_prompt, cached_tokens=cached, tpot_s=self._tpot_s()
            )
        _log.debug(
            "%s: %s; %s; %d prompt tokens (%d cached), %d tokens; decoder %s, prefiller %s",
            self.generation.request_id,
            outcome,
            waterfall,
            num_prompt,
            cached,
            self.num_tokens,
            self.decoder,
            self.prefiller,
        )

    def _tpot_s(self) -> float | None:
        if self.first_at is None or self.last_at is None or self.num_tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.num_tokens - 1)
