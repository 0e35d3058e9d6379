"""Text to token ids and back: a model directory's tokenizer, and what its other files say about single tokens.

Knows no requests. Loaded once at start, read-only from then on, so that threads may share it. What is read: the
tokenizer (tokenizer.json), the named special tokens (special_tokens_map.json, tokenizer_config.json), which tokens end
an answer (generation_config.json, else config.json, and the tokenizer's own eos_token) and how many ids the model
knows (config.json).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.errors import InputError


@dataclass(frozen=True, kw_only=True)  # no slots: longest_token is computed once and kept
class Vocabulary:
    """`size`: every token id is below it (rows of the embedding, which may be more than the tokenizer names)."""

    tokenizer: Tokenizer
    size: int
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]  # by role: bos_token, eos_token, ..
    special_ids: frozenset[int]  # decoded to nothing
    byte_ids: frozenset[int]  # tokens that stand for one raw byte each (byte fallback)

    def encode(self, text: str, *, with_specials: bool) -> list[int]:
        """`with_specials`: as the tokenizer begins and ends a text that is not yet marked up (BOS, where it has one).

        The batch call keeps no offsets: a third of the time and half the memory for a long prompt.
        """
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=with_specials)[0].ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens; ids that the tokenizer does not know add nothing."""
        return self.tokenizer.decode(token_ids)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token adds nothing to any text."""
        return token_id in self.special_ids or self.tokenizer.id_to_token(token_id) is None

    def require_known(self, token_ids: Sequence[int], field: str) -> None:
        """Raises InputError naming the first id that the model does not have."""
        if token_ids and max(token_ids) >= self.size:
            nth, token_id = next((nth, token_id) for nth, token_id in enumerate(token_ids) if token_id >= self.size)
            raise InputError(f"{field}[{nth}]", f"must be a token id below {self.size}, is {token_id}")

    @cached_property
    def longest_token(self) -> int:
        """In characters: no token stands for more, so it bounds how long a text of so many tokens can be."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)


def load_vocabulary(directory: Path) -> Vocabulary:
    """Raises InputError when the directory lacks a tokenizer, or a file in it cannot be read."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise InputError("tokenizer", f"must be a model's directory with a tokenizer.json, is {directory}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise InputError("tokenizer", f"{file} must be a tokenizer: {error}") from error
    # Some files cut or pad what they encode, for training: a prompt is taken as it is or refused.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(directory / "config.json")
    special_tokens = _special_tokens(directory)
    added = tokenizer.get_added_tokens_decoder()
    return Vocabulary(
        tokenizer=tokenizer,
        size=max(_vocab_size(config), tokenizer.get_vocab_size()),
        eos_token_ids=tuple(sorted(set(_eos_token_ids(directory, config, tokenizer, special_tokens)))),
        special_tokens=special_tokens,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        byte_ids=frozenset(_byte_ids(tokenizer)),
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in the file, an empty one where there is none. Raises InputError for anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError("tokenizer", f"{file} must be a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise InputError("tokenizer", f"{file} must hold a JSON object, holds a {type(content).__name__}")
    return content


def _vocab_size(config: Mapping[str, Any]) -> int:
    """0 where it is not told. Models that take more than text keep it one level down."""
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else 0


def _special_tokens(directory: Path) -> dict[str, str]:
    tokens = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for role, value in read_json(directory / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if role.endswith("_token") and isinstance(text, str):
                tokens[role] = text
    return tokens


def _eos_token_ids(
    directory: Path, config: Mapping[str, Any], tokenizer: Tokenizer, special_tokens: Mapping[str, str]
) -> Iterator[int]:
    told = read_json(directory / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    yield from (token_id for token_id in (told if isinstance(told, list) else [told]) if isinstance(token_id, int))
    # Chat models made from a plain one often keep its eos in config.json and name their own only here.
    own = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    if own is not None:
        yield own


def _byte_ids(tokenizer: Tokenizer) -> Iterator[int]:
    """Of <0x00> .. <0xFF>, where the decoder takes them for bytes."""
    for byte in range(256):
        token_id = tokenizer.token_to_id(f"<0x{byte:02X}>")
        if token_id is not None and tokenizer.decode([token_id]) != f"<0x{byte:02X}>":
            yield token_id
