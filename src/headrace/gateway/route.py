"""Which decoder a request is offered to, and which prefiller computes its prompt. Pure: views in, a decision out.

The views are estimates, half a second old at most: the decoder alone reserves pages, and may say NoRoom.

Who decodes: with room for prompt and growth, whoever runs the fewest requests; where nobody has room, whoever has the
most free pages. Who prefills: whoever has the fewest prompt tokens queued; the decoder itself, when no prefiller is
alive that could hold the prompt, when it is colocated, or when there is nothing to compute before its first decode
query.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kvcache.layout import num_pages_for
from headrace.protocol.messages import Uuid

GROWTH_TOKENS = 64
"""What a decoder reserves beyond the prompt before it knows better (PROTOCOL, "Growth")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderView:
    """A decoder or colocated instance that is alive."""

    uuid: Uuid
    is_colocated: bool = False
    num_free_pages: int
    page_size: int
    num_running: int
    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillerView:
    """A prefiller that is alive. `max_tokens` is the longest prompt that it could hold."""

    uuid: Uuid
    num_queued_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`num_tokens` is everything known: the prompt, and what was generated before. `max_tokens` more may come."""

    num_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """`prefiller` None: the decoder prefills by itself."""

    decoder: Uuid
    prefiller: Uuid | None


def route(decoders: Sequence[DecoderView], prefillers: Sequence[PrefillerView], wanted: Wanted) -> Route | None:
    """None when no decoder is alive."""
    if not decoders:
        return None
    decoder = min(decoders, key=lambda view: _preference(view, wanted))
    here = decoder.is_colocated or wanted.num_tokens == 1
    return Route(decoder=decoder.uuid, prefiller=None if here else choose_prefiller(prefillers, wanted))


def choose_prefiller(prefillers: Sequence[PrefillerView], wanted: Wanted) -> Uuid | None:
    """None when none is alive that could hold the prompt."""
    able = [view for view in prefillers if view.max_tokens >= wanted.num_tokens]
    chosen = min(able, key=lambda view: (view.num_queued_tokens, view.uuid), default=None)
    return None if chosen is None else chosen.uuid


def num_pages_wanted(wanted: Wanted, page_size: int) -> int:
    """What a decoder will probably reserve."""
    return num_pages_for(wanted.num_tokens + min(wanted.max_tokens, GROWTH_TOKENS), page_size)


def _preference(view: DecoderView, wanted: Wanted) -> tuple[bool, int, int, str]:
    """Smaller is better; the uuid makes it a total order."""
    has_room = view.num_free_pages >= num_pages_wanted(wanted, view.page_size) and view.num_running < view.max_running
    if has_room:
        return False, view.num_running, -view.num_free_pages, view.uuid
    return True, -view.num_free_pages, view.num_running, view.uuid
