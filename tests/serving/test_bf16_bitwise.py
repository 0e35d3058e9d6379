"""In bf16, where every bit of the KV counts: a prompt that was sent is the prompt that is computed where it is decoded.

The real model, a prefiller and its decoder, one request at a time: against a decoder whose prefiller does not answer,
with the same chunks, which holds whatever the kernels are; and, where there are native ones, against a colocated
instance that computes all of them at once, in other chunks, on two threads, in a pool so small that some are preempted
and resumed. That the KV itself is the same, bit for bit, is shown on small models in `tests/roles` and `tests/model`.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import Served

from headrace.model import _cpu

pytestmark = [pytest.mark.serving, pytest.mark.timeout(300)]

CHUNK, NUM_TOKENS = 128, 32
LENGTHS = (2, 17, CHUNK + 1, CHUNK + 2, 500)
OPTIONS = ("--dtype", "bf16", "--chunk-tokens", str(CHUNK), "--kv-memory", "256MiB")


@pytest.fixture(scope="module")
def prompts(licence_ids: list[int]) -> list[list[int]]:
    """None is a prefix of another."""
    return [licence_ids[7 * place : 7 * place + length] for place, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def split(smollm2: Path, transport: str) -> Iterator[Served]:
    with Served(smollm2, *OPTIONS, "--require-provider", transport) as served:
        yield served


@pytest.fixture(scope="module")
def crowded(smollm2: Path) -> Iterator[Served]:
    """Three of the six requests enter its pool of 632 tokens, with 64 reserved for what each will write; at their end
    no three fit."""
    with Served(smollm2, *CROWDED, "--kv-memory", str(632 * 23_040)) as served:
        yield served


@pytest.fixture
def alone(smollm2: Path, transport: str) -> Iterator[Served]:
    """Its prefiller is stopped, and taken for gone."""
    with Served(smollm2, *OPTIONS, "--require-provider", transport) as served:
        prefiller = served.pids()["prefiller-0"]
        os.kill(prefiller, signal.SIGSTOP)
        try:
            served.wait_until(lambda: "prefiller-0 has left" in served.log(), "it is taken for gone")
            yield served
        finally:
            os.kill(prefiller, signal.SIGCONT)


def test_what_was_sent_is_decoded_like_what_was_computed_here(
    split: Served, alone: Served, prompts: list[list[int]]
) -> None:
    sent, computed = one_by_one_at_both(prompts, split, alone)
    differing = [length for length, one, other in zip(LENGTHS, sent, computed, strict=True) if one != other]
    assert differing == []
    assert split.gauges()["decoder-0", "prefill_tokens_total"] == 0
    assert alone.gauges()["decoder-0", "prefill_tokens_total"] == sum(length - 1 for length in LENGTHS)


def one_by_one_at_both(prompts: list[list[int]], *both: Served) -> Iterator[list[tuple[int, ...]]]:
    """At the same time: no bit depends on it."""

    def one_by_one(served: Served) -> list[tuple[int, ...]]:
        return [served.complete(prompt, NUM_TOKENS).token_ids for prompt in prompts]

    with ThreadPoolExecutor(len(both)) as pool:
        return pool.map(one_by_one, both)


MANY_TOKENS = 96
CROWDED = ("--colocated", "--dtype", "bf16", "--chunk-tokens", "40", "--page-size", "8", "--threads", "2")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@pytest.mark.skipif(not _cpu.instruction_sets(), reason="plain torch computes a row as the others of its batch allow")
def test_split_colocated_batched_chunked_and_resumed_are_the_same(
    split: Served, crowded: Served, licence_ids: list[int]
) -> None:
    """Sampled: a draw is equal only where all logits that have a chance are."""
    prompts = [licence_ids[150 * place :][: 100 + 13 * place] for place in range(6)]
    with ThreadPoolExecutor(1) as beside:
        crowd = beside.submit(crowded.complete_all, prompts, MANY_TOKENS, at_once=len(prompts), **SAMPLED)
        alone = [split.complete(prompt, MANY_TOKENS, **SAMPLED).token_ids for prompt in prompts]
        together = crowd.result()
    assert crowded.gauges()["colocated-0", "preemptions_total"] > 0
    assert [completion.token_ids for completion in together] == alone
    assert "kernels: native" in crowded.log() and "kernels: native" in split.log()
