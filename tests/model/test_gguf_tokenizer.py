"""The tokenizer that is built from a token list: how it cuts, what is special, and what transformers reads of it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import MERGES, SPECIAL, TEMPLATE, TOKENS, TYPES
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from headrace.errors import InputError
from headrace.model.gguf.tokenizer import build_tokenizer, write_tokenizer

FIELDS: dict[str, Any] = {
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
    "llama.context_length": 512,
}
TINY = build_tokenizer(TOKENS, TYPES, MERGES)


def cut(text: str) -> list[str]:
    return TINY.encode(text).tokens


def test_text_is_merged_byte_by_byte_within_words() -> None:
    assert cut("hello world") == ["hello", "Ġw", "o", "r", "l", "d"]
    assert cut("a   b") == ["a", "ĠĠ", "Ġ", "b"]
    assert cut("é") == ["Ã", "©"]


def test_every_digit_stands_alone_without_the_space_before_it() -> None:
    """`Ġ` before a numeral stays by itself: GPT-2's rule alone would bind it, and keep runs of numerals together."""
    assert cut("x 42") == ["x", "Ġ", "4", "2"]
    assert cut("m² ²²") == ["m", "Â²", "Ġ", "Â²", "Â²"]
    pieces = [piece for piece, _ in TINY.pre_tokenizer.pre_tokenize_str("in 2024, ٣٤ ½")]
    assert pieces == ["in", "Ġ", "2", "0", "2", "4", ",", "Ġ", "Ù£", "Ù¤", "Ġ", "Â½"]


def test_control_tokens_are_found_in_text_and_left_out_when_decoding() -> None:
    encoding = TINY.encode("<|im_start|>hello<|im_end|>")
    assert encoding.tokens == ["<|im_start|>", "hello", "<|im_end|>"]
    assert encoding.ids == [1, TOKENS.index("hello"), 2]
    assert TINY.decode(encoding.ids) == "hello"
    assert TINY.decode(encoding.ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TINY.decode(TINY.encode(text).ids, skip_special_tokens=False) == text


def test_ids_are_places_in_the_list() -> None:
    assert [TINY.token_to_id(token) for token in TOKENS] == list(range(len(TOKENS)))
    assert TINY.get_vocab_size() == len(TOKENS)


def test_transformers_reads_the_same_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(FIELDS, tmp_path)
    theirs, stored = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hello world", "x 42 ²", "<|im_start|>user\nhello<|im_end|>", " ,a  .b", ""):
        assert theirs(text)["input_ids"] == stored.encode(text).ids == TINY.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token, theirs.unk_token) == (
        *SPECIAL[1:],
        SPECIAL[2],
        SPECIAL[0],
    )
    assert theirs.model_max_length == 512
    assert theirs.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello\n"


def test_the_chat_template_is_stored_as_it_is(tmp_path: Path) -> None:
    write_tokenizer(FIELDS | {"tokenizer.chat_template": "{{ 'é' }}\r\n{# end #}"}, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_bytes() == "{{ 'é' }}\r\n{# end #}".encode()


@pytest.mark.parametrize("name", FIELDS)
def test_a_list_that_lacks_something_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        write_tokenizer({key: value for key, value in FIELDS.items() if key != name}, tmp_path)
    assert caught.value.field == name


def test_kinds_of_tokens_that_we_do_not_know_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be normal \(1\) or control \(3\), is 6"):
        write_tokenizer(FIELDS | {"tokenizer.ggml.token_type": [6, *TYPES[1:]]}, tmp_path)
