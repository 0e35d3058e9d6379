"""Where one request's time went, from its admission to its last token: a record, and the line that it makes in the log.

Put together from three clocks' differences (gateway, prefiller, decoder), never from their readings. Owns nothing.
"""

from dataclasses import dataclass

from headrace.protocol.control import Finished, Prefilled


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
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
