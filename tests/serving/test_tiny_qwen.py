"""A Qwen3 as its published directories are, only tiny, served by its path: text is transformers', chats find their way.

The rope is scaled as its model card says: max_position_embeddings stays as it was, and prompts are longer than that.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracle import Oracle
from served import Served
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = [pytest.mark.serving, pytest.mark.timeout(120)]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- if message.tool_calls or message.reasoning_content is string %}{{- 'never' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OPTIONS = ("--dtype", "fp32", "--chunk-tokens", "64", "--kv-memory", "16MiB")
LENGTHS = (1, 30, 100, 180)
NUM_TOKENS = 64


def byte_level_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+"), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


def write_weights(directory: Path) -> None:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=320,  # more than the tokenizer has
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape)
            weight.copy_(1 + drawn / 3 if "norm" in name else drawn * (1.5 / weight.shape[-1] ** 0.5))
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the fields of its config.json where the published ones have them."""
    made = tmp_path_factory.mktemp("qwen3")
    write_weights(made)
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(made / "tokenizer.json"))
    end, plain_end = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = json.loads((made / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    config |= {"rope_theta": 10_000, "rope_scaling": ROPE, "bos_token_id": plain_end, "eos_token_id": end}
    config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2}
    (made / "config.json").write_text(json.dumps(config))
    (made / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": [end, plain_end]}))
    chat = {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(chat))
    return made


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
