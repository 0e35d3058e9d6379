"""What is read of a model's directory besides its weights, and what is refused at the start."""

import json
from pathlib import Path

import pytest
from tiny_vocabulary import ENDOFTEXT, IM_END, byte_fallback_tokenizer, byte_level_tokenizer, write_model

from headrace.errors import InputError
from headrace.gateway.front.vocabulary import load_vocabulary


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path, byte_level_tokenizer(), eos="<|im_end|>")


def write(file: Path, **content: object) -> None:
    file.write_text(json.dumps(content))


def test_the_generations_own_eos_goes_before_the_models_and_the_tokenizers_is_added(directory: Path) -> None:
    write(directory / "config.json", eos_token_id=9)
    assert load_vocabulary(directory).eos_token_ids == (IM_END, 9)
    write(directory / "generation_config.json", eos_token_id=[ENDOFTEXT, 7])
    assert load_vocabulary(directory).eos_token_ids == (ENDOFTEXT, IM_END, 7)


def test_without_any_eos_nothing_ends_an_answer_but_its_length(directory: Path) -> None:
    write(directory / "config.json", eos_token_id=None)
    write(directory / "tokenizer_config.json")
    assert load_vocabulary(directory).eos_token_ids == ()


def test_the_model_may_know_more_ids_than_its_tokenizer(directory: Path) -> None:
    write(directory / "config.json", vocab_size=5000)
    assert load_vocabulary(directory).size == 5000
    write(directory / "config.json", text_config={"vocab_size": 6000})
    assert load_vocabulary(directory).size == 6000
    (directory / "config.json").unlink()
    vocabulary = load_vocabulary(directory)
    assert vocabulary.size == vocabulary.tokenizer.get_vocab_size()


def test_special_tokens_are_found_by_their_role_as_text_or_as_object(directory: Path) -> None:
    write(directory / "special_tokens_map.json", bos_token="<s>", eos_token="</s>", additional_special_tokens=["x"])
    write(directory / "tokenizer_config.json", eos_token={"content": "<|im_end|>"}, pad_token=None, model_max_length=5)
    assert load_vocabulary(directory).special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def test_a_tokenizer_that_cuts_or_pads_does_neither_here(directory: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert len(load_vocabulary(directory).encode("q" * 10, with_specials=True)) == 10


def test_specials_are_added_as_the_tokenizer_says_and_only_when_asked(tmp_path: Path) -> None:
    vocabulary = load_vocabulary(write_model(tmp_path, byte_fallback_tokenizer(), eos="</s>"))
    plain = vocabulary.encode("the", with_specials=False)
    assert vocabulary.encode("the", with_specials=True) == [1, *plain]


def test_no_token_is_longer_than_the_longest(directory: Path) -> None:
    vocabulary = load_vocabulary(directory)
    text = "The water ran down the hill and over the wheel" * 3
    token_ids = vocabulary.encode(text, with_specials=False)
    assert len(text) <= len(token_ids) * vocabulary.longest_token
    assert vocabulary.longest_token == max(map(len, vocabulary.tokenizer.get_vocab()))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^tokenizer: must be a model's directory with a tokenizer\.json"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "must be a tokenizer"),
        ("config.json", "{", "must be a JSON file"),
        ("generation_config.json", "[]", "must hold a JSON object, holds a list"),
    ],
)
def test_a_file_that_is_broken_is_refused_by_its_name(directory: Path, name: str, content: str, message: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(InputError, match=rf"^tokenizer: .*{name} {message}"):
        load_vocabulary(directory)
