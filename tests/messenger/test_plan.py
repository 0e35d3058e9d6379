"""The plan against a slow, obvious model: for every byte of every page, where it lies at both ends."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.fabric.interface import Indices, PageReads, Pages, PageWrites
from headrace.kvcache.layout import KVLayout, PoolLayout
from headrace.messenger.aux import aux_bytes
from headrace.messenger.plan import PromptPages, Sharding, TransferPlan, plan_transfer

Byte = tuple[int, int]  # rank, offset in its memory


def pool(kv: KVLayout, num_pages: int) -> PoolLayout:
    return PoolLayout(kv=kv, num_pages=num_pages, num_aux_slots=2, aux_slot_bytes=aux_bytes(num_pages))


def indices(numbers: list[int]) -> Indices:
    return np.array(numbers, dtype=np.int64)


def page_bytes(layout: PoolLayout, rank: int, layer: int, page: int) -> list[Byte]:
    """The model: layers outermost, pages of a layer one behind the other, written out as a reader would say it."""
    size = layout.kv.num_kv_heads * 2 * layout.kv.page_size * layout.kv.head_dim * layout.kv.itemsize
    begin = (layer * layout.num_pages + page) * size
    return [(rank, begin + i) for i in range(size)]


def places(side: Pages, layer: int, length: int) -> list[range]:
    begins = [side.offset + layer * side.layer_stride + int(page) * side.page_stride for page in side.indices]
    return [range(begin, begin + length) for begin in begins]


def copies(writes: PageWrites, src_rank: int, dst_rank: int) -> list[tuple[Byte, Byte]]:
    """Every byte that these writes move: (from, to)."""
    moved = []
    for layer in range(writes.layer_begin, writes.layer_end):
        for src, dst in zip(
            places(writes.src, layer, writes.length), places(writes.dst, layer, writes.length), strict=True
        ):
            moved += [((src_rank, s), (dst_rank, d)) for s, d in zip(src, dst, strict=True)]
    return moved


layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    page_size=st.integers(1, 5),
    head_dim=st.integers(1, 3),
    dtype=st.sampled_from(["bf16", "fp32"]),
)


@st.composite
def tickets(draw: st.DrawFn) -> tuple[Sharding, Sharding, list[int], list[int]]:
    """Both sides, and the page table of a ticket at each."""
    kv, num_ranks = draw(layouts), draw(st.sampled_from([1, 2, 4]))
    num_src, num_dst = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    src_pages = draw(st.lists(st.integers(0, num_src - 1), unique=True, max_size=min(num_src, num_dst)))
    dst_pages = draw(st.permutations(range(num_dst)))[: len(src_pages)]
    src, dst = (
        Sharding(pool=pool(kv, num_src), num_ranks=num_ranks),
        Sharding(pool=pool(kv, num_dst), num_ranks=num_ranks),
    )
    return src, dst, src_pages, list(dst_pages)


@given(tickets())
@settings(max_examples=60)
def test_every_byte_of_the_pages_is_written_once_from_its_own_page_and_nothing_else_is_touched(
    ticket: tuple[Sharding, Sharding, list[int], list[int]],
) -> None:
    src, dst, src_pages, dst_pages = ticket
    plan = plan_transfer(src, dst)
    positions = indices(list(range(len(src_pages))))
    moved: dict[Byte, Byte] = {}
    for route in plan.routes:
        writes = route.writes(src_pages=indices(src_pages), dst_pages=indices(dst_pages), positions=positions)
        for source, target in copies(writes, route.src_rank, route.dst_rank):
            assert target not in moved, f"{target} is written twice"
            moved[target] = source
    wanted: dict[Byte, Byte] = {}
    for rank in range(dst.num_ranks):
        for layer in range(dst.pool.kv.num_layers):
            for s, d in zip(src_pages, dst_pages, strict=True):
                wanted |= zip(page_bytes(dst.pool, rank, layer, d), page_bytes(src.pool, rank, layer, s), strict=True)
    assert moved == wanted
    assert all(offset < dst.pool.pages_bytes for _, offset in moved), "an aux slot is written"


@given(tickets(), st.data())
def test_both_sides_agree_on_the_count_however_the_pages_are_grouped(
    ticket: tuple[Sharding, Sharding, list[int], list[int]], data: st.DataObject
) -> None:
    src, dst, src_pages, dst_pages = ticket
    cuts = sorted(data.draw(st.lists(st.integers(0, len(src_pages)), max_size=3)))
    groups = list(pairwise([0, *cuts, len(src_pages)]))
    plan = plan_transfer(src, dst)
    for rank in range(dst.num_ranks):
        posted = sum(
            route.writes(
                src_pages=indices(src_pages[begin:end]),
                dst_pages=indices(dst_pages[begin:end]),
                positions=indices(list(range(begin, end))),
            ).num_writes
            for route in plan.into(rank)
            for begin, end in groups
        )
        assert plan.num_messages(len(src_pages), rank) == posted + 1


@given(tickets())
def test_the_decoder_hashes_exactly_the_messages_that_the_prefiller_posts(
    ticket: tuple[Sharding, Sharding, list[int], list[int]],
) -> None:
    src, dst, src_pages, dst_pages = ticket
    for route in plan_transfer(src, dst).routes:
        writes = route.writes(
            src_pages=indices(src_pages),
            dst_pages=indices(dst_pages),
            positions=indices(list(range(len(src_pages)))),
        )
        reads: PageReads = route.reads(indices(dst_pages))
        assert (reads.layer_begin, reads.layer_end) == (writes.layer_begin, writes.layer_end)
        assert (reads.length, reads.route) == (writes.length, writes.route)
        assert reads.positions.tolist() == writes.positions.tolist()
        for layer in range(reads.layer_begin, reads.layer_end):
            assert places(reads.pages, layer, reads.length) == places(writes.dst, layer, writes.length)


@pytest.mark.parametrize("num_pages", [1, 100_000])
def test_a_plan_is_as_long_for_a_hundred_thousand_pages_as_for_one(num_pages: int) -> None:
    kv = KVLayout(num_layers=80, num_kv_heads=8, page_size=64, head_dim=128, dtype="bf16")
    side = Sharding(pool=pool(kv, 100_000), num_ranks=4)
    plan = plan_transfer(side, side)
    assert len(plan.routes) == 4
    [route] = plan.into(2)
    pages = np.arange(num_pages, dtype=np.int64)
    writes = route.writes(src_pages=pages, dst_pages=pages, positions=pages)
    assert writes.src.indices is pages, "the page lists are handed on, not expanded"
    assert plan.num_messages(num_pages, 2) == 80 * num_pages + 1


KV = KVLayout(num_layers=2, num_kv_heads=2, page_size=4, head_dim=8, dtype="bf16")


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (4, 2)])
def test_other_numbers_of_ranks_are_refused_by_name(ranks: tuple[int, int]) -> None:
    src, dst = (Sharding(pool=pool(KV, 3), num_ranks=n) for n in ranks)
    with pytest.raises(InputError, match=f"{ranks[0]} and {ranks[1]}") as refusal:
        plan_transfer(src, dst)
    assert refusal.value.field == "num_ranks"


@given(layouts, layouts)
def test_other_layouts_of_a_page_are_refused_by_name(ours: KVLayout, theirs: KVLayout) -> None:
    assume(ours != theirs)
    with pytest.raises(InputError) as refusal:
        plan_transfer(Sharding(pool=pool(ours, 3)), Sharding(pool=pool(theirs, 3)))
    assert refusal.value.field == "kv"


def test_a_rank_that_the_plan_does_not_reach_gets_no_page_messages() -> None:
    plan: TransferPlan = plan_transfer(Sharding(pool=pool(KV, 3)), Sharding(pool=pool(KV, 3)))
    assert plan.into(1) == ()


# ---- which pages travel when -----------------------------------------------------------------------------------


@st.composite
def tiled_prompts(draw: st.DrawFn) -> tuple[PromptPages, int, list[tuple[int, int]]]:
    """A prompt with something to send, the prefiller's hit p, and chunks that tile [p, n-1)."""
    page_size, num_tokens = draw(st.integers(1, 6)), draw(st.integers(2, 50))
    most = (num_tokens - 1) // page_size
    h = page_size * draw(st.integers(0, most))
    assume(h < num_tokens - 1)
    p = page_size * draw(st.integers(0, most))
    cuts = draw(st.lists(st.integers(p, num_tokens - 1), max_size=6))
    bounds = sorted({p, num_tokens - 1, *cuts})
    return PromptPages(num_tokens=num_tokens, cached_len=h, page_size=page_size), p, list(pairwise(bounds))


@given(tiled_prompts())
def test_every_page_is_sent_once_in_the_step_that_completes_it(
    tiled: tuple[PromptPages, int, list[tuple[int, int]]],
) -> None:
    prompt, p, chunks = tiled
    size, prefilled = prompt.page_size, prompt.num_tokens - 1
    sent = list(prompt.present(p))
    assert all((page + 1) * size <= p for page in sent), "sent at once, though not whole in the prefix index"
    for begin, end in chunks:
        pages = prompt.completed_by(begin, end)
        for page in pages:
            complete_at = min((page + 1) * size, prefilled)
            assert begin < complete_at <= end, f"page {page} is complete at {complete_at}, not in [{begin}, {end})"
        sent += pages
    obvious = [page for page in range(-(-prefilled // size)) if page * size >= prompt.cached_len]
    assert sorted(sent) == obvious
    assert list(prompt.sent) == obvious
    assert prompt.num_sent == len(obvious)
    assert prompt.first == obvious[0]


@pytest.mark.parametrize(
    ("h", "p", "at_once"),
    [(0, 0, []), (0, 8, [0, 1]), (4, 8, [1]), (8, 4, []), (8, 8, []), (4, 12, [1, 2])],
)
def test_only_what_the_prefiller_has_and_the_decoder_lacks_is_sent_at_once(h: int, p: int, at_once: list[int]) -> None:
    assert list(PromptPages(num_tokens=13, cached_len=h, page_size=4).present(p)) == at_once
