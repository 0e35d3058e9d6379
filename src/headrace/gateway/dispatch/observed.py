"""What the gateway has seen its instances do, from which it predicts: prefixes that they have, transfers, hand-overs.

Owned by the gateway's loop; calls take `now`. Instances tell their rates and queues themselves (Status); this is what
only shows between them, or over many requests:

    affinity      by instance: a prompt's pages, from its first token on
    transfers     by prefiller and decoder: what the decoder waited beyond the prefiller's own queue and prefill
    faults        by prefiller and decoder: tickets that failed, one after another with none in between that did not
    hand-overs    of all decoders: from the last byte, or the last chunk, to the first token. Which of them is slow
                  shows in how long it keeps what it runs; one slow start is not to be held against it

What was learned of a transfer is forgotten after a minute without another: a link that was slow is tried again. So is a
pair that is suspected: once is an accident, after repeats other ways are taken for a while, longer each time.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

import msgspec

from headrace.gateway.dispatch.affinity import Affinity, Prompt
from headrace.gateway.dispatch.attempt import Attempt, RequestMessage
from headrace.gateway.dispatch.instances import Instance, Instances, decoder_view, prefiller_view
from headrace.gateway.options import LocalPrefill
from headrace.gateway.route import NOT_BY_CHOICE, UNMEASURED, DecoderView, Pair, PrefillerView, TransferCost
from headrace.kvcache.prefix import num_whole_pages
from headrace.protocol.control import Accepted, Finished, Tokens
from headrace.protocol.messages import Uuid

FORGET_S = 60.0
MOST_TRANSFERS = 32
"""The last ones of a pair, which its cost is fitted to."""
FEWEST_TRANSFERS = 2
"""One slow transfer is an accident: held against its pair it would be the last one there for a while."""
FEWEST_LENGTHS = 0.1
"""How far the lengths of prompts must differ, relative to their mean, before a cost of each token is told apart."""
HAND_OVER_SHARE = 0.2
"""Of the newest in the mean."""


ACCIDENTS = 1
"""So many faults of a pair in a row are none."""
ONE_EVENT_S = 1.0
"""All tickets of a peer that falls silent fail at once."""
FIRST_SUSPICION_S, LONGEST_SUSPICION_S = 5.0, 60.0
SUSPECTED = TransferCost(base_s=60.0)
"""Whoever else can compute the prompt does: more than any other way takes."""


@dataclass(slots=True)
class _Faults:
    """Of one pair, in a row."""

    number: int = 0
    counted_at: float = -math.inf
    suspected_until: float = 0.0

    def one_more(self, now: float) -> float:
        """-> for how long it is suspected from now on."""
        if now - self.counted_at < ONE_EVENT_S:
            return 0.0
        self.number, self.counted_at = self.number + 1, now
        repeats = self.number - ACCIDENTS
        if repeats < 1:
            return 0.0
        suspected_s = min(LONGEST_SUSPICION_S, FIRST_SUSPICION_S * 2.0 ** min(repeats - 1, 30))
        self.suspected_until = now + suspected_s
        return suspected_s


@dataclass(slots=True)
class _Transfers:
    """Of one pair."""

    last: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MOST_TRANSFERS))  # tokens, seconds
    cost: TransferCost = UNMEASURED
    at: float = 0.0


class Observed:
    """Of these `instances`."""

    def __init__(self, instances: Instances, local_prefill: LocalPrefill = "cheaper") -> None:
        self.affinity = Affinity()
        self._instances = instances
        self._local_prefill = local_prefill
        self._transfers: dict[Pair, _Transfers] = {}
        self._faults: dict[Pair, _Faults] = {}
        self._hand_over_s: float | None = None

    # ---- what is told ------------------------------------------------------------------------------------------

    def take(self, attempt: Attempt, message: RequestMessage, now: float) -> None:
        """A message that its attempt has taken."""
        match message:
            case Accepted():
                self._looked_up(attempt, message)
            case Tokens(index=0):
                self._has(message.sender, attempt.prompt)
                if attempt.prefiller is not None:
                    self._has(attempt.prefiller, attempt.prompt)
            case Finished():
                self._handed_over(message)
                self._transferred(attempt, message, now)

    def failed(self, prefiller: Uuid, decoder: Uuid, now: float) -> float:
        """A ticket between them, and not by a refusal. -> for how long the pair is suspected, seconds."""
        return self._faults.setdefault((prefiller, decoder), _Faults()).one_more(now)

    def wrote(self, attempt: Attempt, token_ids: Sequence[int]) -> None:
        """All tokens that its decoder knows at its end, the prompt's among them: it keeps their pages too."""
        decoder = None if attempt.offered_to is None else self._instances.get(attempt.offered_to)
        if decoder is None:
            return
        page_size = decoder.announce.limits.page_size
        if num_whole_pages(len(token_ids), page_size) > num_whole_pages(len(attempt.errand.token_ids), page_size):
            self._has(decoder.uuid, Prompt(token_ids))

    def left(self, uuid: Uuid) -> None:
        """An instance is gone: what comes back is another, or has aborted everything."""
        self.affinity.forget(uuid)
        self._transfers = {pair: known for pair, known in self._transfers.items() if uuid not in pair}
        self._faults = {pair: faults for pair, faults in self._faults.items() if uuid not in pair}

    def _looked_up(self, attempt: Attempt, accepted: Accepted) -> None:
        decoder = self._instances.get(accepted.sender)
        if decoder is not None:
            num_found = accepted.cached_tokens // decoder.announce.limits.page_size
            self.affinity.lacks(decoder.uuid, _hashes(decoder, attempt.prompt)[num_found:])

    def _has(self, uuid: Uuid, prompt: Prompt) -> None:
        instance = self._instances.get(uuid)
        if instance is not None:
            limits = instance.announce.limits
            num_pages = limits.pool_tokens // limits.page_size
            self.affinity.has(uuid, _hashes(instance, prompt), num_pages=num_pages)

    def _handed_over(self, finished: Finished) -> None:
        told, decoder = finished.waterfall, self._instances.get(finished.sender)
        # A colocated one's first step is the prefill's last chunk, which its prefill rate has counted.
        if told.first_step_s and decoder is not None and decoder.announce.role != "colocated":
            hand_over_s = told.hand_over_s + told.first_step_s
            mean_s = hand_over_s if self._hand_over_s is None else self._hand_over_s
            self._hand_over_s = mean_s + HAND_OVER_SHARE * (hand_over_s - mean_s)

    def _transferred(self, attempt: Attempt, finished: Finished, now: float) -> None:
        prefilled = attempt.prefilled
        if prefilled is None or prefilled.sender != attempt.prefiller or not finished.waterfall.fetch_s:
            return
        exposed_s = max(0.0, finished.waterfall.fetch_s - prefilled.queue_s - prefilled.prefill_s)
        self._faults.pop((prefilled.sender, finished.sender), None)
        known = self._transfers.setdefault((prefilled.sender, finished.sender), _Transfers())
        if now - known.at > FORGET_S:
            known.last.clear()
        known.last.append((attempt.errand.wanted.num_prefilled - attempt.hit_tokens, exposed_s))
        known.cost, known.at = fit(known.last) if len(known.last) >= FEWEST_TRANSFERS else UNMEASURED, now

    # ---- what routing sees -------------------------------------------------------------------------------------

    def decoders(self, prompt: Prompt) -> list[DecoderView]:
        """As they stand, and what each of them has of this prompt."""
        return [self.decoder(instance, prompt) for instance in self._instances.open_decoders()]

    def decoder(self, instance: Instance, prompt: Prompt) -> DecoderView:
        """The same of one of them, which may be draining."""
        num_cached = self._num_cached(instance, prompt)
        if instance.announce.role == "colocated":
            return decoder_view(instance, cached_tokens=num_cached)
        view = decoder_view(instance, cached_tokens=num_cached, hand_over_s=self._hand_over_s or 0.0)
        if self._local_prefill == "needed" and self._instances.open_prefillers():
            return msgspec.structs.replace(view, prefilling=NOT_BY_CHOICE)
        return view

    def prefillers(self, prompt: Prompt) -> list[PrefillerView]:
        """The same."""
        return [
            prefiller_view(instance, cached_tokens=self._num_cached(instance, prompt))
            for instance in self._instances.open_prefillers()
        ]

    def transfers(self, now: float) -> dict[Pair, TransferCost]:
        """Of the pairs that are known, or suspected."""
        costs = {pair: known.cost for pair, known in self._transfers.items() if now - known.at <= FORGET_S}
        return costs | {pair: SUSPECTED for pair, faults in self._faults.items() if now < faults.suspected_until}

    def cached_tokens(self, uuid: Uuid, prompt: Prompt) -> int:
        """That it should have of this prompt."""
        instance = self._instances.get(uuid)
        return 0 if instance is None else self._num_cached(instance, prompt)

    def _num_cached(self, instance: Instance, prompt: Prompt) -> int:
        num_pages = self.affinity.num_found(instance.uuid, _hashes(instance, prompt))
        return num_pages * instance.announce.limits.page_size

    def __repr__(self) -> str:
        return f"Observed({self.affinity!r}, {len(self._transfers)} pairs)"


def fit(transfers: Sequence[tuple[int, float]]) -> TransferCost:
    """Least squares of seconds over tokens for the slope, the (lower) median of what it leaves for the base; neither is
    negative. Of prompts of one length all is the base: a long prompt is not held to cost what a short one's overhead
    says."""
    mean_tokens = sum(tokens for tokens, _ in transfers) / len(transfers)
    mean_s = sum(seconds for _, seconds in transfers) / len(transfers)
    spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in transfers)
    token_s = 0.0
    if spread > len(transfers) * (FEWEST_LENGTHS * mean_tokens) ** 2:
        slope = sum((tokens - mean_tokens) * (seconds - mean_s) for tokens, seconds in transfers) / spread
        token_s = min(max(0.0, slope), mean_s / mean_tokens)
    base_s = median_low([seconds - token_s * tokens for tokens, seconds in transfers])
    return TransferCost(base_s=max(0.0, base_s), token_s=token_s)


def _hashes(instance: Instance, prompt: Prompt) -> list[bytes]:
    return prompt.hashes(instance.announce.limits.page_size, instance.announce.fingerprint)
