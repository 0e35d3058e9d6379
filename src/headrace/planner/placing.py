"""The simulated gateway's choice: `gateway.route`, of views that are shown to it without those that could not win.

`route` prices every pair of a decoder and a prefiller; of a hundred instances nearly all are no better than another in
anything that it looks at. Those are left out here: the choice is the same but for ties, and a test holds it to that.
Views are as old as a Status may be, but for what the gateway itself has placed since.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.gateway.forecast import Fleet
from headrace.gateway.route import (
    DecoderView,
    Pair,
    PrefillerView,
    Route,
    TransferCost,
    Wanted,
    choose_prefiller,
    num_pages_wanted,
    route,
)
from headrace.planner.decoding import Decoder
from headrace.planner.prefilling import Prefiller
from headrace.planner.requests import Request
from headrace.planner.scenario import Instance, Scenario
from headrace.protocol.control import Decoding, Prefilling

NO_CHUNKS = Prefilling(step_s=0.0, rate=0.0)
"""Of a decoder that computes no prompt by choice."""


def wanted_of(request: Request) -> Wanted:
    return Wanted(num_tokens=request.num_known, max_tokens=request.num_remaining, tier=request.tier)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """`kind`: who differs in that is not compared. Less of a respect is better; `rest` breaks ties."""

    kind: tuple[str, ...]
    respects: tuple[float, ...]
    rest: tuple[float, ...]


class Placing:
    def __init__(self, scenario: Scenario, decoders: Sequence[Decoder], prefillers: Sequence[Prefiller]) -> None:
        self._decoders = decoders
        self._prefillers = prefillers
        self._hand_over_s = scenario.hand_over_s
        self._transfers = exposed_costs(scenario)
        network = scenario.network
        self._is_uniform = network.same_host is None and network.same_switch is None

    def choose(self, request: Request, full: Collection[Decoder]) -> Route | None:
        """None: nobody decodes. Those in `full` have just said NoRoom, and are chosen if nobody else is left."""
        wanted = wanted_of(request)
        up = [decoder for decoder in self._decoders if not decoder.is_down]
        up = [decoder for decoder in up if decoder not in full] or up
        roomy = [decoder for decoder in up if has_room(decoder, wanted)]
        able = undominated(roomy, request, is_uniform=self._is_uniform) if roomy else _freest(up)
        views = [decoder_view(decoder, request, self._hand_over_s) for decoder in able]
        return route(views, self._granting(request), wanted, self._transfers)

    def choose_prefiller(self, decoder: Decoder, request: Request) -> str | None:
        """For a request that is at this decoder already."""
        view = decoder_view(decoder, request, self._hand_over_s)
        return choose_prefiller(view, self._granting(request), wanted_of(request), self._transfers)

    def fleet(self, request: Request) -> Fleet:
        """All of it."""
        return Fleet(
            decoders=[
                decoder_view(decoder, request, self._hand_over_s) for decoder in self._decoders if not decoder.is_down
            ],
            prefillers=[prefiller_view(one, request) for one in self._prefillers if not one.is_down],
            transfers=self._transfers,
        )

    def _granting(self, request: Request) -> list[PrefillerView]:
        """Those that would grant a lease, of those that differ in nothing else the one with the shortest queue; where
        nobody would, of all."""
        up = [one for one in self._prefillers if not one.is_down]
        num_tokens = request.num_known - 1
        granting = [one for one in up if one.leases.fits(num_tokens, request.tier)] or up
        best: dict[tuple[object, ...], tuple[int, int]] = {}
        for nth, one in enumerate(granting):
            spec = one.spec
            cached = cached_tokens(one, request)
            kind = (spec.num_pages, one.speed, cached, *(() if self._is_uniform else (spec.host, spec.switch)))
            rank = one.num_queued_tokens(), nth
            best[kind] = min(best.get(kind, rank), rank)
        return [prefiller_view(granting[nth], request) for _, nth in best.values()]


# ---- who could win ---------------------------------------------------------------------------------------------


def undominated(decoders: Sequence[Decoder], request: Request, *, is_uniform: bool) -> list[Decoder]:
    """Without those that another is no worse than in anything."""
    ranked = [(_ranked(decoder, request, is_uniform), decoder) for decoder in decoders]
    ranked.sort(key=lambda one: (one[0].respects, one[0].rest))
    found: list[tuple[_Ranked, Decoder]] = []
    for rank, decoder in ranked:
        if not any(rank.kind == other.kind and _is_no_worse(other.respects, rank.respects) for other, _ in found):
            found.append((rank, decoder))
    return [decoder for _, decoder in found]


def _ranked(decoder: Decoder, request: Request, is_uniform: bool) -> _Ranked:
    spec, told = decoder.spec, decoder.tell()
    queued = decoder.queued_tokens
    before = sum(queued.values())
    if request.tier == "interactive":
        before = queued["interactive"] + min(queued["flex"], spec.chunk_tokens)
    speed = told.speed
    computes = spec.role == "colocated" or spec.prefills
    return _Ranked(
        (spec.role, str(spec.prefills), *(() if is_uniform else (spec.host, spec.switch))),
        (
            decoder.num_running,
            before,
            -cached_tokens(decoder, request),
            *((-speed.rate, speed.step_s) if computes else ()),
        ),
        (-told.num_free_pages,),
    )


def _is_no_worse(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other, strict=True))


def _freest(decoders: Sequence[Decoder]) -> list[Decoder]:
    return [min(decoders, key=lambda one: (-one.tell().num_free_pages, one.num_running))] if decoders else []


def has_room(decoder: Decoder, wanted: Wanted) -> bool:
    """As its gateway sees it."""
    is_free = decoder.tell().num_free_pages >= num_pages_wanted(wanted, decoder.spec.page_size)
    return is_free and decoder.num_running < decoder.spec.max_running


# ---- views -----------------------------------------------------------------------------------------------------


def cached_tokens(instance: Decoder | Prefiller, request: Request) -> int:
    """A prompt that shares nothing, and comes for the first time, nobody has."""
    if not request.arrival.blocks and not request.attempt:
        return 0
    return instance.pages.hit_tokens(request.prefix, request.num_known)


def decoder_view(decoder: Decoder, request: Request, hand_over_s: float) -> DecoderView:
    spec, told = decoder.spec, decoder.tell()
    computes = spec.role == "colocated" or spec.prefills
    cost, speed = spec.measured, told.speed
    return DecoderView(
        uuid=spec.name,
        is_colocated=spec.role == "colocated",
        num_free_pages=max(0, told.num_free_pages),
        page_size=spec.page_size,
        num_running=decoder.num_running,
        max_running=spec.max_running,
        num_queued_tokens=sum(decoder.queued_tokens.values()),
        num_background_tokens=decoder.queued_tokens["flex"],
        cached_tokens=cached_tokens(decoder, request),
        prefilling=Prefilling(step_s=speed.step_s, rate=speed.rate, chunk_tokens=speed.chunk_tokens)
        if computes
        else NO_CHUNKS,
        decoding=Decoding(
            step_s=cost.step_s,
            row_s=cost.row_s,
            key_s=cost.key_s,
            num_rows=told.num_rows,
            num_keys=told.num_keys,
            num_interactive=told.num_rows,
        ),
        hand_over_s=hand_over_s,
    )


def prefiller_view(prefiller: Prefiller, request: Request) -> PrefillerView:
    spec, speed = prefiller.spec, prefiller.speed
    return PrefillerView(
        uuid=spec.name,
        num_queued_tokens=prefiller.num_queued_tokens(),
        num_background_tokens=prefiller.num_queued_tokens(background=True),
        max_tokens=spec.num_pages * spec.page_size,
        cached_tokens=cached_tokens(prefiller, request),
        prefilling=Prefilling(step_s=speed.step_s, rate=speed.rate, chunk_tokens=speed.chunk_tokens),
    )


def exposed_costs(scenario: Scenario) -> Mapping[Pair, TransferCost]:
    """What a gateway comes to observe of each pair that has nothing else to do: the last layer, and of a link that is
    slower than the prefill what is left of the others."""
    prefillers = [one for one in scenario.instances if one.role == "prefiller"]
    decoders = [one for one in scenario.instances if one.role == "decoder"]
    return {(one.name, other.name): _exposed(scenario, one, other) for one in prefillers for other in decoders}


def _exposed(scenario: Scenario, one: Instance, other: Instance) -> TransferCost:
    link, kv = scenario.network.between(one, other), scenario.kv
    token_s = link.seconds(kv.page_bytes, kv.page_messages) / one.page_size
    computed_s = one.measured.token_s
    return TransferCost(base_s=link.latency_s, token_s=max(token_s / kv.num_layers, token_s - computed_s))
