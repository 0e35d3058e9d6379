"""Tokens to text: pieces against the decode of the whole, stop strings against a model that reads by character."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tiny_vocabulary import IM_END, byte_fallback_tokenizer, byte_level_tokenizer, write_model
from tokenizers import Tokenizer, decoders, models

from headrace.gateway.front.text import UNDECODABLE, ChoiceText, Detokenizer, StopStrings
from headrace.gateway.front.vocabulary import Vocabulary, load_vocabulary


def marked_words_tokenizer() -> Tokenizer:
    """Spaces marked in the tokens, and no bytes: the first one's space is dropped."""
    vocabulary = {token: index for index, token in enumerate(("<unk>", "▁", "▁a", "b", "▁▁", "."))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def continued_words_tokenizer() -> Tokenizer:
    """Tokens that go on with a word say so; the others begin with a space."""
    tokens = ("[UNK]", "mill", "##er", "##s", ".", "do", "n't")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "bytes": (byte_level_tokenizer, "<|im_end|>"),
    "byte fallback": (byte_fallback_tokenizer, "</s>"),
    "marked words": (marked_words_tokenizer, "<unk>"),
    "continued words": (continued_words_tokenizer, "[UNK]"),
}


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    return {
        name: load_vocabulary(write_model(tmp_path_factory.mktemp("model"), make(), eos=eos))
        for name, (make, eos) in TOKENIZERS.items()
    }


@pytest.fixture(scope="module")
def vocabulary(vocabularies: dict[str, Vocabulary]) -> Vocabulary:
    return vocabularies["bytes"]


def bytes_as_tokens(vocabulary: Vocabulary, raw: bytes) -> list[int]:
    """One token a byte, however the tokenizer would have merged them."""
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)} if vocabulary.byte_ids else byte_alphabet()
    return [token_id for byte in raw if (token_id := vocabulary.tokenizer.token_to_id(names[byte])) is not None]


def byte_alphabet() -> dict[int, str]:
    """The printable stand-ins of a byte-level tokenizer (Source: GPT-2's bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + nth) for nth, byte in enumerate(others)}


def pieces_of(vocabulary: Vocabulary, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(vocabulary)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


# ---- detokenising ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_pieces_add_up_to_the_decode_of_all_ids(
    vocabularies: dict[str, Vocabulary], name: str, data: st.DataObject
) -> None:
    vocabulary = vocabularies[name]
    any_id = st.integers(0, vocabulary.size - 1)
    some_ids = st.sampled_from(sorted(vocabulary.byte_ids | vocabulary.special_ids) or [0]) | st.integers(0, 12)
    token_ids = data.draw(st.lists(any_id | some_ids | st.just(2**31 - 1), max_size=40))
    assert "".join(pieces_of(vocabulary, token_ids)) == vocabulary.decode(token_ids)


@pytest.mark.parametrize("name", ["bytes", "byte fallback"])
@given(raw=st.binary(max_size=24) | st.text(max_size=8).map(str.encode))
@example(raw=b"\xf0\x9f\x98\x80\xff")  # a whole character, then a byte that is none: a byte run is spoilt as a whole
@example(raw=b"\x82\x82\x82\x82\x82\x82")
@example(raw=b"\xef\xbf\xbd" * 6)  # U+FFFD itself
def test_bytes_one_by_one_add_up_to_their_decode(vocabularies: dict[str, Vocabulary], name: str, raw: bytes) -> None:
    token_ids = bytes_as_tokens(vocabularies[name], raw)
    assert len(token_ids) == len(raw)
    assert "".join(pieces_of(vocabularies[name], token_ids)) == vocabularies[name].decode(token_ids)


@pytest.mark.parametrize("name", ["bytes", "byte fallback"])
@given(text=st.text(max_size=12))
def test_a_character_split_over_tokens_is_never_shown_broken(
    vocabularies: dict[str, Vocabulary], name: str, text: str
) -> None:
    token_ids = bytes_as_tokens(vocabularies[name], text.encode())
    pieces = pieces_of(vocabularies[name], token_ids)
    assert "".join(pieces).replace(UNDECODABLE, "") == vocabularies[name].decode(token_ids).replace(UNDECODABLE, "")
    if UNDECODABLE not in text:
        assert not any(UNDECODABLE in piece for piece in pieces)


def test_every_settled_character_comes_with_its_last_token(vocabulary: Vocabulary) -> None:
    assert pieces_of(vocabulary, bytes_as_tokens(vocabulary, "a水b".encode())) == ["a", "", "", "水", "b", ""]


def test_what_is_incomplete_at_the_end_is_flushed_as_the_decode_has_it(vocabulary: Vocabulary) -> None:
    token_ids = bytes_as_tokens(vocabulary, "a水".encode()[:-1])
    assert pieces_of(vocabulary, token_ids) == ["a", "", "", UNDECODABLE]


def test_special_tokens_add_nothing_wherever_they_stand(vocabulary: Vocabulary) -> None:
    first, second, third = bytes_as_tokens(vocabulary, "水".encode())
    assert pieces_of(vocabulary, [IM_END, first, IM_END, second, third, IM_END]) == ["", "", "", "", "水", "", ""]


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_short_runs_of_what_decoders_treat_in_special_ways_add_up(
    vocabularies: dict[str, Vocabulary], num: int
) -> None:
    """All of them: a space at the beginning, bytes, runs of bytes that a token without text ends, U+FFFD itself."""
    vocabulary = vocabularies["byte fallback"]
    tokens = ("▁", "▁the", "x", UNDECODABLE, "", "<s>", "<0x20>", "<0x41>", "<0xE6>")
    ids = [token_id for token in tokens if (token_id := vocabulary.tokenizer.token_to_id(token)) is not None]
    assert len(ids) == len(tokens)
    for token_ids in itertools.product(ids, repeat=num):
        assert "".join(pieces_of(vocabulary, token_ids)) == vocabulary.decode(token_ids), token_ids


def test_an_endless_run_of_broken_bytes_costs_the_same_for_every_token(vocabulary: Vocabulary) -> None:
    decoded: list[int] = []

    class Watched(Vocabulary):
        def decode(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return super().decode(token_ids)

    (broken,) = bytes_as_tokens(vocabulary, b"\x82")
    detokenizer = Detokenizer(Watched(**vars(vocabulary)))
    assert {detokenizer.push(broken) for _ in range(500)} == {""}
    assert max(decoded) <= 4
    assert detokenizer.flush() == UNDECODABLE * 500


@pytest.fixture(scope="module")
def builtin(smollm2: Path) -> Vocabulary:
    return load_vocabulary(smollm2)


@given(token_ids=st.lists(st.integers(0, 49_160) | st.integers(0, 280), max_size=40))
def test_the_pieces_of_the_built_in_model_add_up(builtin: Vocabulary, token_ids: list[int]) -> None:
    assert "".join(pieces_of(builtin, token_ids)) == builtin.decode(token_ids)


@given(text=st.text(max_size=20))
@example(text="日本語 한국어 नमस्ते 👩\u200d👩\u200d👧 ﷽ café")
def test_the_built_in_model_never_shows_a_broken_character(builtin: Vocabulary, text: str) -> None:
    token_ids = builtin.encode(text, with_specials=False)
    assume(builtin.decode(token_ids) == text)  # it has no tokens for control characters and for planes nobody uses
    pieces = pieces_of(builtin, token_ids)
    assert "".join(pieces) == text
    assert text.count(UNDECODABLE) == sum(piece.count(UNDECODABLE) for piece in pieces)


# ---- stop strings ----------------------------------------------------------------------------------------------


def cut_by_the_model(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Reads on until any stop string has ended, then cuts before the longest that ends there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
chunk_lists = st.lists(st.text("abc", max_size=6), max_size=12)


@given(chunks=chunk_lists, stops=stop_lists)
@example(chunks=["aa", "bb"], stops=["abb"])  # the first beginning is none, the second is
@example(chunks=["abc"], stops=["abcd", "bc", "c"])
def test_however_the_text_is_cut_the_first_stop_string_ends_it(chunks: list[str], stops: list[str]) -> None:
    strings = StopStrings(stops)
    pieces = [strings.push(chunk) for chunk in chunks]
    assert ("".join([*pieces, strings.flush()]), strings.matched) == cut_by_the_model("".join(chunks), stops)


@given(chunks=chunk_lists, stops=stop_lists)
def test_nothing_leaves_that_could_still_become_a_stop_string_and_nothing_else_is_held(
    chunks: list[str], stops: list[str]
) -> None:
    strings = StopStrings(stops)
    seen = sent = ""
    for chunk in chunks:
        seen += chunk
        sent += strings.push(chunk)
        if strings.matched:
            break
        begun = [n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert sent == seen[: len(seen) - max(begun, default=0)]


def test_a_stop_string_over_several_tokens_never_leaks_and_ends_the_count(vocabulary: Vocabulary) -> None:
    text = ChoiceText(vocabulary, ("STOP",))
    token_ids = bytes_as_tokens(vocabulary, b"so STO STOP and more")
    pieces = [text.push([token_id]) for token_id in token_ids]
    assert "".join(pieces) == "so STO "
    assert text.stopped and text.num_tokens == len("so STO STOP")
    assert text.push(token_ids) == "" and text.flush() == ""
    assert text.num_tokens == len("so STO STOP")


def test_tokens_that_come_together_are_counted_up_to_the_stop_string(vocabulary: Vocabulary) -> None:
    text = ChoiceText(vocabulary, ("b", "c"))
    assert text.push(bytes_as_tokens(vocabulary, b"aacab")) == "aa"
    assert text.num_tokens == 3


def test_a_beginning_of_a_stop_string_is_released_when_it_goes_on_otherwise_or_ends(vocabulary: Vocabulary) -> None:
    text = ChoiceText(vocabulary, ("STOP",))
    assert [text.push([token_id]) for token_id in bytes_as_tokens(vocabulary, b"STOSTO")][3:] == ["STO", "", ""]
    assert text.flush() == "STO"
    assert not text.stopped


def test_a_stop_string_that_only_the_flush_completes_still_stops(vocabulary: Vocabulary) -> None:
    text = ChoiceText(vocabulary, (f"a{UNDECODABLE}",))
    assert text.push(bytes_as_tokens(vocabulary, b"xa\xe6")) == "x"
    assert text.flush() == ""
    assert text.stopped


def test_stop_strings_of_more_than_ascii_are_found_in_split_characters(vocabulary: Vocabulary) -> None:
    text = ChoiceText(vocabulary, ("水は",))
    pieces = [text.push([token_id]) for token_id in bytes_as_tokens(vocabulary, "低水水は".encode())]
    assert "".join(pieces) == "低水"
    assert text.stopped
