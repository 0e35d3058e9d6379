"""The life of a request in the engine, move by move: what it holds in each state and how it leaves it."""

import pytest
from scripted_model import SALT, VOCABULARY, Answer, World, make_request, text_of

from headrace.engine.growth import FEWEST
from headrace.engine.requests import EngineOptions, EngineRequest, SamplingParams
from headrace.errors import InputError
from headrace.kvcache.prefix import page_hashes


def tokens(num: int, first: int = 1) -> list[int]:
    return [(first + 5 * number) % VOCABULARY for number in range(num)]


# ---- what can never run ----------------------------------------------------------------------------------------


def test_what_can_never_run_is_refused_with_both_numbers() -> None:
    world = World(num_pages=4, page_size=4, max_model_len=14)
    world.engine.check_request(make_request("a", tokens(10), 4))
    with pytest.raises(InputError, match=r"max_tokens: .* at most 14 tokens \(max_model_len\), are 10 \+ 5"):
        world.engine.check_request(make_request("a", tokens(10), 5))
    world = World(num_pages=4, page_size=4)
    world.engine.check_request(make_request("a", tokens(10), 6))
    with pytest.raises(InputError, match=r"max_tokens: .* at most 16 tokens \(the KV pool\), are 10 \+ 7"):
        world.engine.try_admit(make_request("a", tokens(10), 7))
    world.expect_empty()


@pytest.mark.parametrize("token_id", [-1, VOCABULARY])
def test_tokens_that_the_model_does_not_know_are_refused(token_id: int) -> None:
    with pytest.raises(InputError, match=f"token_ids: must be in 0..{VOCABULARY - 1}"):
        World().engine.try_admit(make_request("a", [1, token_id]))


def test_an_id_that_is_in_use_is_refused() -> None:
    world = World()
    world.start(make_request("a", tokens(5)))
    with pytest.raises(InputError, match="request_id: must be new, 'a' is in use"):
        world.engine.try_admit(make_request("a", tokens(3)))


@pytest.mark.parametrize("field", ["page_size", "chunk_tokens", "max_running", "max_model_len"])
def test_options_that_are_none_are_refused(field: str) -> None:
    with pytest.raises(InputError, match=f"{field}: must be at least 1, is 0"):
        EngineOptions(**({"page_size": 4, "max_model_len": 8} | {field: 0}))


@pytest.mark.parametrize("field", ["tpot_s", "max_stall_s"])
@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_a_bound_that_nothing_keeps_is_refused(field: str, bound: float) -> None:
    with pytest.raises(InputError, match=f"{field}: must be above 0, or None for no bound, is {bound}"):
        EngineOptions(**({"page_size": 4, "max_model_len": 8} | {field: bound}))


# ---- alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [False, True], ids=["decodes the last", "samples from prefill"])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 8, 9, 30])
def test_a_request_generates_its_text_and_leaves_nothing(num_tokens: int, samples: bool) -> None:
    world = World(samples=samples)
    request = make_request("a", tokens(num_tokens), 7)
    world.start(request)
    world.run()
    world.expect_text(request)
    world.expect_empty()


def test_the_last_prompt_token_is_the_first_decode_row_or_the_last_of_a_chunk() -> None:
    for samples, shapes in (
        (False, [(0, 8, False), (8, 1, False), (9, 1, True)]),
        (True, [(0, 8, False), (8, 2, True)]),
    ):
        world = World(samples=samples)
        world.start(make_request("a", tokens(10), 1))
        seen = []
        while (step := world.step()) is not None:
            seen += [(row.row.begin, len(row.row.token_ids), row.row.wants_logits) for row in step.rows]
        assert seen == shapes


def test_the_first_step_is_told_once_and_before_the_first_token() -> None:
    world = World()
    world.start(make_request("a", tokens(10), 3))
    world.run()
    first = world.answers["a"].first
    assert first is not None
    assert (first.began_at, first.step_s) == (2.0, 1.0)


def test_a_stop_token_ends_it_counted_and_unseen() -> None:
    request = make_request("a", tokens(6), 20)
    text, _ = text_of(request)
    stopping = make_request("a", tokens(6), 20, stops=[text[3]])
    world = World()
    world.start(stopping)
    world.run()
    world.expect_text(stopping)
    done = world.answers["a"].done
    assert done is not None and (done.reason, done.num_tokens) == ("stop", 4)


def test_a_stop_token_that_comes_last_is_a_stop() -> None:
    text, _ = text_of(make_request("a", tokens(6), 3))
    world = World()
    world.start(make_request("a", tokens(6), 3, stops=[text[2]]))
    world.run()
    done = world.answers["a"].done
    assert done is not None and (done.reason, done.num_tokens) == ("stop", 3)


def test_a_stop_token_that_comes_first_leaves_no_text() -> None:
    text, _ = text_of(make_request("a", tokens(6), 1))
    world = World()
    world.start(make_request("a", tokens(6), 5, stops=[text[0]]))
    world.run()
    answer = world.answers["a"]
    assert answer.done is not None and answer.first is not None
    assert (answer.tokens, answer.done.num_tokens) == ([], 1)


def test_draws_are_keyed_by_seed_choice_and_position() -> None:
    world = World()
    requests = [
        make_request(f"{seed}-{choice}", tokens(6), 6, sampling=SamplingParams(temperature=1, seed=seed, choice=choice))
        for seed in (0, 1)
        for choice in (0, 1)
    ]
    for request in requests:
        world.start(request)
    world.run()
    for request in requests:
        world.expect_text(request)
    assert len({tuple(answer.tokens) for answer in world.answers.values()}) == 4


# ---- together --------------------------------------------------------------------------------------------------


def test_decode_rows_go_on_beside_the_chunks_of_a_long_prompt() -> None:
    world = World(num_pages=32)
    world.start(make_request("short", tokens(3), 10))
    world.step()
    world.start(make_request("long", tokens(40, first=2), 2))
    for _ in range(4):
        step = world.step()
        assert step is not None
        assert sorted(len(row.row.token_ids) for row in step.rows) == [1, 8]
    world.run()


def test_interactive_prompts_are_computed_before_background_ones() -> None:
    world = World(num_pages=32)
    world.start(make_request("flex", tokens(20), 1, tier="flex"))
    world.start(make_request("now", tokens(20, first=3), 1))
    world.run()
    flex, now = world.answers["flex"].first, world.answers["now"].first
    assert flex is not None and now is not None and now.began_at < flex.began_at


def test_no_more_run_than_may() -> None:
    world = World(max_running=2)
    for name in "ab":
        world.start(make_request(name, tokens(3), 3))
    assert world.engine.try_admit(make_request("c", tokens(3), 3)) is None
    world.run()
    assert world.engine.try_admit(make_request("c", tokens(3), 3)) is not None


def test_without_room_nothing_is_admitted_and_nothing_is_held() -> None:
    world = World(num_pages=4)
    world.start(make_request("a", tokens(8), 4))
    held = world.pool.statistics().num_held
    assert world.engine.try_admit(make_request("b", tokens(8, first=2), 4)) is None
    assert world.pool.statistics().num_held == held
    world.engine.check()


def test_admission_leaves_the_pages_that_the_next_rows_need() -> None:
    """Of five pages a holds three, and its next row needs one more: a request of two finds no room."""
    world = World(num_pages=5)
    world.make_outputs_short()
    world.start(make_request("a", tokens(8), 12))
    while (step := world.step()) is not None and step.rows[0].row.begin != 11:
        pass
    assert world.pool.num_free_or_cached == 2
    assert world.engine.try_admit(make_request("b", tokens(5, first=2), 1)) is None
    assert world.engine.try_admit(make_request("c", tokens(1), 1)) is not None


# ---- prefixes --------------------------------------------------------------------------------------------------


def test_a_prompt_is_hit_by_the_next_one_also_what_was_generated() -> None:
    world = World(num_pages=32)
    first = make_request("a", tokens(9), 6)
    world.start(first)
    world.run()
    text, _ = text_of(first)
    second = make_request("b", [*first.token_ids, *text, 3], 4)
    admission = world.engine.try_admit(second)
    assert admission is not None
    assert admission.cached_len == 12  # 14 computed tokens, whole pages
    assert admission.hashes == tuple(page_hashes(second.token_ids[:-1], 4, SALT))
    world.engine.start("b")
    world.run()
    world.expect_text(second)
    done = world.answers["b"].done
    assert done is not None and done.cached_len == 12
    assert world.engine.statistics().num_cached_tokens == 12


def test_pages_may_be_hit_as_soon_as_their_step_is_committed() -> None:
    world = World(num_pages=32)
    world.start(make_request("a", tokens(30), 4))
    world.step()
    admission = world.engine.try_admit(make_request("b", tokens(30), 4))
    assert admission is not None and admission.cached_len == 8


@pytest.mark.parametrize("samples", [False, True], ids=["decodes the last", "samples from prefill"])
def test_a_prefill_never_indexes_the_page_of_the_last_prompt_token(samples: bool) -> None:
    world = World(samples=samples)
    world.start(make_request("a", tokens(8), 4))
    world.step()
    assert len(world.pool.prefix) == 1


def test_a_prefix_that_somebody_holds_costs_no_pages() -> None:
    """Of nine pages six are held; the next request needs six too, two of them beside the prefix of both."""
    world = World(num_pages=9, chunk_tokens=100)
    world.start(make_request("a", tokens(20), 4))
    world.step()
    assert world.pool.num_free_or_cached == 3
    assert world.engine.try_admit(make_request("other", tokens(20, first=2), 4)) is None
    assert world.engine.try_admit(make_request("b", [*tokens(17), 1, 2, 3], 4)) is not None
    world.engine.check()


def test_a_prompt_that_is_all_cached_decodes_at_once() -> None:
    world = World()
    for name in "ab":
        world.start(make_request(name, tokens(9), 3))
        step = world.begin()
        assert step is not None
        world.commit(step)
        assert [len(row.row.token_ids) for row in step.rows] == ([8] if name == "a" else [1])
        world.run()
    assert world.answers["b"].tokens == world.answers["a"].tokens


def test_the_same_prompt_twice_at_once_is_computed_into_private_pages() -> None:
    world = World(num_pages=32, chunk_tokens=64)
    requests = [make_request(name, tokens(17), 5) for name in "ab"]
    for request in requests:
        world.start(request)
    world.run()
    for request in requests:
        world.expect_text(request)
    world.expect_empty()


# ---- preemption ------------------------------------------------------------------------------------------------


def crowded(names: str = "abc", *, samples: bool = False) -> tuple[World, list[EngineRequest]]:
    """Three requests that get three pages each and need four, in a pool of nine."""
    world = World(num_pages=9, samples=samples)
    world.make_outputs_short()
    requests = [make_request(name, tokens(6, first=number), 10) for number, name in enumerate(names, start=1)]
    for request in requests:
        world.start(request)
    return world, requests


def until_one_waits(world: World) -> None:
    while not world.engine.statistics().num_waiting:
        assert world.step() is not None


@pytest.mark.parametrize("samples", [False, True], ids=["decodes the last", "samples from prefill"])
def test_preempted_requests_come_back_and_lose_and_repeat_nothing(samples: bool) -> None:
    world, requests = crowded(samples=samples)
    world.run()
    for request in requests:
        world.expect_text(request)
    dones = [world.answers[name].done for name in "abc"]
    assert [done.num_preemptions > 0 for done in dones if done] == [False, False, True]
    assert world.engine.statistics().num_preemptions >= 1
    world.expect_empty()


def test_the_pages_of_a_preempted_request_can_be_hit_also_those_it_generated() -> None:
    world, requests = crowded()
    until_one_waits(world)
    preempted = requests[2]
    computed = [*preempted.token_ids, *world.answers["c"].tokens][:-1]
    assert len(world.pool.prefix.lookup(page_hashes(computed, 4, SALT))) == len(computed) // 4 > 1


def test_what_a_preempted_request_finds_of_its_own_pages_nobody_saved() -> None:
    world, _ = crowded()
    world.run()
    done = world.answers["c"].done
    assert done is not None and done.num_preemptions and done.cached_len == 0
    assert world.engine.statistics().num_cached_tokens == 0


def test_nobody_is_admitted_before_one_who_waits() -> None:
    world, _ = crowded()
    until_one_waits(world)
    world.engine.abort("a")
    assert world.engine.num_free_pages >= 2
    assert world.engine.try_admit(make_request("new", tokens(2), 1)) is None
    assert world.engine.try_admit(make_request("flex", tokens(2), 1, tier="flex")) is None
    world.step()
    assert world.engine.statistics().num_waiting == 0
    world.run()


def test_interactive_requests_are_admitted_before_background_ones_that_wait() -> None:
    world = World(num_pages=7)
    world.make_outputs_short()
    world.start(make_request("a", tokens(5), 15))
    world.start(make_request("flex", tokens(5, first=2), 15, tier="flex"))
    until_one_waits(world)
    for name, tier in (("new", "interactive"), ("new flex", "flex")):
        admitted = world.engine.try_admit(make_request(name, tokens(2), 1, tier=tier))
        assert (admitted is not None) == (tier == "interactive")


# ---- KV from elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [2, 4, 5, 6, 8, 9, 13])
def test_a_fetched_request_decodes_and_computes_nothing_of_its_prompt(num_tokens: int) -> None:
    world = World()
    request = make_request("a", tokens(num_tokens), 6)
    pages = world.fetch(request)
    assert len(pages) == world.num_pages(num_tokens - 1)
    assert world.step() is None and world.engine.statistics().num_fetching == 1
    world.land(request, pages, 0, cached_len=1)
    world.run()
    world.expect_text(request)
    world.expect_empty()
    assert world.engine.statistics().num_prefill_tokens == 0
    done = world.answers["a"].done
    assert done is not None and done.cached_len == 1


def test_only_what_is_not_cached_is_fetched() -> None:
    world = World(num_pages=32)
    world.start(make_request("a", tokens(9), 1))
    world.run()
    request = make_request("b", tokens(14), 5)
    pages = world.fetch(request)
    assert len(pages) == 2  # [8, 13): one whole page and a tail page
    world.land(request, pages, 8, cached_len=8)
    world.run()
    world.expect_text(request)


def test_there_is_nothing_to_fetch_for_a_prompt_that_is_all_cached() -> None:
    world = World()
    assert world.engine.try_admit(make_request("one", [5])) is not None
    assert world.engine.pages_to_fetch("one") == ()
    with pytest.raises(AssertionError, match="nothing to fetch for 'one'"):
        world.engine.fetch("one")


@pytest.mark.parametrize("num_tokens", [8, 9, 10])
@pytest.mark.parametrize("cached", [0, 4])
def test_of_a_fetch_that_failed_only_the_lent_pages_are_not_ours(num_tokens: int, cached: int) -> None:
    """The page of the last prompt token is lent when it is the tail page, and growth when it is a page's first."""
    world = World()
    if cached:
        world.start(make_request("before", tokens(cached + 1), 1))
        world.run()
    request = make_request("a", tokens(num_tokens), 6)
    lent = world.fetch(request)
    assert len(lent) == world.num_pages(num_tokens - 1 - cached)
    world.pool.quarantine(lent)
    world.engine.fetch_failed("a")
    world.engine.check()
    statistics = world.pool.statistics()
    assert (statistics.num_held, statistics.num_quarantined) == (0, len(lent))
    assert world.engine.statistics().num_parked == 1
    assert world.step() is None
    world.model.spoil(lent)
    world.engine.wait_for_room("a")
    world.run()
    world.expect_text(request)
    world.pool.readmit(lent)
    world.expect_empty()


def test_a_parked_request_is_fetched_again() -> None:
    world = World()
    request = make_request("a", tokens(10), 6)
    lent = world.fetch(request)
    world.pool.quarantine(lent)
    world.engine.fetch_failed("a")
    assert world.engine.try_readmit("a") is not None
    pages = world.engine.pages_to_fetch("a")
    assert not set(pages) & set(lent)
    world.engine.fetch("a")
    world.land(request, pages, 0)
    world.run()
    world.expect_text(request)


def test_a_parked_request_stays_parked_without_room_and_waits_where_it_is_told_to() -> None:
    world = World(num_pages=5)
    request = make_request("a", tokens(9), 6)
    lent = world.fetch(request)
    world.pool.quarantine(lent)
    world.engine.fetch_failed("a")
    world.start(make_request("b", tokens(3, first=2), 6))
    assert world.engine.try_readmit("a") is None
    world.engine.wait_for_room("a")
    world.run()
    assert world.engine.has_work and world.answers["b"].done is not None
    world.pool.readmit(lent)
    world.run()
    world.expect_text(request)
    world.expect_empty()


def test_a_request_keeps_its_place_by_arrival_while_it_is_parked() -> None:
    world = World(num_pages=9)
    world.make_outputs_short()
    early = make_request("early", tokens(2), 10)
    lent = world.fetch(early)
    world.pool.quarantine(lent)
    world.engine.fetch_failed("early")
    world.pool.readmit(lent)
    for number, name in enumerate("abc", start=1):
        world.start(make_request(name, tokens(6, first=number), 10))
    late = make_request("late", tokens(2), 10)
    assert world.engine.try_admit(late) is None
    until_one_waits(world)
    world.engine.abort("b")
    assert world.engine.try_admit(late) is None
    assert world.engine.try_readmit("early") is not None


# ---- leaving ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["admitted", "prefilling", "decoding", "waiting", "parked", "fetching"])
def test_an_aborted_request_is_answered_once_and_holds_nothing(state: str) -> None:
    world, lent = world_with_one(state)
    world.engine.abort("a")
    world.engine.abort("a")
    world.take_outputs()
    done = world.answers["a"].done
    assert done is not None and done.reason == "aborted"
    if state == "fetching":
        world.engine.check()
        assert world.pool.statistics().num_held == len(lent)
        world.pool.quarantine(lent)
        world.engine.fetch_failed("a")
        world.pool.readmit(lent)
    world.run()
    world.expect_empty()


def world_with_one(state: str) -> tuple[World, tuple[int, ...]]:
    """Request "a" in this state, and its lent pages."""
    if state == "waiting":
        world, _ = crowded("bca")
        until_one_waits(world)
        return world, ()
    world = World()
    request = make_request("a", tokens(12), 6)
    if state in ("fetching", "parked"):
        lent = world.fetch(request)
        if state == "parked":
            world.pool.quarantine(lent)
            world.engine.fetch_failed("a")
            world.pool.readmit(lent)
        return world, lent
    assert world.engine.try_admit(request) is not None
    if state != "admitted":
        world.engine.start("a")
        for _ in range(1 if state == "prefilling" else 3):
            world.step()
    return world, ()


def test_pages_that_land_for_an_aborted_request_are_given_back_and_can_be_hit() -> None:
    world = World()
    request = make_request("a", tokens(12), 6)
    lent = world.fetch(request)
    world.engine.abort("a")
    with pytest.raises(InputError, match="request_id: must be new, 'a' is in use"):
        world.engine.try_admit(request)
    world.land(request, lent, 0)
    world.expect_empty()
    again = world.engine.try_admit(request)
    assert again is not None and again.cached_len == 8


def test_the_pages_of_a_running_step_are_given_back_at_its_end() -> None:
    world = World()
    request = make_request("a", tokens(7), 6)
    world.start(request)
    step = world.begin()
    assert step is not None
    held = world.pool.statistics().num_held
    for _ in range(2):
        world.engine.abort("a")
    world.take_outputs()
    done = world.answers["a"].done
    assert done is not None and done.reason == "aborted"
    assert world.pool.statistics().num_held == held
    assert world.engine.num_running == 0
    world.commit(step)
    world.expect_empty()


def test_a_request_that_is_aborted_in_a_step_gets_no_token_of_it() -> None:
    world = World()
    for number, name in enumerate("ab", start=1):
        world.start(make_request(name, tokens(7, first=number), 6))
    for _ in range(3):
        world.step()
    step = world.begin()
    assert step is not None
    world.engine.abort("a")
    world.take_outputs()
    before = list(world.answers["a"].tokens)
    world.commit(step)
    assert world.answers["a"].tokens == before
    world.run()
    world.expect_text(make_request("b", tokens(7, first=2), 6))


def test_an_aborted_request_leaves_what_it_computed_to_be_hit() -> None:
    """A stop string ends a request so."""
    world = World(num_pages=32)
    request = make_request("a", tokens(6), 12)
    world.start(request)
    while len(world.answers.get("a", world.answers.setdefault("a", Answer([]))).tokens) < 6:
        world.step()
    world.engine.abort("a")
    admission = world.engine.try_admit(make_request("b", [*request.token_ids, *text_of(request)[0]], 1))
    assert admission is not None and admission.cached_len == 8  # of 11 computed tokens


def test_an_unknown_request_is_aborted_without_a_word() -> None:
    world = World()
    world.engine.abort("nobody")
    assert world.engine.drain_outputs() == []


# ---- a step that fails -----------------------------------------------------------------------------------------


def test_everybody_in_a_failed_step_ends_and_everybody_else_goes_on() -> None:
    world = World(num_pages=32, chunk_tokens=4)
    names = {"decodes": 2, "prefills": 8, "is behind": 12}
    for number, (name, num_tokens) in enumerate(names.items(), start=1):
        world.start(make_request(name, tokens(num_tokens, first=number), 6))
    fetching = make_request("fetches", tokens(6, first=9), 3)
    lent = world.fetch(fetching)
    world.step()
    step = world.begin()
    assert step is not None and len(step.rows) == 2
    world.engine.abort("prefills")
    world.engine.fail_step(step, "the kernel raised")
    world.take_outputs()
    reasons = {name: answer.done and (answer.done.reason, answer.done.text) for name, answer in world.answers.items()}
    assert reasons == {"decodes": ("failed", "the kernel raised"), "prefills": ("aborted", "")}
    world.land(fetching, lent, 0)
    world.run()
    world.expect_text(fetching)
    world.expect_text(make_request("is behind", tokens(12, first=3), 6))
    world.expect_empty()


def test_what_a_failed_step_left_in_its_pages_is_not_hit() -> None:
    world = World()
    request = make_request("a", tokens(14), 6)
    world.start(request)
    world.step()
    step = world.begin()
    assert step is not None
    world.model.run(step.rows)
    world.engine.fail_step(step, "the kernel raised")
    admission = world.engine.try_admit(make_request("b", tokens(14), 6))
    assert admission is not None and admission.cached_len == 8


def test_a_request_that_fails_leaves_no_more_to_be_hit_and_tells_nothing_of_usual_lengths() -> None:
    world = World(num_pages=32)
    request = make_request("a", tokens(6), 12)
    for number in range(FEWEST):
        world.start(make_request(f"{number}", request.token_ids, 12))
        for _ in range(5):
            world.step()
        step = world.begin()
        assert step is not None
        world.engine.fail_step(step, "the kernel raised")
        world.take_outputs()
    known = [*request.token_ids, *text_of(request)[0]]
    admission = world.engine.try_admit(make_request("next", known[:10], 40))
    assert admission is not None
    assert (admission.cached_len, len(admission.pages)) == (4, world.num_pages(10 + 40))


def test_one_step_runs_at_a_time_and_ends_once() -> None:
    world = World()
    world.start(make_request("a", tokens(7), 6))
    step = world.begin()
    assert step is not None
    with pytest.raises(AssertionError, match="step 1 is running"):
        world.engine.begin_step(0.0)
    world.commit(step)
    with pytest.raises(AssertionError, match="step 1 is not running"):
        world.engine.commit_step(step, [], 0.0)
    with pytest.raises(AssertionError, match="step 1 is not running"):
        world.engine.fail_step(step, "late")


# ---- state shows itself ----------------------------------------------------------------------------------------


def test_an_engine_shows_its_state() -> None:
    world = World()
    assert repr(world.engine) == "Engine(empty, step 0, PagePool(free=16, held=0, cached=0, quarantined=0, total=16))"
    assert not world.engine.has_work
    world.start(make_request("a", tokens(20), 6))
    assert world.engine.has_work
    world.step()
    assert repr(world.engine).startswith("Engine(prefilling=1, step 1, PagePool(")
    statistics = world.engine.statistics()
    assert (statistics.num_prefilling, statistics.num_waiting_tokens, statistics.num_prefill_tokens) == (1, 11, 8)
    world.run()
    statistics = world.engine.statistics()
    assert (statistics.num_steps, statistics.num_decode_tokens, statistics.num_finished) == (9, 6, 1)


def test_a_page_that_leaks_is_seen() -> None:
    world = World()
    world.start(make_request("a", tokens(20), 6))
    world.pool.try_allocate(1)
    with pytest.raises(AssertionError, match="own"):
        world.engine.check()
