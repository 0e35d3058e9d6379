"""In bf16, where every bit of the KV counts: a prompt that was sent is the prompt that is computed where it is decoded.

The real model, one request at a time, so that both deployments compute the same chunks in the same batches: a prefiller
and its decoder, against a decoder whose prefiller does not answer. That the KV itself is the same, bit for bit, is
shown on a small model in `tests/roles`.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served

pytestmark = [pytest.mark.serving, pytest.mark.timeout(300)]

CHUNK, NUM_TOKENS = 128, 32
LENGTHS = (2, 17, CHUNK + 1, CHUNK + 2, 500)
OPTIONS = ("--dtype", "bf16", "--chunk-tokens", str(CHUNK), "--kv-memory", "256MiB")


@pytest.fixture(scope="module")
def prompts(licence_ids: list[int]) -> list[list[int]]:
    """None is a prefix of another."""
    return [licence_ids[7 * place : 7 * place + length] for place, length in enumerate(LENGTHS)]


@pytest.fixture
def split(smollm2: Path) -> Iterator[Served]:
    with Served(smollm2, *OPTIONS) as served:
        yield served


@pytest.fixture
def alone(smollm2: Path) -> Iterator[Served]:
    """Its prefiller is stopped, and taken for gone."""
    with Served(smollm2, *OPTIONS) as served:
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
    sent = [split.complete(prompt, NUM_TOKENS).token_ids for prompt in prompts]
    computed = [alone.complete(prompt, NUM_TOKENS).token_ids for prompt in prompts]
    differing = [length for length, one, other in zip(LENGTHS, sent, computed, strict=True) if one != other]
    assert differing == []
    assert split.gauges()["decoder-0", "prefill_tokens_total"] == 0
    assert alone.gauges()["decoder-0", "prefill_tokens_total"] == sum(length - 1 for length in LENGTHS)
