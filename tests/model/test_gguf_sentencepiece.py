"""The tokenizer made of pieces and scores against SentencePiece's rule, carried out slowly; and what is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gemma_gguf import CONTROL, LETTERS, PIECES, USER_DEFINED, WORDS
from tokenizers import Tokenizer

from headrace.errors import InputError
from headrace.model.gguf.sentencepiece import build_tokenizer

SPACE = "▁"
NAMES, TYPES, SCORES = zip(*PIECES, strict=True)
IDS = {piece.replace(" ", SPACE): place for place, piece in enumerate(NAMES)}
MERGED = {piece: score for piece, kind, score in PIECES if kind not in (CONTROL, USER_DEFINED)}
FROZEN = [name.replace(" ", SPACE) for name, kind in zip(NAMES, TYPES, strict=True) if kind in (CONTROL, USER_DEFINED)]


def built() -> Tokenizer:
    return build_tokenizer(NAMES, TYPES, SCORES, bos=2, unknown=3)


TINY = built()


def slow_ids(text: str) -> list[int]:
    """SentencePiece: spaces are written as such; control and user-defined pieces are found first, the longest at each
    place; in what is between them the neighbours that make the piece of the highest score are joined, until none do."""
    text = text.replace(" ", SPACE)
    ids, loose, at = [2], "", 0
    while at < len(text):
        found = max((piece for piece in FROZEN if text.startswith(piece, at)), key=len, default=None)
        if found is None:
            loose += text[at]
            at += 1
            continue
        ids += [*joined(loose), IDS[found]]
        loose, at = "", at + len(found)
    return ids + joined(loose)


def joined(text: str) -> list[int]:
    symbols = list(text)
    while True:
        pairs = [(MERGED[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in MERGED]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [token_id for symbol in symbols for token_id in ids_of(symbol)]


def ids_of(symbol: str) -> list[int]:
    """Its own id, or those of its bytes."""
    return [IDS[symbol]] if symbol in MERGED else [IDS[f"<0x{byte:02X}>"] for byte in symbol.encode()]


WRITTEN = [piece.replace(SPACE, " ") for piece in (*WORDS, *LETTERS)]
MARKS = [" ", "  ", "   ", "     ", "\n", "\n\n\n\n", "<b>", "</b>", "<eos>", "<start_of_turn>", "ü", "😀"]


@given(st.lists(st.sampled_from(WRITTEN + MARKS), max_size=30).map("".join))
def test_text_is_cut_as_sentencepiece_cuts_it(text: str) -> None:
    assert TINY.encode(text).ids == slow_ids(text)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    text = text.replace(SPACE, "")  # it is how a space is written, and comes back as one
    ids = TINY.encode(text).ids
    assert ids[0] == 2
    assert TINY.decode(ids[1:], skip_special_tokens=False) == text


def test_control_tokens_are_left_out_of_decoded_text_and_user_defined_ones_are_not() -> None:
    encoding = TINY.encode("<start_of_turn>the  <b>in</b>\n<eos>")
    assert encoding.tokens == ["<bos>", "<start_of_turn>", "the", "▁▁", "<b>", "in", "</b>", "\n", "<eos>"]
    assert TINY.decode(encoding.ids) == "the  <b>in</b>\n"


def test_a_text_begins_with_bos_unless_it_is_marked_up_already() -> None:
    assert TINY.encode("").ids == [2]
    assert TINY.encode("the", add_special_tokens=False).tokens == ["the"]


def test_ids_are_places_in_the_list() -> None:
    assert TINY.get_vocab_size() == len(PIECES)
    assert all(TINY.token_to_id(piece) == place for piece, place in IDS.items())


def test_kinds_of_tokens_that_we_do_not_know_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"must be normal \(1\), control \(3\), user-defined \(4\) or byte \(6\), is 2"
    ):
        build_tokenizer(NAMES, (2, *TYPES[1:]), SCORES, bos=2, unknown=3)
