"""The prefiller's queue: which chunks come next, what is told at the end, and what dropping and failing leave."""

import random

import pytest
from scripted_model import VOCABULARY, ScriptedModel, kv_of

from headrace.engine.prefill_queue import PrefillQueue, Prompt
from headrace.engine.requests import Tier
from headrace.engine.schedule import Chunk
from headrace.errors import InputError
from headrace.kvcache.layout import num_pages_for
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import PrefixIndex

PAGE_SIZE = 4


def prompt(
    key: str, num_tokens: int, *, computed: int = 0, tier: Tier = "interactive", first_page: int = 0
) -> Prompt[str]:
    pages = range(first_page, first_page + num_pages_for(num_tokens - 1, PAGE_SIZE))
    token_ids = [(len(key) + 3 * number) % VOCABULARY for number in range(num_tokens)]
    return Prompt(key=key, tier=tier, token_ids=token_ids, pages=tuple(pages), computed=computed)


def run_all(queue: PrefillQueue[str], now: float = 0.0) -> list[list[tuple[str, int, int]]]:
    """The chunks of each step until nothing is queued."""
    steps = []
    while (step := queue.next_step(now)) is not None:
        steps.append([(chunk.key, chunk.begin, chunk.end) for chunk in step.chunks])
        queue.commit(step, now)
    return steps


def test_an_empty_queue_has_no_step() -> None:
    assert PrefillQueue[str](chunk_tokens=8).next_step(0.0) is None


def test_a_prompt_is_computed_in_chunks_up_to_its_last_token() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    queue.add(prompt("a", 20, computed=4), 0.0)
    assert run_all(queue) == [[("a", 4, 12)], [("a", 12, 19)]]
    assert queue.num_computed_tokens == 15


def test_chunks_follow_the_policy_of_the_engine() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    queue.add(prompt("flex", 5, tier="flex"), 0.0)
    queue.add(prompt("a", 7), 0.0)
    queue.add(prompt("b", 12), 0.0)
    assert run_all(queue) == [[("a", 0, 6), ("b", 0, 2)], [("b", 2, 10)], [("b", 10, 11), ("flex", 0, 4)]]


def test_a_long_background_prompt_is_computed_in_chunks_between_interactive_ones() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    queue.add(prompt("long", 30, tier="flex"), 0.0)
    computed = []
    for name in ("a", "b"):
        step = queue.next_step(0.0)
        assert step is not None
        queue.add(prompt(name, 6), 0.0)  # comes while that step runs, and is in the next one
        queue.commit(step, 0.0)
        computed.append([chunk.key for chunk in step.chunks])
    steps = [*computed, *([key for key, _, _ in step] for step in run_all(queue))]
    assert steps == [["long"], ["a", "long"], ["b", "long"], ["long"], ["long"]]


def test_rows_ask_for_no_logits_and_write_into_the_prompts_pages() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=6)
    model = ScriptedModel(pool := PagePool(8, PrefixIndex()), PAGE_SIZE)
    pages = pool.try_allocate(4)
    assert pages is not None
    random.Random(1).shuffle(pages)
    token_ids = list(range(14))
    queue.add(Prompt(key="a", tier="flex", token_ids=token_ids, pages=pages, computed=0), 0.0)
    while (step := queue.next_step(0.0)) is not None:
        assert model.run(step.rows) == []
        queue.commit(step, 0.0)
    assert (model.kv[model.slots(pages, 0, 13)] == kv_of(token_ids[:13], 0)).all()
    assert (model.kv[model.slots(pages, 13, 16)] < 0).all()  # the last token is not ours to compute


def test_queue_and_prefill_times_are_told_apart() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    queue.add(prompt("a", 9), 1.0)
    queue.add(prompt("b", 15, computed=4), 2.0)
    times = iter(range(3, 20))
    done = []
    while (step := queue.next_step(next(times))) is not None:
        done += queue.commit(step, next(times))
    facts = [(one.key, one.num_computed, one.queue_s, one.prefill_s) for one in done]
    assert facts == [("a", 8, 2.0, 1.0), ("b", 10, 3.0, 3.0)]


def test_a_dropped_prompt_is_planned_no_more() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    queue.add(prompt("a", 30), 0.0)
    queue.add(prompt("b", 5), 0.0)
    queue.drop("a")
    queue.drop("a")
    assert run_all(queue) == [[("b", 0, 4)]]


def test_a_prompt_that_is_dropped_in_its_last_step_is_not_done() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    queue.add(prompt("a", 5), 0.0)
    step = queue.next_step(0.0)
    assert step is not None
    queue.drop("a")
    queue.add(prompt("a", 5, first_page=4), 0.0)
    assert queue.commit(step, 1.0) == []
    assert run_all(queue) == [[("a", 0, 4)]]


def test_whoever_was_in_a_failed_step_is_gone_and_the_others_go_on() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    for key in ("a", "b", "c"):
        queue.add(prompt(key, 5), 0.0)
    step = queue.next_step(0.0)
    assert step is not None
    queue.drop("b")
    assert queue.fail(step) == ["a"]
    assert run_all(queue) == [[("c", 0, 4)]]


def test_steps_are_numbered_and_run_one_at_a_time() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    queue.add(prompt("a", 30), 0.0)
    first = queue.next_step(0.5)
    assert first is not None
    assert (first.number, first.began_at, first.chunks) == (1, 0.5, (Chunk(key="a", begin=0, end=8),))
    with pytest.raises(AssertionError, match="step 1 is running"):
        queue.next_step(0.5)
    queue.commit(first, 1.0)
    with pytest.raises(AssertionError, match="step 1 is not running"):
        queue.commit(first, 1.0)
    second = queue.next_step(1.0)
    assert second is not None and second.number == 2


def test_what_is_no_work_is_refused() -> None:
    with pytest.raises(InputError, match="chunk_tokens: must be at least 1, is 0"):
        PrefillQueue[str](chunk_tokens=0)
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    with pytest.raises(InputError, match=r"computed: must be in 0\.\.7, before the last token, is 8"):
        queue.add(prompt("a", 9, computed=8), 0.0)
    queue.add(prompt("a", 9), 0.0)
    with pytest.raises(InputError, match="key: must be new, 'a' is queued"):
        queue.add(prompt("a", 9), 0.0)


def test_a_queue_shows_its_state() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    queue.add(prompt("a", 30), 0.0)
    step = queue.next_step(0.0)
    assert step is not None
    queue.commit(step, 0.0)
    assert (queue.num_queued, queue.num_queued_tokens, queue.num_steps) == (1, 21, 1)
    assert repr(queue) == "PrefillQueue(1 prompts, 21 tokens, step 1)"


def compute(queue: PrefillQueue[str], num_prompts: int, now: float, *, stopped_s: float = 0.0) -> float:
    """Prompts of a few tokens more than a chunk; a step takes 0.1 s and 0.05 s for each token -> now."""
    for nth in range(num_prompts):
        queue.add(prompt("a", 9 + nth % 7), now)
        while (step := queue.next_step(now)) is not None:
            now += 0.1 + 0.05 * sum(chunk.end - chunk.begin for chunk in step.chunks) + stopped_s
            queue.commit(step, now)
    return now


def test_its_speed_is_that_of_the_last_steps() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    assert queue.prefill_speed(0.0) is None
    speed = queue.prefill_speed(compute(queue, 40, 0.0))
    assert speed is not None and speed.rate == pytest.approx(8 / (0.1 + 8 * 0.05), rel=0.05)
    assert speed.step_s == pytest.approx(0.1, rel=0.3)


def test_a_step_in_which_the_process_was_stopped_says_little_of_its_speed() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    now = compute(queue, 40, 0.0)
    now = compute(queue, 40, compute(queue, 1, now, stopped_s=30.0))
    speed = queue.prefill_speed(now)
    assert speed is not None and speed.rate == pytest.approx(8 / (0.1 + 8 * 0.05), rel=0.2)


def test_a_speed_is_forgotten_when_nothing_was_computed_for_long() -> None:
    queue: PrefillQueue[str] = PrefillQueue(chunk_tokens=8)
    now = compute(queue, 40, 0.0)
    assert queue.prefill_speed(now + 59.9) is not None and queue.prefill_speed(now + 60.1) is None
