"""Which decoder a request is offered to, and who computes its prompt: a prefiller, or the decoder itself. Pure: views
in, a decision out.

The views are estimates, half a second old at most: the decoder alone reserves pages, and may say NoRoom. A way to a
first token is a decoder and a prefiller or none, and has a price in seconds:

    at a prefiller    its queue and what it does not have of the prompt, at its speed; then the transfer of what the
                      decoder does not have, as far as it shows after the prefill; then the decoder's hand-over
    at the decoder    the same of its own, with no transfer; and what that takes from the streams that decode there

A decoder takes the cheapest of its ways. Of the decoders with room, those whose price differs from the least by nothing
that anybody would feel are as good as each other, and the one that runs the fewest requests is taken; where nobody has
room, whoever has the most free pages. A decoder prefills by itself where it must (no prefiller could hold the prompt,
it is colocated, there is nothing to compute before its first decode query), or where that is cheaper, at a speed that
it has measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headrace.kvcache.layout import num_pages_for
from headrace.protocol.control import Decoding, Prefilling
from headrace.protocol.messages import Tier, Uuid

GROWTH_TOKENS = 64
"""What a decoder reserves beyond the prompt before it knows better (PROTOCOL, "Growth")."""

ASSUMED = Prefilling(step_s=0.0, rate=1000.0)
"""Of whoever prefills, while nobody has measured anything. Later one that has not measured counts as the fastest that
is known: so it is asked, and measures."""

NOT_BY_CHOICE = Prefilling(step_s=0.0, rate=0.0)
"""Of a decoder that is to compute a prompt only where it must: as of one whose budget any chunk would break."""

UNFELT_S = 0.01
UNFELT_SHARE = 0.1
"""Differences in price, between decoders, that are noise: nobody feels them, and predictions are no better."""


class DecoderView(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder or colocated instance that is alive. `cached_tokens`: of this prompt, that it has. `prefilling`: how
    fast it would prefill beside what it runs, at rate 0 where that breaks its budget; `decoding`: what its steps take,
    None of either: not measured yet. `hand_over_s`: from the prompt's last byte to its first token."""

    uuid: Uuid
    is_colocated: bool = False
    num_free_pages: int
    page_size: int
    num_running: int
    max_running: int
    num_queued_tokens: int = 0
    num_background_tokens: int = 0  # those of them that are flex
    cached_tokens: int = 0
    prefilling: Prefilling | None = None
    decoding: Decoding | None = None
    hand_over_s: float = 0.0


class PrefillerView(msgspec.Struct, frozen=True, kw_only=True):
    """A prefiller that is alive. `max_tokens` is the longest prompt that it could hold; the rest as of a decoder."""

    uuid: Uuid
    num_queued_tokens: int
    num_background_tokens: int = 0
    max_tokens: int
    cached_tokens: int = 0
    prefilling: Prefilling | None = None


class TransferCost(msgspec.Struct, frozen=True):
    """What the transfer of a prompt's KV adds after its prefill, between two instances: seconds of each, and of each
    token that travels. Of a link that keeps pace with the prefill hardly anything."""

    base_s: float = 0.0
    token_s: float = 0.0

    def predict(self, num_tokens: int) -> float:
        return self.base_s + self.token_s * num_tokens


Pair = tuple[Uuid, Uuid]
"""A prefiller and a decoder."""

UNMEASURED = TransferCost()
"""Neutral: a pair is tried before it is judged."""

NOTHING_MEASURED: Mapping[Pair, TransferCost] = MappingProxyType({})


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """`num_tokens` is everything known: the prompt, and what was generated before. `max_tokens` more may come."""

    num_tokens: int
    max_tokens: int
    tier: Tier = "interactive"

    @property
    def num_prefilled(self) -> int:
        """All but the last, which is the first decode query."""
        return self.num_tokens - 1


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Of one way, in seconds. `stall_s` is what others lose by it; the rest is the request's time to first token."""

    wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    hand_over_s: float = 0.0
    stall_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Predicted, from the decision on."""
        return self.wait_s + self.prefill_s + self.transfer_s + self.hand_over_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.stall_s

    @property
    def terms(self) -> dict[str, float]:
        """Of the predicted time to first token, by name."""
        return {
            "wait": self.wait_s,
            "prefill": self.prefill_s,
            "transfer": self.transfer_s,
            "hand_over": self.hand_over_s,
        }

    def __str__(self) -> str:
        parts = self.terms | {"stall": self.stall_s}
        return ", ".join(f"{name.replace('_', '-')} {seconds * 1e3:.1f} ms" for name, seconds in parts.items())


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """`prefiller` None: the decoder prefills by itself."""

    decoder: Uuid
    prefiller: Uuid | None
    price: Price


def route(
    decoders: Sequence[DecoderView],
    prefillers: Sequence[PrefillerView],
    wanted: Wanted,
    transfers: Mapping[Pair, TransferCost] = NOTHING_MEASURED,
) -> Route | None:
    """None when no decoder is alive."""
    if not decoders:
        return None
    told = [*(view.prefilling for view in decoders), *(view.prefilling for view in prefillers)]
    prices = _Prices(wanted, transfers, assumed=_fastest(told))
    ways = [(view, prices.cheapest(view, prefillers)) for view in decoders]
    roomy = [(view, way) for view, way in ways if _has_room(view, wanted)]
    if not roomy:
        return min(ways, key=lambda way: (-way[0].num_free_pages, way[0].num_running, way[0].uuid))[1]
    least_s = min(way.price.total_s for _, way in roomy)
    felt_s = least_s + max(UNFELT_S, UNFELT_SHARE * least_s)
    return min((way for way in roomy if way[1].price.total_s <= felt_s), key=_load)[1]


def choose_prefiller(
    decoder: DecoderView,
    prefillers: Sequence[PrefillerView],
    wanted: Wanted,
    transfers: Mapping[Pair, TransferCost] = NOTHING_MEASURED,
) -> Uuid | None:
    """For this decoder, which will not compute the prompt if it can be helped. None when none is alive that could hold
    it."""
    prices = _Prices(wanted, transfers, assumed=_fastest([view.prefilling for view in prefillers]))
    chosen = prices.cheapest_remote(decoder, prefillers)
    return None if chosen is None else chosen.prefiller


def num_pages_wanted(wanted: Wanted, page_size: int) -> int:
    """What a decoder will probably reserve."""
    return num_pages_for(wanted.num_tokens + min(wanted.max_tokens, GROWTH_TOKENS), page_size)


class _Prices(msgspec.Struct, frozen=True):
    """Of one request's ways."""

    wanted: Wanted
    transfers: Mapping[Pair, TransferCost]
    assumed: Prefilling

    def cheapest(self, decoder: DecoderView, prefillers: Sequence[PrefillerView]) -> Route:
        """Where both cost the same, at a prefiller: nobody is disturbed there."""
        local = Route(decoder=decoder.uuid, prefiller=None, price=self._local(decoder))
        if decoder.is_colocated or not self.wanted.num_prefilled:
            return local
        remote = self.cheapest_remote(decoder, prefillers)
        if remote is None:
            return local
        by_choice = decoder.prefilling is not None and decoder.prefilling.rate > 0
        return local if by_choice and local.price.total_s < remote.price.total_s else remote

    def cheapest_remote(self, decoder: DecoderView, prefillers: Sequence[PrefillerView]) -> Route | None:
        able = [view for view in prefillers if view.max_tokens >= self.wanted.num_tokens]
        ways = [
            Route(decoder=decoder.uuid, prefiller=view.uuid, price=self._remote(decoder, view))
            for view in sorted(able, key=lambda view: (view.num_queued_tokens, view.uuid))
        ]
        return min(ways, key=lambda way: way.price.total_s, default=None)

    def _remote(self, decoder: DecoderView, prefiller: PrefillerView) -> Price:
        speed = self._speed(prefiller)
        wait_s = self._num_before(prefiller) / speed.rate  # for a lease, at the least
        num_travelling = self._num_missing(decoder)
        if not num_travelling:
            return Price(wait_s=wait_s, hand_over_s=decoder.hand_over_s)
        transfer = self.transfers.get((prefiller.uuid, decoder.uuid), UNMEASURED)
        return Price(
            wait_s=wait_s,
            prefill_s=_seconds(self._num_missing(prefiller), speed),
            transfer_s=transfer.predict(num_travelling),
            hand_over_s=decoder.hand_over_s,
        )

    def _local(self, decoder: DecoderView) -> Price:
        speed, num_missing = self._speed(decoder), self._num_missing(decoder)
        return Price(
            wait_s=self._num_before(decoder) / speed.rate if num_missing else 0.0,
            prefill_s=_seconds(num_missing, speed),
            hand_over_s=decoder.hand_over_s,
            # Every stream there waits for the chunks. One is counted at the least, whoever comes next: else an idle
            # decoder would take any prompt, and be found busy.
            stall_s=num_missing / speed.rate * max(1, decoder.num_running),
        )

    def _num_before(self, view: DecoderView | PrefillerView) -> int:
        """Queued tokens that are computed first: of background prompts, before an interactive one, the chunk that
        runs."""
        if self.wanted.tier == "flex":
            return view.num_queued_tokens
        chunk_tokens = 0 if view.prefilling is None else view.prefilling.chunk_tokens
        in_the_way = min(view.num_background_tokens, chunk_tokens)
        return view.num_queued_tokens - view.num_background_tokens + in_the_way

    def _speed(self, view: DecoderView | PrefillerView) -> Prefilling:
        told = view.prefilling
        return told if told is not None and told.rate > 0 else self.assumed

    def _num_missing(self, view: DecoderView | PrefillerView) -> int:
        return max(0, self.wanted.num_prefilled - view.cached_tokens)


def _fastest(told: Iterable[Prefilling | None]) -> Prefilling:
    measured = [one for one in told if one is not None and one.rate > 0]
    return max(measured, key=lambda one: (one.rate, -one.step_s), default=ASSUMED)


def _seconds(num_tokens: int, speed: Prefilling) -> float:
    return speed.step_s + num_tokens / speed.rate if num_tokens else 0.0


def _has_room(view: DecoderView, wanted: Wanted) -> bool:
    return view.num_free_pages >= num_pages_wanted(wanted, view.page_size) and view.num_running < view.max_running


def _load(way: tuple[DecoderView, Route]) -> tuple[int, float, int, int, Uuid]:
    """Smaller is better; the uuid makes it a total order. What a decoder has need not travel, whatever that costs."""
    view, chosen = way
    return view.num_running, chosen.price.total_s, -view.cached_tokens, -view.num_free_pages, view.uuid
