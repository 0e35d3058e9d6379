"""The simulated gateway's choice: `gateway.route`, of views that are shown to it without those that could not win.

`route` prices every pair of a decoder and a prefiller; of a hundred instances nearly all are no better than another in
anything that it looks at. Those are left out (`ranking`): the choice is the same but for ties, and a test says so.
Views are as old as a Status may be, but for what the gateway itself has placed since.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from headrace.engine.requests import TIERS
from headrace.gateway.forecast import Fleet
from headrace.gateway.route import (
    NOT_BY_CHOICE,
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
from headrace.planner.clock import Clock
from headrace.planner.decoding import Decoder
from headrace.planner.prefilling import Prefiller
from headrace.planner.ranking import Kind, Ranking
from headrace.planner.requests import Request
from headrace.planner.scenario import Instance, Scenario
from headrace.protocol.control import Decoding, Prefilling


def wanted_of(request: Request) -> Wanted:
    return Wanted(num_tokens=request.num_known, max_tokens=request.num_remaining, tier=request.tier)


class Placing:
    def __init__(
        self, scenario: Scenario, decoders: Sequence[Decoder], prefillers: Sequence[Prefiller], clock: Clock
    ) -> None:
        self._decoders = decoders
        self._prefillers = prefillers
        self._hand_over_s = scenario.hand_over_s
        self._transfers = exposed_costs(scenario)
        network = scenario.network
        is_uniform = network.same_host is None and network.same_switch is None
        kinds = kinds_of([one.spec for one in decoders], is_uniform=is_uniform)
        self._prefiller_kinds = kinds_of([one.spec for one in prefillers], is_uniform=is_uniform)
        self._rankings = {tier: Ranking(decoders, kinds, tier, clock) for tier in TIERS}
        for nth, decoder in enumerate(decoders):
            decoder.on_change = partial(self._changed, nth)

    def _changed(self, nth: int) -> None:
        for ranking in self._rankings.values():
            ranking.changed(nth)

    def choose(self, request: Request, full: Collection[int]) -> tuple[int, Route] | None:
        """-> a decoder's number, and the way. None: nobody decodes. Those in `full` have just said NoRoom, and are
        chosen if nobody else is left."""
        wanted = wanted_of(request)
        able = self._rankings[request.tier].undominated(
            num_pages_wanted(wanted, self._decoders[0].spec.page_size),
            full=full,
            num_missing=partial(_num_missing, request) if may_have_hits(request) else None,
        )
        able = able or self._freest(full)
        views = [decoder_view(self._decoders[nth], request, self._hand_over_s) for nth in able]
        chosen = route(views, self._granting(request), wanted, self._transfers)
        if chosen is None:
            return None
        return next(nth for nth in able if self._decoders[nth].spec.name == chosen.decoder), chosen

    def _freest(self, full: Collection[int]) -> list[int]:
        """None has room."""
        up = [nth for nth, decoder in enumerate(self._decoders) if not decoder.is_down]
        up = [nth for nth in up if nth not in full] or up
        decoders = self._decoders
        return sorted(up, key=lambda nth: (-decoders[nth].tell().num_free_pages, decoders[nth].num_running, nth))[:1]

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
        """Those that would grant a lease; where nobody would, all of them: it waits for one, or does without."""
        found = self._least_queued(request, grants=True) or self._least_queued(request, grants=False)
        return [prefiller_view(one, request) for one in found]

    def _least_queued(self, request: Request, *, grants: bool) -> list[Prefiller]:
        """Of those that differ in nothing else."""
        num_tokens, tier, has_hits = request.num_known - 1, request.tier, may_have_hits(request)
        best: dict[tuple[Kind, int], tuple[int, Prefiller]] = {}
        for one, kind in zip(self._prefillers, self._prefiller_kinds, strict=True):
            if one.is_down:
                continue
            same = kind, one.cached_tokens(request) if has_hits else 0
            num_before, known = one.num_before(tier), best.get(same)
            if known is not None and known[0] <= num_before:
                continue
            if not grants or one.leases.fits(num_tokens, tier):
                best[same] = num_before, one
        return [one for _, one in best.values()]


# ---- who is like whom ------------------------------------------------------------------------------------------


def kinds_of(specs: Sequence[Instance], *, is_uniform: bool) -> list[Kind]:
    numbers: dict[tuple[object, ...], Kind] = {}
    found = []
    for spec in specs:
        place = () if is_uniform else (spec.host, spec.switch)
        same = (spec.role, spec.measured, spec.num_pages, spec.chunk_tokens, spec.max_running, spec.prefills, *place)
        found.append(numbers.setdefault(same, len(numbers)))
    return found


def has_room(decoder: Decoder, wanted: Wanted) -> bool:
    """As its gateway sees it."""
    is_free = decoder.tell().num_free_pages >= num_pages_wanted(wanted, decoder.spec.page_size)
    return is_free and decoder.num_running < decoder.spec.max_running


# ---- views -----------------------------------------------------------------------------------------------------


def may_have_hits(request: Request) -> bool:
    """A prompt that shares nothing, and comes for the first time, nobody has."""
    return bool(request.arrival.blocks) or request.attempt > 0


def _num_missing(request: Request, decoder: Decoder) -> int:
    """Less than of a prompt that it has nothing of."""
    return -cached_tokens(decoder, request)


def cached_tokens(instance: Decoder | Prefiller, request: Request) -> int:
    if not may_have_hits(request):
        return 0
    return instance.cached_tokens(request)


def decoder_view(decoder: Decoder, request: Request, hand_over_s: float) -> DecoderView:
    spec, told = decoder.spec, decoder.tell()
    cost, speed = decoder.cost, told.speed
    background = decoder.told_queued("flex")
    return DecoderView(
        uuid=spec.name,
        is_colocated=spec.role == "colocated",
        num_free_pages=max(0, told.num_free_pages),
        page_size=spec.page_size,
        num_running=decoder.num_running,
        max_running=spec.max_running,
        num_queued_tokens=decoder.told_queued("interactive") + background,
        num_background_tokens=background,
        cached_tokens=cached_tokens(decoder, request),
        prefilling=Prefilling(step_s=speed.step_s, rate=speed.rate, chunk_tokens=speed.chunk_tokens)
        if decoder.computes
        else NOT_BY_CHOICE,
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
        num_queued_tokens=prefiller.leases.outstanding_tokens,
        num_background_tokens=prefiller.leases.outstanding_of("flex"),
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
