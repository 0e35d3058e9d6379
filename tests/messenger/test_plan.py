"""The plan against a slow, obvious model: what each byte of each page is of, and who must hold it after a ticket.

A byte is of a part of the page: (layer, head, place within the head's K and V). The model writes down which byte of
which rank holds which part, at both ends; a plan is right when it carries each part of each page of the ticket from
some rank that has it to every rank that wants it, once, and touches nothing else.
"""

import random
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.fabric.interface import Indices, Pages, PageWrites
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.sharding import Sharding
from headrace.messenger.aux import aux_bytes
from headrace.messenger.plan import Plans, PromptPages, Side, TransferPlan, plan_transfer

Part = tuple[int, int, int, int]  # page, layer, head, byte


def side(sharding: Sharding, num_pages: int) -> Side:
    pool = sharding.pool(num_pages=num_pages, num_aux_slots=2, aux_slot_bytes=aux_bytes(num_pages))
    return Side(sharding=sharding, pool=pool)


def indices(numbers: list[int]) -> Indices:
    return np.array(numbers, dtype=np.int64)


def parts_of(who: Side, group: int) -> dict[int, Part]:
    """The model: what the byte at each offset is of, on the ranks of a group. Ranks one behind the other, each from a
    huge page on; layers outermost, pages of a layer one behind the other, then heads."""
    sharding, held = who.sharding, {}
    layers = [kv for kv in (sharding.kv, *sharding.further) for _ in range(kv.num_layers)]
    for place in range(sharding.tp):
        at = who.pool.rank_stride * (group * sharding.tp + place)
        for layer, kv in enumerate(layers):
            first = place * kv.num_kv_heads // sharding.tp
            own = range(first, first + max(1, kv.num_kv_heads // sharding.tp))
            head_bytes = (1 if kv.kind == "mla" else 2) * kv.page_size * kv.head_dim * kv.itemsize
            for part in product(range(who.pool.num_pages), [layer], own, range(head_bytes)):
                held[at] = part
                at += 1
    return held


def places(pages: Pages, layer: int, length: int) -> list[range]:
    begins = [pages.offset + layer * pages.layer_stride + int(page) * pages.page_stride for page in pages.indices]
    return [range(begin, begin + length) for begin in begins]


def messages(writes: PageWrites) -> list[tuple[int, range, range]]:
    """(layer, from, to), in the order in which they are posted."""
    return [
        (layer, src, dst)
        for layer in range(writes.layer_begin, writes.layer_end)
        for src, dst in zip(
            places(writes.src, layer, writes.length), places(writes.dst, layer, writes.length), strict=True
        )
    ]


kv_layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 3),
    num_kv_heads=st.sampled_from([1, 2, 3, 4, 6, 12]),
    page_size=st.just(2),
    head_dim=st.integers(1, 2),
    dtype=st.sampled_from(["bf16", "fp32"]),
) | st.builds(
    KVLayout,
    num_layers=st.integers(1, 3),
    num_kv_heads=st.just(1),
    page_size=st.just(2),
    head_dim=st.integers(1, 3),
    dtype=st.just("bf16"),
    kind=st.just("mla"),
)


def degrees(*layers: KVLayout) -> st.SearchStrategy[int]:
    """Tensor-parallel degrees that can share all these heads."""
    heads = [kv.num_kv_heads for kv in layers]
    return st.sampled_from([tp for tp in range(1, 13) if all(h % tp == 0 or tp % h == 0 for h in heads)])


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Side, Side, int, int]:
    """Both sides, the destination's group, the ticket's seed."""
    kv = draw(kv_layouts)
    further = tuple(draw(st.lists(kv_layouts, max_size=2)))
    num_src, num_dst = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dp = draw(st.integers(1, 2))
    src = Sharding(kv=kv, further=further, tp=draw(degrees(kv, *further)))
    dst = Sharding(kv=kv, further=further, tp=draw(degrees(kv, *further)), dp=dp)
    return side(src, num_src), side(dst, num_dst), draw(st.integers(0, dp - 1)), draw(st.integers(0, 2**32 - 1))


@st.composite
def tickets(draw: st.DrawFn) -> tuple[Side, Side, int, TransferPlan, list[int], list[int]]:
    """Also a plan, and the page table of a ticket at each side."""
    src, dst, group, seed = draw(exchanges())
    most = min(src.pool.num_pages, dst.pool.num_pages)
    src_pages = draw(st.permutations(range(src.pool.num_pages)))[: draw(st.integers(0, most))]
    dst_pages = draw(st.permutations(range(dst.pool.num_pages)))[: len(src_pages)]
    return src, dst, group, plan_transfer(src, dst, group=group, seed=seed), list(src_pages), list(dst_pages)


def all_writes(plan: TransferPlan, src_pages: list[int], dst_pages: list[int]) -> list[PageWrites]:
    positions = indices(list(range(len(src_pages))))
    return [
        route.writes(src_pages=indices(src_pages), dst_pages=indices(dst_pages), positions=positions)
        for route in plan.routes
    ]


@given(tickets())
@settings(max_examples=60, deadline=None)
def test_every_byte_that_a_rank_is_to_hold_comes_once_from_a_rank_that_has_it_and_no_other_is_touched(
    ticket: tuple[Side, Side, int, TransferPlan, list[int], list[int]],
) -> None:
    src, dst, group, plan, src_pages, dst_pages = ticket
    has, wants = parts_of(src, 0), parts_of(dst, group)
    came: dict[int, Part] = {}
    for writes in all_writes(plan, src_pages, dst_pages):
        for layer, source, target in messages(writes):
            for at_source, at_target in zip(source, target, strict=True):
                assert at_target not in came, f"byte {at_target} is written twice"
                came[at_target] = has[at_source]
                assert has[at_source][1] == layer, "a layer's message has another layer's bytes"
    page_at = dict(zip(src_pages, dst_pages, strict=True))
    assert {at: (page_at[page], *part) for at, (page, *part) in came.items()} == {
        at: part for at, part in wants.items() if part[0] in dst_pages
    }


@given(exchanges())
def test_only_ranks_of_one_replica_set_send_to_a_rank_and_routes_say_who_they_are(
    exchange: tuple[Side, Side, int, int],
) -> None:
    src, dst, group, seed = exchange
    plan = plan_transfer(src, dst, group=group, seed=seed)
    assert [route.route for route in plan.routes] == list(range(len(plan.routes)))
    layers = [kv.num_layers for kv in (src.sharding.kv, *src.sharding.further)]
    ends = np.cumsum(layers)
    for route in plan.routes:
        which = int(np.searchsorted(ends, route.layers.start, side="right"))
        assert route.layers == range(int(ends[which]) - layers[which], int(ends[which]))
        held, wanted = src.sharding.groups[which], dst.sharding.groups[which]
        place = route.dst_rank - group * wanted.tp
        assert 0 <= place < wanted.tp
        replica = (place % wanted.num_replicas + seed) % held.num_replicas
        assert route.src_rank % held.num_replicas == replica


@given(tickets(), st.data())
@settings(deadline=None)
def test_both_sides_agree_on_count_and_messages_however_the_pages_are_grouped(
    ticket: tuple[Side, Side, int, TransferPlan, list[int], list[int]], data: st.DataObject
) -> None:
    _, _, _, plan, src_pages, dst_pages = ticket
    cuts = sorted(data.draw(st.lists(st.integers(0, len(src_pages)), max_size=3)))
    posted: set[tuple[int, int, int, int, int]] = set()
    num_posted = 0
    for begin, end in pairwise([0, *cuts, len(src_pages)]):
        for route in plan.routes:
            writes = route.writes(
                src_pages=indices(src_pages[begin:end]),
                dst_pages=indices(dst_pages[begin:end]),
                positions=indices(list(range(begin, end))),
            )
            num_posted += writes.num_writes
            posted |= seeds_and_places(writes.dst, writes.positions, writes)
    assert plan.num_messages(len(src_pages)) == num_posted + 1
    expected: set[tuple[int, int, int, int, int]] = set()
    for route in plan.routes:
        reads = route.reads(indices(dst_pages), indices(list(range(len(dst_pages)))))
        expected |= seeds_and_places(reads.pages, reads.positions, reads)
    assert posted == expected
    assert len(posted) == num_posted, "two messages have one seed"


def seeds_and_places(pages: Pages, positions: Indices, of: object) -> set[tuple[int, int, int, int, int]]:
    """(position, layer, route, where, how long)"""
    begin, end, length, route = (getattr(of, name) for name in ("layer_begin", "layer_end", "length", "route"))
    return {
        (int(position), layer, route, place.start, length)
        for layer in range(begin, end)
        for position, place in zip(positions, places(pages, layer, length), strict=True)
    }


# ---- who sends how much ----------------------------------------------------------------------------------------


def kv_of(heads: int, kind: str = "gqa") -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=heads, page_size=4, head_dim=8, dtype="bf16", kind=kind)  # type: ignore[arg-type]


def sent(src: Side, dst: Side, seed: int) -> list[int]:
    """Bytes of one page, by source rank."""
    sent_by = plan_transfer(src, dst, group=0, seed=seed).bytes_of(1)
    return [sent_by[rank] for rank in range(src.pool.num_ranks)]


@given(exchanges())
def test_all_source_ranks_send_alike_in_every_request_where_destination_sets_are_a_multiple_of_their_sets(
    exchange: tuple[Side, Side, int, int],
) -> None:
    src, dst, _, seed = exchange
    for held, wanted in zip(src.sharding.groups, dst.sharding.groups, strict=True):
        assume(wanted.num_replicas % held.num_replicas == 0)
    assert len(set(sent(src, dst, seed))) == 1


@pytest.mark.parametrize(
    ("kv", "src_tp", "dst_tp", "num_senders"),
    [
        (kv_of(1, "mla"), 8, 1, 1),  # a data-parallel decoder: one rank reads one rank
        (kv_of(1, "mla"), 8, 2, 2),
        (kv_of(1, "mla"), 3, 2, 2),
        (kv_of(2), 8, 2, 2),
        (kv_of(2), 8, 4, 4),
        (kv_of(4), 8, 1, 4),
        (kv_of(4), 8, 4, 4),
    ],
)
def test_with_fewer_destination_sets_some_ranks_send_and_all_send_alike_over_the_requests(
    kv: KVLayout, src_tp: int, dst_tp: int, num_senders: int
) -> None:
    src, dst = side(Sharding(kv=kv, tp=src_tp), 3), side(Sharding(kv=kv, tp=dst_tp), 3)
    plans, rng, num_requests = Plans(src, dst), random.Random(7), 2000
    chosen: Counter[tuple[int, ...]] = Counter()
    amounts: set[int] = set()
    for _ in range(num_requests):
        sent_by = plans.of(group=0, seed=rng.getrandbits(32)).bytes_of(1)
        assert len(sent_by) == num_senders
        amounts.update(sent_by.values())
        chosen[tuple(sorted(sent_by))] += 1
    assert len(amounts) == 1, "those that send in a request send alike"
    assert len(set(Counter(rank for senders in chosen for rank in senders).values())) == 1
    assert {rank for senders in chosen for rank in senders} == set(range(src_tp))
    expected = num_requests / len(chosen)
    chi_square = sum((times - expected) ** 2 / expected for times in chosen.values())
    assert chi_square < {2: 10.8, 3: 13.8, 4: 16.3, 8: 24.3}[len(chosen)], f"p < 0.001: {chosen}"


@pytest.mark.parametrize("num_nics", [2, 3, 4])
@pytest.mark.parametrize(("heads", "src_tp", "dst_tp"), [(8, 2, 8), (8, 8, 2), (12, 4, 6), (1, 1, 4), (1, 4, 1)])
def test_nics_taken_in_turns_carry_alike_within_a_message_of_each_layer_and_route(
    heads: int, src_tp: int, dst_tp: int, num_nics: int
) -> None:
    """The fabric gives each write to a peer the next pair of NICs, layer by layer and record by record."""
    src, dst = side(Sharding(kv=kv_of(heads), tp=src_tp), 9), side(Sharding(kv=kv_of(heads), tp=dst_tp), 9)
    plan = plan_transfer(src, dst, group=0, seed=3)
    carried = [0] * num_nics
    turn, slack = 0, 0
    for layer in range(kv_of(heads).num_layers):
        for writes in all_writes(plan, list(range(7)), list(range(2, 9))):
            for _ in [each for each in messages(writes) if each[0] == layer]:
                carried[turn % num_nics] += writes.length
                turn += 1
            slack += writes.length
            assert max(carried) - min(carried) <= slack
    lengths = {route.length for route in plan.routes}
    if len(lengths) == 1:
        assert max(carried) - min(carried) <= lengths.pop()


# ---- how much a plan costs, what is refused --------------------------------------------------------------------


@pytest.mark.parametrize("num_pages", [1, 100_000])
def test_a_plan_is_as_long_for_a_hundred_thousand_pages_as_for_one(num_pages: int) -> None:
    kv = KVLayout(num_layers=61, num_kv_heads=8, page_size=64, head_dim=128, dtype="bf16")
    plan = plan_transfer(side(Sharding(kv=kv, tp=4), 100_000), side(Sharding(kv=kv, tp=8), 100_000), group=0, seed=1)
    assert len(plan.routes) == 8
    pages = np.arange(num_pages, dtype=np.int64)
    for route in plan.routes:
        writes = route.writes(src_pages=pages, dst_pages=pages, positions=pages)
        reads = route.reads(pages, pages)
        assert writes.src.indices is writes.dst.indices is reads.pages.indices is pages, "handed on, not expanded"
    assert plan.num_messages(num_pages) == 8 * 61 * num_pages + 1


def test_equal_shardings_are_whole_pages_from_each_rank_to_its_like() -> None:
    src, dst = (side(Sharding(kv=kv_of(4), tp=4), num_pages) for num_pages in (3, 5))
    plan = plan_transfer(src, dst, group=0, seed=77)
    assert [(route.src_rank, route.dst_rank, route.length) for route in plan.routes] == [
        (rank, rank, src.pool.kv.page_bytes) for rank in range(4)
    ]


def test_a_plan_is_made_once_for_each_group_and_rotation() -> None:
    src, dst = side(Sharding(kv=kv_of(1, "mla"), tp=4), 3), side(Sharding(kv=kv_of(1, "mla"), dp=2), 3)
    plans = Plans(src, dst)
    made = {id(plans.of(group=group, seed=seed)) for group in (0, 1) for seed in range(100)}
    assert len(made) == 2 * 4
    for group, seed in ((1, 2**32 - 1), (0, 6)):
        assert plans.of(group=group, seed=seed) == plan_transfer(src, dst, group=group, seed=seed)


@given(kv_layouts, kv_layouts)
def test_other_models_are_refused_by_name(ours: KVLayout, theirs: KVLayout) -> None:
    assume(ours != theirs)
    src, dst = side(Sharding(kv=ours), 3), side(Sharding(kv=theirs), 3)
    for refuses in (lambda: Plans(src, dst), lambda: plan_transfer(src, dst, group=0, seed=0)):
        with pytest.raises(InputError) as refusal:
            refuses()
        assert refusal.value.field == "kv"


def test_a_source_of_several_groups_and_a_group_that_is_not_there_are_refused_by_name() -> None:
    one, two = side(Sharding(kv=kv_of(2)), 3), side(Sharding(kv=kv_of(2), dp=2), 3)
    with pytest.raises(InputError, match="dp: must be 1 at the source, where a prompt is on all ranks, is 2"):
        Plans(two, one)
    with pytest.raises(InputError, match=r"group: must be in 0..1, is 2"):
        plan_transfer(one, two, group=2, seed=0)


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
