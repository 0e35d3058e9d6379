"""Prefillers and decoders of other degrees than each other, as processes: the text is transformers', and KV travels.

In fp32. Over four ranks each of the tiny Qwen3's two KV heads is on two of them; the tiny DeepSeek's latents are on all
ranks of a prefiller, and each group of its decoder takes them from one.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from oracle import Oracle
from served import Served
from tiny_deepseek import write_deepseek
from tiny_qwen import write_qwen

pytestmark = [pytest.mark.serving, pytest.mark.timeout(120)]

OPTIONS = ("--dtype", "fp32", "--chunk-tokens", "64", "--kv-memory", "16MiB", "--page-size", "8")
LENGTHS = (2, 60, 100, 180)
NUM_TOKENS = 24


@pytest.mark.parametrize(
    ("write", "ranks"),
    [
        pytest.param(write_qwen, ("--decoder-tp", "2"), id="1 to 2"),
        pytest.param(write_qwen, ("--prefiller-tp", "2"), id="2 to 1"),
        pytest.param(write_qwen, ("--prefiller-tp", "4", "--decoder-tp", "2"), id="4 to 2"),
        pytest.param(write_deepseek, ("--prefiller-tp", "2", "--decoder-dp", "2"), id="latents of 2 to 2 groups"),
    ],
)
def test_text_is_transformers_whatever_the_degrees(
    write: Callable[[Path], Path], ranks: tuple[str, ...], tmp_path: Path, transport: str
) -> None:
    directory = write(tmp_path)
    prompts = [random.Random(length).choices(range(256), k=length) for length in LENGTHS]
    with Served(directory, *OPTIONS, *ranks, "--require-provider", transport) as served:
        texts = served.complete_all(prompts, NUM_TOKENS, at_once=len(prompts))
        again = served.complete(prompts[-1], NUM_TOKENS)
        gauges = served.gauges()
        served.wait_idle()
    judged = Oracle(directory).judge_all(prompts, [text.token_ids for text in texts])
    assert [length for length, each in zip(LENGTHS, judged, strict=True) if each.is_clear and not each.is_right] == []
    assert sum(each.is_clear for each in judged) >= 3, "too many prompts were left out"
    assert again.token_ids == texts[-1].token_ids
    assert gauges["decoder-0", "prefill_tokens_total"] == 0
    assert gauges["decoder-0", "tickets_ready_total"] >= len(LENGTHS)
    assert gauges["decoder-0", "wrong_bytes_total"] == 0
