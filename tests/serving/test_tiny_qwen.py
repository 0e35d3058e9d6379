"""A Qwen3 as its published directories are, only tiny, served by its path: text is transformers', chats find their way.

The rope is scaled as its model card says: max_position_embeddings stays as it was, and prompts are longer than that.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle import Oracle
from served import Served
from tiny_qwen import write_qwen
from tokenizers import Tokenizer

pytestmark = [pytest.mark.serving, pytest.mark.timeout(120)]

OPTIONS = ("--dtype", "fp32", "--chunk-tokens", "64", "--kv-memory", "16MiB")
LENGTHS = (1, 30, 100, 180)
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def split(directory: Path, transport: str) -> Iterator[Served]:
    with Served(directory, *OPTIONS, "--require-provider", transport) as served:
        yield served


def test_greedy_text_is_transformers_beyond_the_original_context(directory: Path, split: Served) -> None:
    prompts = [random.Random(length).choices(range(256), k=length) for length in LENGTHS]
    texts = split.complete_all(prompts, NUM_TOKENS, at_once=len(prompts))
    judged = Oracle(directory).judge_all(prompts, [text.token_ids for text in texts])
    assert all(len(text.token_ids) == NUM_TOKENS for text in texts)
    print(f"margins: {[judgement.least_margin for judgement in judged]}")
    assert [length for length, each in zip(LENGTHS, judged, strict=True) if each.is_clear and not each.is_right] == []
    assert judged[-1].is_clear and sum(each.is_clear for each in judged) >= 3, "too many prompts were left out"
    prefilled = sum(LENGTHS) - len(LENGTHS)  # at least
    split.wait_until(lambda: split.gauges()["prefiller-0", "prefill_tokens_total"] >= prefilled, "it was prefilled")
    assert split.gauges()["decoder-0", "prefill_tokens_total"] == 0


def test_a_chat_is_marked_up_by_the_template_of_the_tokenizers_configuration(directory: Path, split: Served) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    turns = [("user", "hi"), ("assistant", "<think>\nwell</think>\n\nHo."), ("user", "and?")]
    told = "".join(f"<|im_start|>{role}\n{text.split('</think>')[-1].lstrip()}<|im_end|>\n" for role, text in turns)
    with split.client() as client:
        answer = client.chat.completions.create(
            model=split.name,
            messages=[{"role": role, "content": text} for role, text in turns],
            max_tokens=4,
            temperature=0.0,
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(f"{told}<|im_start|>assistant\n").ids)
