"""The text is the model's, however it is served: against transformers, colocated against split, alone and in company.

In fp32, on the real model. Prompts are cut from the licence, a text that does not change; see `oracle` for when a text
is right.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from oracle import Judgement, Oracle
from served import Completion, Served

from headrace.engine.requests import SamplingParams

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

PAGE, CHUNK, NUM_TOKENS, AT_ONCE = 16, 128, 40, 16
LENGTHS = (
    *(1, 2, 5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1),
    *(50, 77, 100, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1),
    *(300, 400, 500, 5 * CHUNK + 3, 900, 2000),
)
SAMPLING = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=7)
OPTIONS = ("--dtype", "fp32", "--chunk-tokens", str(CHUNK), "--page-size", str(PAGE), "--kv-memory", "1GiB")


@pytest.fixture(scope="module")
def split(smollm2: Path, transport: str) -> Iterator[Served]:
    with Served(smollm2, *OPTIONS, "--require-provider", transport) as served:
        yield served


@pytest.fixture(scope="module")
def colocated(smollm2: Path) -> Iterator[Served]:
    with Served(smollm2, *OPTIONS, "--colocated") as served:
        yield served


@pytest.fixture(scope="module")
def prompts(licence_ids: list[int]) -> list[list[int]]:
    """One of each length, none a prefix of another: nothing is in a prefix cache."""
    draw = random.Random(1)
    begins = [draw.randrange(len(licence_ids) - length) for length in LENGTHS]
    return [licence_ids[begin : begin + length] for begin, length in zip(begins, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def written(split: Served, colocated: Served, prompts: list[list[int]]) -> tuple[list[Completion], list[Completion]]:
    """Greedy, by the split deployment and by the colocated one, sixteen at once as long as there are so many."""
    return by_both(split, colocated, prompts)


@pytest.fixture(scope="module")
def texts(written: tuple[list[Completion], list[Completion]]) -> list[Completion]:
    """By the split deployment."""
    return written[0]


@pytest.fixture(scope="module")
def judgements(oracle: Oracle, prompts: list[list[int]], texts: list[Completion]) -> list[Judgement]:
    return oracle.judge_all(prompts, [text.token_ids for text in texts])


@pytest.fixture(scope="module")
def clear(judgements: list[Judgement]) -> list[int]:
    """The places of the prompts whose margins are wide all along."""
    return [place for place, judgement in enumerate(judgements) if judgement.is_clear]


def test_greedy_text_equals_transformers_for_prompts_of_1_to_2000_tokens(
    judgements: list[Judgement], clear: list[int], texts: list[Completion]
) -> None:
    print(f"{len(judgements) - len(clear)} of {len(judgements)} prompts left out: margins below 1e-3")
    assert all(len(text.token_ids) == NUM_TOKENS for text in texts)
    assert [LENGTHS[place] for place in clear if not judgements[place].is_right] == []
    assert len(clear) >= len(LENGTHS) * 5 // 6, "too many prompts were left out"


def test_split_really_splits(split: Served, texts: list[Completion], prompts: list[list[int]]) -> None:
    """Every prompt of two tokens and more was computed by the prefiller, nothing by the decoder."""
    gauges = split.gauges()
    assert gauges["prefiller-0", "prefill_tokens_total"] >= sum(len(prompt) - 1 for prompt in prompts)
    assert gauges["decoder-0", "prefill_tokens_total"] == 0
    assert gauges["decoder-0", "tickets_ready_total"] >= sum(length > 1 for length in LENGTHS)
    assert {text.cached_tokens for text in texts} == {0}


def test_colocated_and_split_write_the_same(
    written: tuple[list[Completion], list[Completion]], texts: list[Completion], clear: list[int]
) -> None:
    _, others = written
    assert differing({place: others[place] for place in clear}, texts) == []


def test_sampled_text_is_the_same_too(
    split: Served, colocated: Served, oracle: Oracle, prompts: list[list[int]]
) -> None:
    fields = {
        "temperature": SAMPLING.temperature,
        "top_k": SAMPLING.top_k,
        "top_p": SAMPLING.top_p,
        "seed": SAMPLING.seed,
    }
    asked = prompts[4:20:2]
    here, there = by_both(split, colocated, asked, **fields)
    judgements = oracle.judge_all(asked, [text.token_ids for text in here], SAMPLING)
    num_clear = 0
    for prompt, one, other, judgement in zip(asked, here, there, judgements, strict=True):
        if judgement.is_clear:
            num_clear += 1
            assert judgement.is_right, f"{len(prompt)} tokens"
            assert one.token_ids == other.token_ids, f"{len(prompt)} tokens"
    assert num_clear >= 5


def test_a_prefix_hit_changes_nothing_and_is_told(split: Served, prompts: list[list[int]], clear: list[int]) -> None:
    """The same prompt again, and one that shares its beginning: hits of whole pages on both sides."""
    (place,) = [place for place in clear if LENGTHS[place] >= 500][:1]
    prompt = prompts[place]
    first = split.complete(prompt, NUM_TOKENS)
    again = split.complete(prompt, NUM_TOKENS)
    assert again.token_ids == first.token_ids
    whole_pages = (len(prompt) - 1) // PAGE * PAGE
    assert again.cached_tokens == whole_pages
    # Shares 320 tokens and no more, then asks for something else.
    other = [*prompt[:320], *prompts[place - 1][:90]]
    assert split.complete(other, 8).cached_tokens == 320


def test_each_alone_after_a_whole_transfer_without_digests_writes_what_sixteen_at_once_wrote(
    smollm2: Path, transport: str, prompts: list[list[int]], texts: list[Completion], clear: list[int]
) -> None:
    how = ("--transfer", "whole", "--no-verify-kv", "--require-provider", transport)
    with Served(smollm2, *OPTIONS, *how) as served:
        others = {place: served.complete(prompts[place], NUM_TOKENS) for place in clear[::4]}
    assert differing(others, texts) == []


def by_both(
    split: Served, colocated: Served, prompts: Sequence[Sequence[int]], **fields: Any
) -> tuple[list[Completion], list[Completion]]:
    """At the same time: no text depends on it."""
    with ThreadPoolExecutor(2) as pool:
        here, there = (
            pool.submit(served.complete_all, prompts, NUM_TOKENS, at_once=AT_ONCE, **fields)
            for served in (split, colocated)
        )
        return here.result(), there.result()


def differing(others: Mapping[int, Completion], texts: Sequence[Completion]) -> list[int]:
    """Lengths of the prompts whose texts differ."""
    return [LENGTHS[place] for place, other in others.items() if other.token_ids != texts[place].token_ids]
