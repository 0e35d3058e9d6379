"""Prefixes in simulated pages: who hits what, what is evicted first."""

from itertools import pairwise

import pytest
from deployments import instance, scenario

from headrace.bench.workload import Arrival, ArrivalList
from headrace.errors import InputError
from headrace.planner.pages import Pages, Prefix
from headrace.planner.scenario import Failure, KvModel, LinkModel
from headrace.planner.simulate import simulate

PAGE = 16


def prefix(*blocks: int, num_tokens: int, own: int = 0, block_tokens: int = 64) -> Prefix:
    arrival = Arrival(at_s=0.0, prompt_tokens=num_tokens, max_tokens=1, blocks=blocks)
    return Prefix(arrival, own=own, block_tokens=block_tokens, num_tokens=num_tokens, page_size=PAGE)


def computed(pages: Pages, one: Prefix) -> None:
    """Somebody had it, and is gone."""
    held = pages.pin(one)
    num_pages = one.page_ends[-1] - sum(held.values())
    pages.take(num_pages)
    after = pages.index(one, held)
    pages.release(after, one.page_ends[-1] - sum(after.values()))


def test_prompts_share_their_leading_blocks_and_nothing_behind_the_first_that_differs() -> None:
    pages = Pages(1000, PAGE)
    computed(pages, prefix(1, 2, 3, num_tokens=300))
    assert pages.hit_tokens(prefix(1, 2, 3, num_tokens=300, own=1), 300) == 192
    assert pages.hit_tokens(prefix(1, 2, 9, num_tokens=300, own=1), 300) == 128
    assert pages.hit_tokens(prefix(9, 2, 3, num_tokens=300, own=1), 300) == 0
    assert pages.hit_tokens(prefix(1, 2, 3, num_tokens=129, own=1), 129) == 128
    assert pages.hit_tokens(prefix(1, 2, 3, num_tokens=128, own=1), 128) == 64


def test_a_block_that_is_no_whole_number_of_pages_shares_its_whole_ones() -> None:
    pages = Pages(1000, PAGE)
    computed(pages, prefix(1, 2, num_tokens=300, block_tokens=100))
    other = prefix(1, 9, num_tokens=300, block_tokens=100, own=1)
    assert other.page_ends == [6, 12, 18]
    assert pages.hit_tokens(other, 300) == 96


def test_what_was_released_first_is_evicted_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    pages = Pages(16, PAGE)
    first, second = prefix(1, num_tokens=129), prefix(2, num_tokens=129, own=1)
    computed(pages, first)
    computed(pages, second)
    assert (pages.num_free, pages.num_cached) == (0, 16)
    pages.take(3)
    assert (pages.hit_tokens(first, 129), pages.hit_tokens(second, 129)) == (80, 128)
    pages.take(3)
    assert (pages.hit_tokens(first, 129), pages.hit_tokens(second, 129)) == (32, 128)
    assert pages.num_evicted == 6


def test_two_that_compute_the_same_at_once_keep_one_copy() -> None:
    pages = Pages(100, PAGE)
    one, other = prefix(1, num_tokens=65), prefix(1, num_tokens=65, own=1)
    pages.take(8)
    held, also = pages.pin(one), pages.pin(other)
    held, also = pages.index(one, held), pages.index(other, also)
    assert (sum(held.values()), also) == (4, {})
    pages.release(held, 0)
    pages.release(also, 4)
    assert (pages.num_free, pages.num_cached, pages.num_held) == (96, 4, 0)


def test_a_conversation_computes_and_sends_only_what_is_new() -> None:
    turns = [Arrival(at_s=nth, prompt_tokens=65 + 64 * nth, max_tokens=2, blocks=(7,) * (nth + 1)) for nth in range(4)]
    asked = ArrivalList(name="turns", seed=1, arrivals=tuple(turns), block_tokens=64)
    deployment = scenario(instance("p", "prefiller"), instance("d", "decoder"))
    done = simulate(deployment, asked)
    assert [record.cached_tokens for record in done] == [0, 64, 128, 192]
    assert done.did[0].num_prefill_tokens == 4 * 64
    assert done.facts()["kv_bytes"] == 4 * 64 // PAGE * deployment.kv.page_bytes
    assert all(early.token_s[0] < late.token_s[0] for early, late in pairwise(done))


def test_a_simulation_tells_how_far_it_is_and_gives_records_by_number_and_range() -> None:
    told: list[tuple[int, int]] = []
    turns = [Arrival(at_s=nth / 10, prompt_tokens=20, max_tokens=1) for nth in range(600)]
    asked = ArrivalList(name="many", seed=1, arrivals=tuple(turns))
    done = simulate(
        scenario(instance("c", "colocated")), asked, progress=lambda ended, whole: told.append((ended, whole))
    )
    assert told == [(256, 600), (512, 600), (600, 600)]
    assert list(done[1:3]) == [done[1], done[2]]


def test_values_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="bytes_s"):
        LinkModel(bytes_s=0)
    with pytest.raises(InputError, match="page_bytes"):
        KvModel(num_layers=1, page_bytes=0, page_messages=1)
    with pytest.raises(InputError, match="num_pages"):
        instance("d", "decoder", num_pages=0)
    with pytest.raises(InputError, match="names of their own"):
        scenario(instance("d", "decoder"), instance("d", "decoder"))
    with pytest.raises(InputError, match="that decodes"):
        scenario(instance("p", "prefiller"))
    with pytest.raises(InputError, match="page_size"):
        scenario(instance("p", "prefiller", page_size=32), instance("d", "decoder"))
    with pytest.raises(InputError, match="failures"):
        scenario(instance("d", "decoder"), failures=[Failure(instance="x", at_s=0, down_s=1)])
    with pytest.raises(InputError, match="noticed_s"):
        Failure(instance="d", at_s=0, down_s=1, noticed_s=2)
