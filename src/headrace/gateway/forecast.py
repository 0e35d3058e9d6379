"""What is predicted of a request before it runs, and where it would break what others were promised. Pure: views in,
seconds out; the planner asks the same functions.

Everything is told from what was measured. Where nothing was, there is no prediction (None), and nobody waits or is
refused for one. The time to the first token, from now:

    the line       prompt tokens before it, at the rate of all who compute prompts; or, where that is longer,
    room           while no decoder has any: so many ends of streams as there are requests before it, and one
    its own way    `route.Price`: wait, prefill, transfer, hand-over

The time of a further token is that of a decode step with all who run at a decoder and this one: the same for them all.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import msgspec
from msgspec.structs import replace

from headrace.gateway.route import (
    NOT_BY_CHOICE,
    NOTHING_MEASURED,
    DecoderView,
    Pair,
    PrefillerView,
    TransferCost,
    Wanted,
    num_pages_wanted,
    route,
)

ANY_PAGES = 2**40
"""More than a request wants."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """As it stands for one request. `stay_s`: how long a request is at its decoder, on average. `tpot_s`: what all of
    its tier are promised, so that a decoder has no room for one that would break it."""

    decoders: Sequence[DecoderView]
    prefillers: Sequence[PrefillerView]
    transfers: Mapping[Pair, TransferCost] = msgspec.field(default_factory=lambda: NOTHING_MEASURED)
    stay_s: float | None = None
    tpot_s: float | None = None


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """Who is before a request in the gateway's line."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts


NOBODY = Ahead()


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; None: not to be told."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """To interactive requests at a decoder. `has_budget`: any at all, for which one that comes must find room.
    `is_due`: one of them is there now."""

    tpot_s: float | None = None
    has_budget: bool = False
    is_due: bool = False


# ---- what a request will find ----------------------------------------------------------------------------------


def forecast(fleet: Fleet, wanted: Wanted, ahead: Ahead = NOBODY) -> Forecast:
    """At the best of the decoders."""
    chosen = route(fleet.decoders, fleet.prefillers, wanted, fleet.transfers)
    if chosen is None:
        return Forecast()
    rate = prefill_rate(fleet)
    paces = [pace for view in fleet.decoders if (pace := pace_with(view, wanted.num_tokens)) is not None]
    wait_s = 0.0 if rate is None else max(ahead.num_tokens / rate, room_s(fleet, wanted, ahead))
    return Forecast(
        ttft_s=None if rate is None else wait_s + chosen.price.ttft_s,
        tpot_s=min(paces, default=None),
    )


def idle(fleet: Fleet) -> Fleet:
    """The same with nothing to do, and all of its room."""
    return replace(
        fleet,
        decoders=[_idle_decoder(view) for view in fleet.decoders],
        prefillers=[replace(view, num_queued_tokens=0, num_background_tokens=0) for view in fleet.prefillers],
    )


def prefill_rate(fleet: Fleet) -> float | None:
    """Tokens a second, of all who compute prompts: prefillers, or where there are none the decoders. One that has not
    measured counts as the fastest. None: nobody has."""
    views: Sequence[DecoderView | PrefillerView] = fleet.prefillers or fleet.decoders
    known = [view.prefilling.rate for view in views if view.prefilling is not None and view.prefilling.rate > 0]
    if not known:
        return None
    num_unknown = sum(view.prefilling is None for view in views)
    return sum(known) + num_unknown * max(known)


def room_s(fleet: Fleet, wanted: Wanted, ahead: Ahead) -> float:
    """Until a decoder has room for it. Those before it are taken for requests of its own size."""
    num_running = sum(view.num_running for view in fleet.decoders)
    if fleet.stay_s is None or not num_running:
        return 0.0
    num_ends = ahead.num_requests + 1 - sum(_num_fitting(view, wanted, fleet.tpot_s) for view in fleet.decoders)
    return max(0.0, num_ends * fleet.stay_s / num_running)


def pace_with(view: DecoderView, num_tokens: int, num_more: int = 1) -> float | None:
    """Seconds of a decode step there, with so many requests more of `num_tokens`. None: not measured."""
    told = view.decoding
    if told is None:
        return None
    num_keys = told.num_keys + num_more * num_tokens
    return told.step_s + told.row_s * (told.num_rows + num_more) + told.key_s * num_keys


def _num_fitting(view: DecoderView, wanted: Wanted, tpot_s: float | None) -> float:
    """How many such requests there is room for."""
    by_pages = view.num_free_pages // num_pages_wanted(wanted, view.page_size)
    by_rows = view.max_running - view.num_running
    return max(0, min(by_pages, by_rows, _num_in_time(view, wanted.num_tokens, tpot_s)))


def _num_in_time(view: DecoderView, num_tokens: int, tpot_s: float | None) -> float:
    """How many such requests keep this pace. One runs in any case."""
    now_s = pace_with(view, num_tokens, 0)
    if now_s is None or tpot_s is None or view.decoding is None:
        return inf
    each_s = view.decoding.row_s + view.decoding.key_s * num_tokens
    num_more = (tpot_s - now_s) // each_s if each_s > 0 else (inf if now_s <= tpot_s else 0)
    return max(num_more, 0 if view.num_running else 1)


def _idle_decoder(view: DecoderView) -> DecoderView:
    told = view.decoding
    if told is not None:
        told = replace(told, num_rows=0, num_keys=0, num_interactive=0)
    return replace(
        view, num_free_pages=ANY_PAGES, num_running=0, num_queued_tokens=0, num_background_tokens=0, decoding=told
    )


# ---- what others were promised ---------------------------------------------------------------------------------


def kept_by(fleet: Fleet, wanted: Wanted, promise: Callable[[DecoderView], Promise]) -> list[DecoderView]:
    """Decoders that keep their pace with this request there: that of its own tier; and where it is background work,
    what is promised to interactive requests, with room for one of them more, whenever it comes.

    Its prompt may be computed only where a step with a chunk of it keeps that too, as long as somebody interactive is
    there. One that is alone at a decoder may always run: so nothing starves where there is nothing to do."""
    kept = [view for view in fleet.decoders if _keeps(view, wanted, fleet.tpot_s)]
    if wanted.tier == "interactive":
        return kept
    is_able = any(view.max_tokens >= wanted.num_tokens for view in fleet.prefillers)
    beside = []
    for view in kept:
        promised = promise(view)
        if not (_keeps(view, wanted, promised.tpot_s, num_more=2) and _leaves_room(view, wanted, promised)):
            continue
        if _chunks_keep(view, wanted, promised):
            beside.append(view)
        elif is_able and not view.is_colocated:
            beside.append(_without_chunks(view))
    return beside


def _keeps(view: DecoderView, wanted: Wanted, tpot_s: float | None, num_more: int = 1) -> bool:
    if tpot_s is None or not view.num_running:
        return True
    pace_s = pace_with(view, wanted.num_tokens, num_more)
    return pace_s is None or pace_s <= tpot_s


def _leaves_room(view: DecoderView, wanted: Wanted, promised: Promise) -> bool:
    """For one interactive request of the same size."""
    if not promised.has_budget or not view.num_running:
        return True
    num_pages = 2 * num_pages_wanted(wanted, view.page_size)
    return view.num_free_pages >= num_pages and view.max_running - view.num_running >= 2


def _chunks_keep(view: DecoderView, wanted: Wanted, promised: Promise) -> bool:
    """Steps with chunks of its prompt."""
    speed, num_missing = view.prefilling, wanted.num_prefilled - view.cached_tokens
    if promised.tpot_s is None or not promised.is_due or speed is None or num_missing <= 0:
        return True
    if not speed.rate or not speed.chunk_tokens:
        return speed.rate > 0
    whole_s = speed.chunk_tokens / speed.rate
    share = min(1.0, num_missing / speed.chunk_tokens)
    return speed.step_s + share * (whole_s - speed.step_s) <= promised.tpot_s


def _without_chunks(view: DecoderView) -> DecoderView:
    """`route` lets it compute no prompt by choice."""
    return replace(view, prefilling=NOT_BY_CHOICE)
