"""What is measured of one request, as it happens: for the metrics, and for its line in the log. Owned by its task.

Where its time went is put together from three clocks' differences (gateway, prefiller, decoder), never from their
readings.
"""

import logging
from dataclasses import dataclass
from math import inf

import msgspec

from headrace.gateway.dispatch.attempt import Arrived, Attempt
from headrace.gateway.dispatch.metrics import GatewayMetrics, Outcome
from headrace.gateway.dispatch.placing import Predicted
from headrace.gateway.forecast import Forecast
from headrace.gateway.generation import Generation, Latency
from headrace.protocol.control import Finished, Prefilled

_log = logging.getLogger(__name__)


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; None where it did not come to that, or is not known."""

    queue_s: float | None = None  # admission until a decoder had accepted it, lease and all
    prefiller_queue_s: float | None = None
    prefill_s: float | None = None  # at the prefiller, or at the decoder
    exposed_transfer_s: float | None = None  # what the transfer added after the prefill
    hand_over_s: float | None = None
    first_step_s: float | None = None
    ttft_s: float | None = None

    def __str__(self) -> str:
        parts = (
            ("queue", self.queue_s),
            ("prefiller queue", self.prefiller_queue_s),
            ("prefill", self.prefill_s),
            ("exposed transfer", self.exposed_transfer_s),
            ("hand-over", self.hand_over_s),
            ("first step", self.first_step_s),
            ("ttft", self.ttft_s),
        )
        return ", ".join(f"{name} {'-' if part is None else f'{part * 1e3:.1f} ms'}" for name, part in parts)


def waterfall_of(
    finished: Finished | None, prefilled: Prefilled | None, *, queue_s: float | None, ttft_s: float | None
) -> Waterfall:
    """Of what the decoder and (where it was prefilled elsewhere) the prefiller tell."""
    if finished is None:
        return Waterfall(queue_s=queue_s, ttft_s=ttft_s)
    told = finished.waterfall
    elsewhere = prefilled if told.fetch_s > 0 else None
    exposed_s = None if elsewhere is None else max(0.0, told.fetch_s - elsewhere.queue_s - elsewhere.prefill_s)
    return Waterfall(
        queue_s=queue_s,
        prefiller_queue_s=None if elsewhere is None else elsewhere.queue_s,
        prefill_s=elsewhere.prefill_s if elsewhere is not None else told.local_prefill_s or None,
        exposed_transfer_s=exposed_s,
        hand_over_s=told.hand_over_s or None,
        first_step_s=told.first_step_s or None,
        ttft_s=ttft_s,
    )


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
    decoder: str = "-"
    prefiller: str = "-"
    predicted: Predicted | None = None
    expected: Forecast | None = None  # at the door

    def placed(self, now: float, *, decoder: str, prefiller: str, predicted: Predicted | None) -> None:
        """A decoder has accepted it. Resumed, it has not been queued anew as far as its client is concerned."""
        self.decoder, self.prefiller, self.predicted = decoder, prefiller, predicted
        if self.placed_at is None:
            self.placed_at = now
            self.metrics.placed(self.generation.tier, now - self.admitted_at)

    def arrived(self, arrived: Arrived) -> None:
        tier, num_tokens = self.generation.tier, len(arrived.token_ids)
        if self.last_at is None:
            self.first_at = arrived.at
            ttft_s = arrived.at - self.admitted_at
            self.metrics.first_tokens(tier, ttft_s, num_tokens, prompt_tokens=len(self.generation.token_ids))
            self._compare("ttft", ttft_s)
            if self.expected is not None and self.expected.ttft_s is not None:
                self.metrics.expected(self.expected.ttft_s, ttft_s)
            if self.predicted is not None:
                self.metrics.predicted(self.predicted.price, arrived.at - self.predicted.at)
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
        tpot_s = self._tpot_s()
        self.metrics.over(tier, outcome, tpot_s=tpot_s)
        if tpot_s is not None:
            self._compare("tpot", tpot_s)
            if self.predicted is not None and self.predicted.tpot_s is not None:
                self.metrics.predicted_tpot(self.predicted.tpot_s, tpot_s)
        if self.first_at is None and outcome in ("failed", "deadline"):
            self._compare("ttft", inf)
        num_prompt = len(self.generation.token_ids)
        cached = 0 if attempt is None else min(num_prompt, attempt.cached_tokens)
        if outcome in ("stop", "length"):
            self.metrics.finished(
                cached_tokens=cached,
                prefill_s=waterfall.prefill_s,
                exposed_transfer_s=waterfall.exposed_transfer_s,
            )
        _log.debug(
            "%s: %s; %s; %d prompt tokens (%d cached), %d tokens; decoder %s, prefiller %s; predicted %s",
            self.generation.request_id,
            outcome,
            waterfall,
            num_prompt,
            cached,
            self.num_tokens,
            self.decoder,
            self.prefiller,
            "-" if self.predicted is None else self.predicted.price,
        )

    def _compare(self, latency: Latency, seconds: float) -> None:
        budget = self.generation.budget
        budget_s = budget.ttft_s if latency == "ttft" else budget.tpot_s
        if budget_s is not None:
            self.metrics.compared(latency, self.generation.tier, is_kept=seconds <= budget_s)

    def _tpot_s(self) -> float | None:
        if self.first_at is None or self.last_at is None or self.num_tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.num_tokens - 1)
