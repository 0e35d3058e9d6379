"""The requests that this gateway has at decoders: what the pace of their tokens was promised to be, how long they stay.

Owned by the gateway's loop; calls take `now`. Here stands what background work must leave to others at a decoder, and
how soon somebody's place there becomes free.
"""

from dataclasses import dataclass

from headrace.gateway.budgets import Tiers
from headrace.gateway.forecast import Promise
from headrace.gateway.generation import Generation
from headrace.gateway.route import DecoderView
from headrace.protocol.messages import Tier, Uuid

STAY_SHARE = 0.05
"""Of the newest in the mean of stays: some twenty count, chats and long summaries alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    decoder: Uuid
    tier: Tier
    tpot_s: float | None
    since: float


class Streams:
    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._streams: dict[str, _Stream] = {}  # by attempt
        self._at: dict[Uuid, set[str]] = {}  # the same by decoder
        self.stay_s: float | None = None
        """Mean, from a decoder's word that it takes a request to the end; None before there was one."""

    def began(self, request_id: str, decoder: Uuid, generation: Generation, now: float) -> None:
        tpot_s = generation.budget.tpot_s
        self._streams[request_id] = _Stream(decoder=decoder, tier=generation.tier, tpot_s=tpot_s, since=now)
        self._at.setdefault(decoder, set()).add(request_id)

    def ended(self, request_id: str, now: float) -> None:
        """Of one that began, once."""
        stream = self._streams.pop(request_id)
        here = self._at[stream.decoder]
        here.remove(request_id)
        if not here:
            del self._at[stream.decoder]
        stay_s = now - stream.since
        self.stay_s = stay_s if self.stay_s is None else self.stay_s + STAY_SHARE * (stay_s - self.stay_s)

    def tpot_of(self, tier: Tier) -> float | None:
        """What all requests of the tier are promised. One that asks for less gets that, or is refused."""
        return self._tiers.budget_of(tier).tpot_s

    def promise(self, decoder: DecoderView) -> Promise:
        """Other gateways' requests are there too: of them the decoder tells, and their tier's budget is ours."""
        here = [self._streams[request_id] for request_id in self._at.get(decoder.uuid, ())]
        urgent = [stream for stream in here if stream.tier == "interactive"]
        bounds = [self.tpot_of("interactive"), *(stream.tpot_s for stream in urgent)]
        told = decoder.decoding is not None and decoder.decoding.num_interactive > 0
        return Promise(
            tpot_s=min((bound for bound in bounds if bound is not None), default=None), is_due=told or bool(urgent)
        )

    def __repr__(self) -> str:
        return f"Streams({len(self._streams)} at {len(self._at)} decoders)"
