"""Which data-parallel group takes a request, and that all groups take a step together. No model runs."""

from dataclasses import replace

import pytest

from headrace.engine.requests import EngineOptions, EngineRequest, RequestDone, SamplingParams
from headrace.errors import InputError
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import PrefixIndex
from headrace.roles.groups import Groups

PAGE, NUM_PAGES = 4, 16


@pytest.fixture
def pools() -> tuple[PagePool, ...]:
    return tuple(PagePool(NUM_PAGES, PrefixIndex()) for _ in range(3))


@pytest.fixture
def groups(pools: tuple[PagePool, ...]) -> Groups:
    options = EngineOptions(
        page_size=PAGE, chunk_tokens=64, max_running=4, max_model_len=NUM_PAGES * PAGE, sample_from_prefill=True
    )
    return Groups(pools, options=options, salt=b"", vocab_size=100)


def request(name: str, *, first: int = 0, num_tokens: int = 12, max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=tuple(range(first, first + num_tokens)),
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
    )


def place(groups: Groups, asked: EngineRequest) -> int:
    admission = groups.try_admit(asked)
    assert admission is not None, f"no room for {asked.request_id}"
    groups.engine_of(asked.request_id).start(asked.request_id)
    return groups.group_of(asked.request_id)


def take_step(groups: Groups) -> list[int]:
    """-> how many rows each group had."""
    step = groups.begin_step(0.0)
    assert step is not None
    groups.commit_step(step, [[7] * sum(row.draw is not None for row in rows) for rows in step.rows], 0.1)
    return [len(rows) for rows in step.rows]


def test_requests_go_where_most_room_is(groups: Groups) -> None:
    assert {place(groups, request(f"r{number}", first=20 * number)) for number in range(3)} == {0, 1, 2}
    groups.check()


def test_the_load_that_is_told_is_that_of_the_group_that_runs_most(groups: Groups) -> None:
    sizes = [place(groups, request(f"r{nth}", first=20 * nth, num_tokens=4 + nth)) for nth in range(4)]
    busiest = max(set(sizes), key=sizes.count)
    tokens = sum(4 + nth for nth, group in enumerate(sizes) if group == busiest)
    assert (groups.decode_size.rows, groups.decode_size.keys) == (2, tokens)


def test_a_prompt_goes_where_its_beginning_is_though_others_have_more_room(groups: Groups) -> None:
    first = place(groups, request("first"))
    take_step(groups)
    assert place(groups, request("other", first=50)) != first
    assert place(groups, request("again")) == first
    groups.check()


def test_prompts_that_only_begin_alike_are_spread(groups: Groups) -> None:
    placed = [place(groups, request("r0", max_tokens=12))]
    take_step(groups)
    for number in range(1, 9):
        beginning = request("", num_tokens=PAGE).token_ids
        rest = request("", first=10 * number, num_tokens=8).token_ids
        asked = replace(request(f"r{number}", max_tokens=12), token_ids=beginning + rest)
        placed.append(place(groups, asked))
        take_step(groups)
    assert sorted(placed) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_where_its_beginning_is_but_no_room_it_goes_elsewhere(groups: Groups) -> None:
    first = place(groups, request("first", num_tokens=40, max_tokens=20))
    take_step(groups)
    assert place(groups, request("again", num_tokens=8, max_tokens=50)) != first


def test_what_fits_into_no_group_is_refused_whatever_they_hold_together(groups: Groups) -> None:
    with pytest.raises(InputError, match="max_tokens"):
        groups.try_admit(request("long", num_tokens=40, max_tokens=NUM_PAGES * PAGE))


def test_without_room_anywhere_it_holds_nothing(groups: Groups) -> None:
    for number in range(3):
        place(groups, request(f"r{number}", first=10 * number, num_tokens=50, max_tokens=10))
    assert groups.try_admit(request("late", num_tokens=50)) is None
    assert groups.most_free_pages < 13
    groups.check()


def test_an_id_is_in_use_in_every_group(groups: Groups) -> None:
    place(groups, request("one"))
    with pytest.raises(InputError, match="'one' is in use"):
        groups.try_admit(request("one", first=50))


def test_a_group_without_requests_takes_part_with_no_rows(groups: Groups) -> None:
    group = place(groups, request("one"))
    assert take_step(groups) == [int(number == group) for number in range(3)]
    assert groups.statistics().num_decoding == 1
    groups.abort("one")
    assert [type(output) for output in groups.drain_outputs()][-1] is RequestDone
    assert groups.begin_step(0.2) is None
    groups.abort("one")
    groups.check()


def test_a_failed_step_fails_the_requests_of_all_groups(groups: Groups) -> None:
    for number in range(2):
        place(groups, request(f"r{number}", first=20 * number))
    step = groups.begin_step(0.0)
    assert step is not None
    groups.fail_step(step, "out of order")
    assert [(done.reason, done.text) for done in groups.drain_outputs() if isinstance(done, RequestDone)] == [
        ("failed", "out of order")
    ] * 2
    groups.check()
