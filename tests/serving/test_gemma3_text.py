"""The second built-in model, served by its name: its text is transformers', its tokens are those it was trained with.

In fp32, through a prefiller and a decoder. It has one KV head and windows of 512 tokens in 15 of 18 layers; one prompt
is longer than that, and one grows beyond it while it is decoded.
"""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from oracle import Oracle
from served import Served
from tokenizers import Tokenizer

from headrace.model.builtin import GEMMA3, ensure_builtin
from headrace.model.checkpoint import read_shape
from headrace.model.progress import no_progress

pytestmark = [pytest.mark.serving, pytest.mark.timeout(300)]

LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"
NUM_TOKENS = 16
LENGTHS = (1, 77, 505, 700)
OPTIONS = ("--dtype", "fp32", "--chunk-tokens", "128", "--max-model-len", "1024", "--kv-memory", "256MiB")


@pytest.fixture(scope="module")
def directory() -> Path:
    """Fetched at first."""
    return ensure_builtin(no_progress, model=GEMMA3)


@pytest.fixture(scope="module")
def gemma_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def split(directory: Path, transport: str) -> Iterator[Served]:
    with Served(Path(GEMMA3.name), *OPTIONS, "--require-provider", transport) as served:
        yield served


def test_it_is_what_was_published(directory: Path) -> None:
    shape = read_shape(directory)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (18, 4, 1, 256)
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (640, 2048, 262_144)
    assert (shape.rope_theta, shape.max_model_len, shape.attention_scale) == (1e6, 32_768, 256**-0.5)
    local = shape.local_attention
    assert local is not None and (len(local.layers), local.window, local.rope_theta) == (15, 512, 1e4)
    assert set(range(18)) - set(local.layers) == {5, 11, 17}


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        ("The capital of France is", [818, 5279, 529, 7001, 563]),
        ("  two  spaces\n\n\nand\ttabs\t\t ", [138, 13498, 138, 35220, 109, 624, 255968, 39218, 255969, 236743]),
        ("你好 世界", [144626, 84679]),
        ("😀👩\u200d👧", [242398, 243767, 237243, 244814]),
        ("<start_of_turn>user\nhi<end_of_turn>", [105, 2364, 107, 2202, 106]),
        ("    return x**2\n", [140, 2060, 1123, 1018, 236778, 107]),
        ("<b>bold</b> 3.14", [200, 15640, 209, 236743, 236800, 236761, 236770, 236812]),
        ("naïve Ωμέγα \U0001f9ffஜ", [1789, 238527, 560, 76858, 20961, 103132, 236743, 248979, 238058]),
        ("\x00\x07\r\n", [238, 245, 251, 107]),
    ],
)
def test_text_is_cut_as_the_published_tokenizer_cuts_it(
    gemma_tokenizer: Tokenizer, text: str, token_ids: list[int]
) -> None:
    """The ids are that tokenizer's own."""
    assert gemma_tokenizer.encode(text).ids == [2, *token_ids]
    assert gemma_tokenizer.encode(text, add_special_tokens=False).ids == token_ids
    assert gemma_tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_greedy_text_equals_transformers_within_the_window_and_beyond(
    directory: Path, split: Served, gemma_tokenizer: Tokenizer
) -> None:
    bos, *licence_ids = gemma_tokenizer.encode(LICENCE.read_text()).ids
    prompts = [[bos, *licence_ids[50 * place :]][:length] for place, length in enumerate(LENGTHS)]
    texts = split.complete_all(prompts, NUM_TOKENS, at_once=len(prompts))
    oracle = Oracle(directory)
    judged = oracle.judge_all(prompts, [text.token_ids for text in texts])
    clear = [place for place, judgement in enumerate(judged) if judgement.is_clear]
    print(f"margins: {[judgement.least_margin for judgement in judged]}")
    assert all(len(text.token_ids) == NUM_TOKENS for text in texts)
    assert [LENGTHS[place] for place in clear if not judged[place].is_right] == []
    assert len(clear) >= 3, "too many prompts were left out"
    assert {2, 3} & set(clear), "no prompt left that reaches beyond the window"
    gauges = split.gauges()
    assert gauges["prefiller-0", "prefill_tokens_total"] >= sum(LENGTHS) - len(LENGTHS)
    assert gauges["decoder-0", "prefill_tokens_total"] == 0


def test_a_prompt_of_text_begins_with_the_token_that_the_model_wants(split: Served) -> None:
    by_ids = split.complete([2, 818, 5279, 529, 7001, 563], 4)
    with split.client() as client:
        answer = client.completions.create(
            model=split.name, prompt="The capital of France is", max_tokens=4, temperature=0.0
        )
    assert answer.usage is not None and answer.usage.prompt_tokens == 6
    assert answer.choices[0].text == by_ids.text


def test_without_a_chat_template_a_chat_is_refused_and_the_way_out_is_named(split: Served) -> None:
    with split.client() as client, pytest.raises(openai.BadRequestError, match="no chat template: /v1/completions"):
        client.chat.completions.create(model=split.name, messages=[{"role": "user", "content": "hi"}])
