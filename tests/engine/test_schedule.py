"""The engine's policy: single rules by name, then random snapshots against a slow obvious model and its invariants."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.cost import StepCost, StepSize
from headrace.engine.requests import TIERS, Tier
from headrace.engine.schedule import (
    MIN_CHUNK,
    Chunk,
    Decoding,
    Entering,
    LatencyBudget,
    Prefilling,
    Snapshot,
    StepPlan,
    next_to_enter,
    plan_chunks,
    schedule,
)

PAGE_SIZE = 4


def decoding(key: str, order: int, *pages: int, tier: Tier = "interactive", full: bool = False) -> Decoding[str]:
    kv_len = len(pages) * PAGE_SIZE - (not full)
    return Decoding(key=key, tier=tier, order=order, kv_len=kv_len, pages=pages)


def prefilling(key: str, order: int, computed: int, end: int, tier: Tier = "interactive") -> Prefilling[str]:
    return Prefilling(key=key, tier=tier, order=order, computed=computed, end=end)


def snapshot(
    decoding: Sequence[Decoding[str]] = (),
    prefilling: Sequence[Prefilling[str]] = (),
    *,
    available: int = 0,
    first: Entering[str] | None = None,
    other_tables: Sequence[Sequence[int]] = (),
    other_keys: int = 0,
) -> Snapshot[str]:
    return Snapshot(
        decoding=decoding,
        prefilling=prefilling,
        other_tables=other_tables,
        other_keys=other_keys,
        first_in_line=first,
        num_available=available,
        page_size=PAGE_SIZE,
    )


def plan_of(taken: Snapshot[str], chunk_tokens: int = 8) -> StepPlan[str]:
    plan = schedule(taken, chunk_tokens=chunk_tokens)
    assert plan is not None
    return plan


# ---- decode rows -----------------------------------------------------------------------------------------------


def test_an_empty_engine_has_nothing_to_do() -> None:
    assert schedule(snapshot(available=4), chunk_tokens=8) is None


def test_every_decoding_request_has_one_row() -> None:
    plan = plan_of(snapshot([decoding("a", 0, 1), decoding("b", 1, 2)]))
    assert sorted(plan.rows) == ["a", "b"]
    assert (plan.preempt, plan.grow, plan.chunks) == ((), (), ())


def test_a_row_at_the_begin_of_a_page_gets_one() -> None:
    plan = plan_of(snapshot([decoding("a", 0, 1, full=True), decoding("b", 1, 2)], available=1))
    assert plan.grow == ("a",)
    assert sorted(plan.rows) == ["a", "b"]


def test_without_pages_the_youngest_of_the_lowest_tier_gives_way() -> None:
    requests = [
        decoding("old", 0, 1, full=True),
        decoding("flex", 1, 2, tier="flex"),
        decoding("younger flex", 2, 3, tier="flex"),
        decoding("youngest", 3, 4),
    ]
    plan = plan_of(snapshot(requests))
    assert plan.preempt == ("younger flex",)
    assert plan.grow == ("old",)
    assert sorted(plan.rows) == ["flex", "old", "youngest"]


def test_the_oldest_never_gives_way_even_of_the_lowest_tier() -> None:
    requests = [decoding("oldest", 0, 1, tier="flex"), decoding("a", 1, 2, full=True), decoding("b", 2, 3)]
    plan = plan_of(snapshot(requests))
    assert plan.preempt == ("b",)
    assert sorted(plan.rows) == ["a", "oldest"]


def test_the_youngest_gives_way_itself_when_it_is_the_one_that_needs_a_page() -> None:
    plan = plan_of(snapshot([decoding("a", 0, 1), decoding("b", 1, 2, 3, full=True)]))
    assert (plan.preempt, plan.grow, plan.rows) == (("b",), (), ("a",))


def test_background_work_that_needs_a_page_gives_way_itself_before_interactive_work() -> None:
    requests = [decoding("a", 0, 1), decoding("flex", 1, 2, tier="flex", full=True), decoding("b", 2, 3)]
    plan = plan_of(snapshot(requests))
    assert (plan.preempt, sorted(plan.rows)) == (("flex",), ["a", "b"])


def test_the_oldest_waits_when_those_who_have_the_pages_cannot_give_way() -> None:
    taken = snapshot([decoding("a", 0, 1, full=True)], [prefilling("p", 1, 0, 4)], other_tables=[(2, 3)])
    plan = plan_of(taken)
    assert (plan.preempt, plan.rows) == ((), ())
    assert plan.chunks == (Chunk(key="p", begin=0, end=4),)


def test_an_oldest_that_waits_alone_is_no_step() -> None:
    assert schedule(snapshot([decoding("a", 0, 1, full=True)], other_tables=[(2,)]), chunk_tokens=8) is None


def test_shared_pages_are_not_counted_as_given_back_before_their_last_holder_leaves() -> None:
    """Pages 7 and 8 are in three tables: the youngest alone gives back one page, both together four."""
    requests = [
        decoding("a", 0, 1, full=True),
        decoding("b", 1, 2, full=True),
        decoding("c", 2, 3, full=True),
        decoding("d", 3, 7, 8, 4),
        decoding("e", 4, 7, 8, 5),
    ]
    plan = plan_of(snapshot(requests))
    assert plan.preempt == ("e", "d")
    assert plan.grow == ("a", "b", "c")
    plan = plan_of(snapshot(requests, other_tables=[(7, 8)]))
    assert plan.preempt == ("e", "d", "c")
    assert plan.grow == ("a", "b")


# ---- chunks ----------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_into_chunks() -> None:
    assert plan_chunks([prefilling("a", 0, 3, 100)], 8) == [Chunk(key="a", begin=3, end=11)]


def test_prompts_share_what_is_left_of_a_step() -> None:
    prompts = [prefilling("b", 1, 0, 3), prefilling("a", 0, 7, 10), prefilling("c", 2, 0, 9)]
    expected = [Chunk(key="a", begin=7, end=10), Chunk(key="b", begin=0, end=3), Chunk(key="c", begin=0, end=2)]
    assert plan_chunks(prompts, 8) == expected


def test_interactive_prompts_come_before_older_background_ones() -> None:
    prompts = [prefilling("flex", 0, 0, 6, tier="flex"), prefilling("a", 1, 0, 6)]
    assert plan_chunks(prompts, 8) == [Chunk(key="a", begin=0, end=6), Chunk(key="flex", begin=0, end=2)]


# ---- who enters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "num_pages", "max_running", "enters"),
    [(3, 2, 3, True), (2, 2, 3, False), (3, 3, 3, False), (3, 2, 2, False)],
    ids=["there is room", "a row needs a page", "needs one more", "too many run"],
)
def test_the_first_in_line_enters_when_pages_are_left_beside_growth(
    available: int, num_pages: int, max_running: int, enters: bool
) -> None:
    taken = snapshot(
        [decoding("a", 0, 1, full=True)],
        available=available,
        first=Entering(key="w", num_pages=num_pages, num_keys=4),
        other_tables=[(9,)],
    )
    assert (next_to_enter(taken, max_running=max_running) == "w") is enters


def test_nobody_enters_where_nobody_stands() -> None:
    assert next_to_enter(snapshot(available=9), max_running=9) is None


# ---- a latency budget ------------------------------------------------------------------------------------------

COST = StepCost(step_s=10.0, row_s=2.0, key_s=0.1, token_s=1.0, pair_s=0.0)
LONG = prefilling("p", 9, 0, 5000)


def budget_of(tpot_s: float | None = None, max_stall_s: float | None = None, margin: float = 1.0) -> LatencyBudget:
    return LatencyBudget(cost=COST, tpot_s=tpot_s, max_stall_s=max_stall_s, margin=margin)


def chunk_beside(budget: LatencyBudget, *rows: Decoding[str], chunk_tokens: int = 256) -> int:
    plan = schedule(snapshot(rows, [LONG]), chunk_tokens=chunk_tokens, budget=budget)
    assert plan is not None and len(plan.rows) == len(rows)
    return sum(chunk.end - chunk.begin for chunk in plan.chunks)


def test_a_chunk_beside_rows_is_cut_to_what_the_budget_leaves() -> None:
    row = decoding("a", 0, 1)  # reads 4 keys: 12.4 s without a chunk
    assert chunk_beside(budget_of(max_stall_s=100), row) == 64  # 79 tokens of 1.1 s, in blocks of 16
    assert chunk_beside(budget_of(max_stall_s=82.9), row) == 64
    assert chunk_beside(budget_of(max_stall_s=82.7), row) == 48
    assert chunk_beside(budget_of(max_stall_s=1000), row) == 256
    assert chunk_beside(budget_of(max_stall_s=1000), row, chunk_tokens=100) == 100


def test_a_budget_of_nothing_leaves_the_least_chunk_and_every_row() -> None:
    rows = [decoding("a", 0, 1), decoding("b", 1, 2)]
    assert chunk_beside(budget_of(max_stall_s=0.001), *rows) == MIN_CHUNK
    assert chunk_beside(budget_of(tpot_s=0.001), *rows, chunk_tokens=5) == 5


def test_both_bounds_are_kept_beside_rows() -> None:
    row = decoding("a", 0, 1)
    assert chunk_beside(budget_of(tpot_s=50), row) == 32
    assert chunk_beside(budget_of(tpot_s=50, max_stall_s=100), row) == 32
    assert chunk_beside(budget_of(tpot_s=100, max_stall_s=50), row) == 32
    assert chunk_beside(budget_of(), row) == 256


def test_a_margin_leaves_room_for_what_steps_take_beyond_their_prediction() -> None:
    row = decoding("a", 0, 1)
    assert chunk_beside(budget_of(max_stall_s=100, margin=1.25), row) == 48


def test_without_rows_nobody_waits_for_a_chunk() -> None:
    assert chunk_beside(budget_of(tpot_s=1, max_stall_s=1)) == 256


def test_a_plan_says_what_is_in_it() -> None:
    plan = plan_of(snapshot([decoding("a", 0, 1), decoding("b", 1, 2, 3, full=True)], [LONG], available=1))
    assert plan.size == StepSize(rows=2, keys=4 + 9).with_chunk(0, 8)


@pytest.mark.parametrize(
    ("tpot_s", "enters"), [(22.5, True), (22.3, False), (None, True)], ids=["kept", "passed", "none"]
)
def test_who_would_make_decode_steps_too_long_waits(tpot_s: float | None, enters: bool) -> None:
    """One row that reads 4 keys, one that prefills and will read 20, and one that comes with 40: 22.4 s."""
    taken = snapshot(
        [decoding("a", 0, 1)],
        available=9,
        first=Entering(key="w", num_pages=2, num_keys=40),
        other_tables=[(9,)],
        other_keys=20,
    )
    budget = budget_of(tpot_s=tpot_s, max_stall_s=1.0)  # which does not ask who enters
    assert (next_to_enter(taken, max_running=9, budget=budget) == "w") is enters


def test_one_runs_whatever_the_budget() -> None:
    taken = snapshot(available=9, first=Entering(key="w", num_pages=2, num_keys=40))
    assert next_to_enter(taken, max_running=9, budget=budget_of(tpot_s=0.001)) == "w"


# ---- random snapshots ------------------------------------------------------------------------------------------


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot[str]:
    """As the engine makes them: some pages are shared, and each decoding request has its last one for itself."""
    num_shared = draw(st.integers(0, 4))
    fresh = iter(range(num_shared, 1000))

    def table() -> tuple[int, ...]:
        shared = range(draw(st.integers(0, num_shared)))
        return (*shared, *(next(fresh) for _ in range(draw(st.integers(1, 3)))))

    orders = draw(st.permutations(range(12)))
    tiers = st.sampled_from(TIERS)
    decoders = [
        decoding(f"d{order}", order, *table(), tier=draw(tiers), full=draw(st.booleans()))
        for order in orders[: draw(st.integers(0, 8))]
    ]
    prompts = []
    for order in orders[8 : 8 + draw(st.integers(0, 4))]:
        computed = draw(st.integers(0, 20))
        prompts.append(prefilling(f"p{order}", order, computed, computed + draw(st.integers(1, 20)), draw(tiers)))
    others = [table() for _ in prompts]
    return snapshot(
        decoders,
        prompts,
        available=draw(st.integers(0, 4)),
        other_tables=others,
        other_keys=sum(prompt.end for prompt in prompts),
    )


def obvious_plan(taken: Snapshot[str]) -> tuple[list[str], list[str], list[str]]:
    """Preempted, grown and rows, by looking at everything again at each turn."""
    preempted: list[Decoding[str]] = []
    grown: list[Decoding[str]] = []
    rows: list[Decoding[str]] = []
    oldest = min(taken.decoding, key=lambda request: request.order, default=None)

    def by_rank(request: Decoding[str]) -> tuple[bool, int, int]:
        return request is not oldest, TIERS.index(request.tier), request.order

    def num_free() -> int:
        still_held = {page for table in taken.other_tables for page in table}
        still_held |= {page for request in taken.decoding if request not in preempted for page in request.pages}
        given_back = {page for request in preempted for page in request.pages} - still_held
        return taken.num_available + len(given_back) - len(grown)

    for request in sorted(taken.decoding, key=by_rank):
        if request in preempted:
            continue
        if request.kv_len < len(request.pages) * PAGE_SIZE:
            rows.append(request)
            continue
        while not num_free() and request not in preempted:
            may_go = [r for r in taken.decoding if r is not oldest and r not in preempted]
            if not may_go:
                break
            preempted.append(max(may_go, key=by_rank))
        if num_free() and request not in preempted:
            grown.append(request)
            rows.append(request)
    return [r.key for r in preempted], [r.key for r in grown], [r.key for r in rows]


@given(snapshots())
def test_a_plan_is_the_obvious_one(taken: Snapshot[str]) -> None:
    plan = schedule(taken, chunk_tokens=8)
    preempted, grown, rows = obvious_plan(taken)
    if plan is None:
        assert not preempted and not rows and not taken.prefilling
    else:
        assert (list(plan.preempt), list(plan.grow), list(plan.rows)) == (preempted, grown, rows)


@given(snapshots())
def test_the_oldest_always_gets_further_unless_nobody_is_left_who_could_give_way(taken: Snapshot[str]) -> None:
    plan = schedule(taken, chunk_tokens=8)
    if not taken.decoding:
        return
    oldest = min(taken.decoding, key=lambda request: request.order)
    if plan is not None and oldest.key in plan.rows:
        return
    assert oldest.needs_page(PAGE_SIZE) and taken.num_available == 0
    assert len(taken.decoding) == 1


@given(snapshots())
def test_no_more_give_way_than_must_and_no_page_is_given_twice(taken: Snapshot[str]) -> None:
    plan = schedule(taken, chunk_tokens=8)
    if plan is None:
        return
    by_key = {request.key: request for request in taken.decoding}
    assert len(set(plan.rows) | set(plan.preempt)) == len(plan.rows) + len(plan.preempt)
    assert set(plan.grow) == {key for key in plan.rows if by_key[key].needs_page(PAGE_SIZE)}

    def freed(leavers: Sequence[str]) -> int:
        held = {page for table in taken.other_tables for page in table}
        held |= {page for key, request in by_key.items() if key not in leavers for page in request.pages}
        return len({page for key in leavers for page in by_key[key].pages} - held)

    assert len(plan.grow) <= taken.num_available + freed(plan.preempt)
    if plan.preempt:
        # Without the last of them one page was missing: for a row, or for itself.
        needed = len(plan.grow) + by_key[plan.preempt[-1]].needs_page(PAGE_SIZE)
        assert needed > taken.num_available + freed(plan.preempt[:-1])


@given(snapshots(), st.integers(1, 30))
def test_chunks_keep_the_budget_and_leave_none_of_it_while_a_prompt_wants_it(
    taken: Snapshot[str], chunk_tokens: int
) -> None:
    plan = schedule(taken, chunk_tokens=chunk_tokens)
    chunks = () if plan is None else plan.chunks
    by_key = {prompt.key: prompt for prompt in taken.prefilling}
    assert len({chunk.key for chunk in chunks}) == len(chunks)
    for chunk in chunks:
        assert chunk.begin == by_key[chunk.key].computed
        assert chunk.begin < chunk.end <= by_key[chunk.key].end
    wanted = sum(prompt.end - prompt.computed for prompt in taken.prefilling)
    assert sum(chunk.end - chunk.begin for chunk in chunks) == min(chunk_tokens, wanted)
    ranks = [(TIERS.index(by_key[chunk.key].tier), by_key[chunk.key].order) for chunk in chunks]
    assert ranks == sorted(ranks)
    assert all(chunk.end == by_key[chunk.key].end for chunk in chunks[:-1])


COSTS = st.builds(
    StepCost,
    step_s=st.floats(0, 1),
    row_s=st.floats(0, 1),
    key_s=st.floats(0, 0.1),
    token_s=st.floats(0, 1),
    pair_s=st.floats(0, 0.01),
)
BOUNDS = st.none() | st.floats(0.001, 100)
BUDGETS = st.builds(LatencyBudget, cost=COSTS, tpot_s=BOUNDS, max_stall_s=BOUNDS, margin=st.floats(1, 2))


@st.composite
def with_long_prompts(draw: st.DrawFn) -> Snapshot[str]:
    """Longer ones than `snapshots` has: for those a budget of 16 tokens is none."""
    taken = draw(snapshots())
    longer = [
        prefilling(prompt.key, prompt.order, prompt.computed, prompt.end + draw(st.integers(0, 300)), prompt.tier)
        for prompt in taken.prefilling
    ]
    return replace(taken, prefilling=longer)


@given(with_long_prompts(), BUDGETS, st.integers(1, 300))
def test_beside_rows_the_budget_is_kept_or_the_chunk_is_the_least(
    taken: Snapshot[str], budget: LatencyBudget, chunk_tokens: int
) -> None:
    plan = schedule(taken, chunk_tokens=chunk_tokens, budget=budget)
    if plan is None:
        return
    wanted = min(chunk_tokens, sum(prompt.end - prompt.computed for prompt in taken.prefilling))
    computed = sum(chunk.end - chunk.begin for chunk in plan.chunks)
    assert plan.size.chunk_tokens == computed
    assert min(MIN_CHUNK, wanted) <= computed <= wanted  # prompts always get further
    if plan.rows and budget.step_s is not None:
        takes_s = budget.cost.predict(plan.size) * budget.margin
        assert takes_s <= budget.step_s * (1 + 1e-12) or computed == min(MIN_CHUNK, wanted)
    else:
        assert computed == wanted


@given(with_long_prompts(), BUDGETS, st.integers(1, 300))
def test_no_larger_chunk_would_have_kept_the_budget(
    taken: Snapshot[str], budget: LatencyBudget, chunk_tokens: int
) -> None:
    plan = schedule(taken, chunk_tokens=chunk_tokens, budget=budget)
    if plan is None or not plan.rows or budget.step_s is None:
        return
    wanted = min(chunk_tokens, sum(prompt.end - prompt.computed for prompt in taken.prefilling))
    larger = plan.size.chunk_tokens + 16
    if plan.size.chunk_tokens < wanted and larger <= chunk_tokens:
        assert plan.size.chunk_tokens % 16 == 0
        size = StepSize(rows=plan.size.rows, keys=plan.size.keys - sum(chunk.end for chunk in plan.chunks))
        for chunk in plan_chunks(taken.prefilling, larger):
            size = size.with_chunk(chunk.begin, chunk.end)
        assert budget.cost.predict(size) > budget.step_s / budget.margin


@given(snapshots(), BUDGETS)
def test_a_budget_takes_no_page_and_no_row_from_anybody(taken: Snapshot[str], budget: LatencyBudget) -> None:
    bounded = schedule(taken, chunk_tokens=8, budget=budget)
    free = schedule(taken, chunk_tokens=8)
    assert (bounded is None) == (free is None)
    if bounded is not None and free is not None:
        assert (bounded.preempt, bounded.grow, bounded.rows) == (free.preempt, free.grow, free.rows)


@given(snapshots(), BUDGETS, st.integers(1, 50))
def test_who_enters_leaves_a_decode_step_of_all_within_the_budget(
    taken: Snapshot[str], budget: LatencyBudget, num_keys: int
) -> None:
    taken = replace(taken, first_in_line=Entering(key="w", num_pages=0, num_keys=num_keys))
    enters = next_to_enter(taken, max_running=99, budget=budget) == "w"
    if taken.num_available < taken.num_growing:
        assert not enters
        return
    keys = sum(request.kv_len + 1 for request in taken.decoding) + taken.other_keys + num_keys
    takes_s = budget.cost.predict(StepSize(rows=taken.num_running + 1, keys=keys))
    is_kept = budget.tpot_s is None or takes_s <= budget.tpot_s
    assert enters is (is_kept or not taken.num_running)
