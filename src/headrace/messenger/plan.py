"""The transfer plan: which bytes of which page go from where to where. One pure function used by both sides.

The prefiller posts exactly the messages of the plan, the decoder counts exactly these; neither tells the other. A
plan is a handful of routes, each a strided copy that holds for every page, so its cost does not grow with the prompt:

    page position  0 .. h/page_size | h/page_size .. p/page_size | .. ceil((n-1)/page_size)
                   decoder has it   | prefiller has it:          | computed: sent in the step
                   never sent       | sent at once               | that completes the page

Equal sharding is one route a rank, whole pages. Other shardings add routes (head ranges, replica sets), not shapes.
"""

from dataclasses import dataclass

import numpy as np

from headrace.errors import InputError
from headrace.fabric.interface import Indices, PageReads, Pages, PageWrites
from headrace.kvcache.layout import PoolLayout, num_pages_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """One side of a transfer: the pool of each rank (all alike) and the number of ranks."""

    pool: PoolLayout
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """For every page and every layer in [layer_begin, layer_end): one message of `length` bytes."""

    src_rank: int
    dst_rank: int
    route: int  # number of the route, part of the message's hash seed
    layer_begin: int
    layer_end: int
    src_offset: int
    src_layer_stride: int
    src_page_stride: int
    dst_offset: int
    dst_layer_stride: int
    dst_page_stride: int
    length: int

    @property
    def messages_per_page(self) -> int:
        return self.layer_end - self.layer_begin

    def writes(self, *, src_pages: Indices, dst_pages: Indices, positions: Indices) -> PageWrites:
        """The prefiller's half: what to post for these pages (all three `[num_pages] int64`, aligned)."""
        return PageWrites(
            src=Pages(
                offset=self.src_offset,
                layer_stride=self.src_layer_stride,
                page_stride=self.src_page_stride,
                indices=src_pages,
            ),
            dst=self._landing(dst_pages),
            positions=positions,
            layer_begin=self.layer_begin,
            layer_end=self.layer_end,
            length=self.length,
            route=self.route,
        )

    def reads(self, dst_pages: Indices) -> PageReads:
        """The decoder's half: where the messages of a ticket's pages landed."""
        return PageReads(
            pages=self._landing(dst_pages),
            positions=np.arange(len(dst_pages), dtype=np.int64),
            layer_begin=self.layer_begin,
            layer_end=self.layer_end,
            length=self.length,
            route=self.route,
        )

    def _landing(self, dst_pages: Indices) -> Pages:
        return Pages(
            offset=self.dst_offset,
            layer_stride=self.dst_layer_stride,
            page_stride=self.dst_page_stride,
            indices=dst_pages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    routes: tuple[Route, ...]

    def into(self, dst_rank: int) -> tuple[Route, ...]:
        return tuple(route for route in self.routes if route.dst_rank == dst_rank)

    def num_messages(self, num_pages: int, dst_rank: int) -> int:
        """What dst_rank's counter must reach for num_pages pages: the page messages and the aux write."""
        return num_pages * sum(route.messages_per_page for route in self.into(dst_rank)) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a prefiller writes: a decoder's pool, and the plan into it."""

    pool: PoolLayout
    plan: TransferPlan


def plan_transfer(src: Sharding, dst: Sharding) -> TransferPlan:
    """The routes from every rank of `src` to every rank of `dst`.

    Raises InputError where the two cannot exchange pages: another layout of a page, or other ranks (only equal
    sharding is planned so far).
    """
    if src.num_ranks != dst.num_ranks:
        raise InputError(
            "num_ranks", f"source and destination must be sharded alike, are {src.num_ranks} and {dst.num_ranks}"
        )
    if src.pool.kv != dst.pool.kv:
        raise InputError("kv", f"pages must be laid out alike, are {src.pool.kv} and {dst.pool.kv}")
    kv = src.pool.kv
    return TransferPlan(
        routes=tuple(
            Route(
                src_rank=rank,
                dst_rank=rank,
                route=0,
                layer_begin=0,
                layer_end=kv.num_layers,
                src_offset=src.pool.page_offset(0, 0),
                src_layer_stride=src.pool.layer_stride,
                src_page_stride=kv.page_bytes,
                dst_offset=dst.pool.page_offset(0, 0),
                dst_layer_stride=dst.pool.layer_stride,
                dst_page_stride=kv.page_bytes,
                length=kv.page_bytes,
            )
            for rank in range(src.num_ranks)
        )
    )


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
