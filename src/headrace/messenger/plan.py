"""The transfer plan: which bytes of which page go from where to where. One pure function used by both sides.

The prefiller posts exactly the messages of the plan, the decoder counts exactly these; neither tells the other. A
plan is a handful of routes, each a strided copy that holds for every page, so its cost does not grow with the prompt.
A route carries the heads that a source rank and a destination rank both hold; 4 heads, two ways:

    tp 2 -> tp 4    rank 0: heads 0 1 --> rank 0, rank 1       tp 4 -> tp 2    rank 0: head 0 --> rank 0: first half
                    rank 1: heads 2 3 --> rank 2, rank 3                       rank 1: head 1 --> rank 0: second half ..

Ranks that hold the same heads (fewer heads than ranks; a latent, which every rank holds) form replica sets, each with
one full copy. Of S source sets, destination set j reads set (j + seed) mod S: with as many destination sets, or a
multiple, all send alike in every request; with fewer, only some do, and all alike over the requests.

Which page travels when:

    page position  0 .. h/page_size | h/page_size .. p/page_size | .. ceil((n-1)/page_size)
                   decoder has it   | prefiller has it:          | computed: sent in the step
                   never sent       | sent at once               | that completes the page
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.errors import InputError
from headrace.fabric.interface import Indices, PageReads, Pages, PageWrites
from headrace.kvcache.layout import LayerGroup, PoolLayout, num_pages_for
from headrace.kvcache.sharding import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a transfer: who holds which heads, and where in the memory."""

    sharding: Sharding
    pool: PoolLayout

    def __post_init__(self) -> None:
        pool = self.pool
        of_sharding = self.sharding.pool(
            num_pages=pool.num_pages, num_aux_slots=pool.num_aux_slots, aux_slot_bytes=pool.aux_slot_bytes
        )
        if pool != of_sharding:
            raise InputError("pool", f"must be that of its sharding, {of_sharding}, is {pool}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """Where one side's part of a route's pages begins, and how far layers and pages are apart."""

    offset: int
    layer_stride: int
    page_stride: int

    def of(self, pages: Indices) -> Pages:
        return Pages(offset=self.offset, layer_stride=self.layer_stride, page_stride=self.page_stride, indices=pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """For every page and every one of `layers`: one message of `length` bytes."""

    src_rank: int
    dst_rank: int
    route: int  # number of the route, part of the message's hash seed
    layers: range
    src: Strided
    dst: Strided
    length: int

    @property
    def messages_per_page(self) -> int:
        return len(self.layers)

    def writes(self, *, src_pages: Indices, dst_pages: Indices, positions: Indices) -> PageWrites:
        """The prefiller's half: what to post for these pages (all three `[num_pages] int64`, aligned)."""
        return PageWrites(
            src=self.src.of(src_pages),
            dst=self.dst.of(dst_pages),
            positions=positions,
            layer_begin=self.layers.start,
            layer_end=self.layers.stop,
            length=self.length,
            route=self.route,
        )

    def reads(self, dst_pages: Indices, positions: Indices) -> PageReads:
        """The decoder's half: where the messages of a ticket's pages landed."""
        return PageReads(
            pages=self.dst.of(dst_pages),
            positions=positions,
            layer_begin=self.layers.start,
            layer_end=self.layers.stop,
            length=self.length,
            route=self.route,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Of one ticket."""

    routes: tuple[Route, ...]

    def num_messages(self, num_pages: int) -> int:
        """What the ticket's counter must reach for num_pages pages: the page messages and the aux write."""
        return num_pages * sum(route.messages_per_page for route in self.routes) + 1

    def bytes_of(self, num_pages: int) -> Counter[int]:
        """What each source rank sends of num_pages pages."""
        sent: Counter[int] = Counter()
        for route in self.routes:
            sent[route.src_rank] += num_pages * route.messages_per_page * route.length
        return sent


class Plans:
    """The plans from `src` to `dst`, each made when the first ticket needs it: one for each destination group and each
    rotation of the source's replica sets, whose number divides its ranks. Raises InputError where the two cannot
    exchange pages."""

    def __init__(self, src: Side, dst: Side) -> None:
        _require_alike(src.sharding, dst.sharding)
        self.src = src
        self.dst = dst
        self._made: dict[tuple[int, int], TransferPlan] = {}

    def of(self, *, group: int, seed: int) -> TransferPlan:
        key = (group, seed % self.src.sharding.tp)
        if key not in self._made:
            self._made[key] = plan_transfer(self.src, self.dst, group=group, seed=seed)
        return self._made[key]


def plan_transfer(src: Side, dst: Side, *, group: int, seed: int) -> TransferPlan:
    """The routes from `src` to the ranks of `dst`'s data-parallel `group`, for a ticket with this `seed`.

    Raises InputError where there is no such group, or the two cannot exchange pages. Two shardings of the same heads
    always can: each divides the heads evenly, so any two ranks have one range of them in common, or none.
    """
    _require_alike(src.sharding, dst.sharding)
    if not 0 <= group < dst.sharding.dp:
        raise InputError("group", f"must be in 0..{dst.sharding.dp - 1}, is {group}")
    routes: list[Route] = []
    layer_groups = zip(src.sharding.groups, dst.sharding.groups, src.pool.groups, dst.pool.groups, strict=True)
    for src_heads, dst_heads, src_layers, dst_layers in layer_groups:
        head_bytes = src_heads.kv.head_bytes
        for src_place, dst_place, heads in _common_heads(src_heads, dst_heads, seed):
            src_rank, dst_rank = src_heads.rank(0, src_place), dst_heads.rank(group, dst_place)
            src_begin = (heads.start - src_heads.heads_of(src_place).start) * head_bytes
            dst_begin = (heads.start - dst_heads.heads_of(dst_place).start) * head_bytes
            routes.append(
                Route(
                    src_rank=src_rank,
                    dst_rank=dst_rank,
                    route=len(routes),
                    layers=src_layers.layers,
                    src=_strided(src.pool, src_layers, src_rank, src_begin),
                    dst=_strided(dst.pool, dst_layers, dst_rank, dst_begin),
                    length=len(heads) * head_bytes,
                )
            )
    return TransferPlan(routes=tuple(routes))


def _require_alike(src: Sharding, dst: Sharding) -> None:
    ours, theirs = (src.kv, *src.further), (dst.kv, *dst.further)
    if ours != theirs:
        raise InputError("kv", f"must be the same model's on both sides, are {ours} and {theirs}")
    if src.dp != 1:
        raise InputError("dp", f"must be 1 at the source, where a prompt is on all ranks, is {src.dp}")


def _common_heads(src: Sharding, dst: Sharding, seed: int) -> Iterator[tuple[int, int, range]]:
    """(source place, destination place, heads): each destination's heads in order, from ranks of one replica set."""
    num_held = src.local.num_kv_heads
    for dst_place in range(dst.tp):
        replica = (dst_place % dst.num_replicas + seed) % src.num_replicas
        wanted = dst.heads_of(dst_place)
        for shard in range(wanted.start // num_held, (wanted.stop - 1) // num_held + 1):
            src_place = shard * src.num_replicas + replica
            held = src.heads_of(src_place)
            yield src_place, dst_place, range(max(held.start, wanted.start), min(held.stop, wanted.stop))


def _strided(pool: PoolLayout, group: LayerGroup, rank: int, begin: int) -> Strided:
    """From byte `begin` of each page on. Layers are counted from 0 through all groups: so is the offset."""
    at = pool.page_offset(group.layers.start, 0, rank) - group.layers.start * group.layer_stride
    return Strided(offset=at + begin, layer_stride=group.layer_stride, page_stride=group.kv.page_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPages:
    """Which pages of a prompt travel when. A prompt of n tokens prefills n - 1: the last one is the first query."""

    num_tokens: int  # n
    cached_len: int  # h, the decoder's hit, a multiple of page_size
    page_size: int

    @property
    def num_prefilled(self) -> int:
        return self.num_tokens - 1

    @property
    def first(self) -> int:
        """The first page that is sent; its position in the ticket is 0."""
        return self.cached_len // self.page_size

    @property
    def end(self) -> int:
        return num_pages_for(self.num_prefilled, self.page_size)

    @property
    def sent(self) -> range:
        """Page numbers in [h, n-1)."""
        return range(self.first, self.end)

    @property
    def num_sent(self) -> int:
        return self.end - self.first

    def present(self, prefiller_cached_len: int) -> range:
        """Page numbers in [h, p): in no step, sent at once. `prefiller_cached_len` is p, a multiple of page_size."""
        return range(self.first, max(self.first, prefiller_cached_len // self.page_size))

    def completed_by(self, begin: int, end: int) -> range:
        """Page numbers that the chunk of tokens [begin, end) completes, without those below h: each page of the
        prompt is completed by exactly one of the chunks that tile [p, n-1); the tail page by the last."""
        last = self.end if end == self.num_prefilled else end // self.page_size
        return range(max(self.first, begin // self.page_size), max(self.first, last))
