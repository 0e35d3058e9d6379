"""From a GGUF file's token list to the tokenizer's files of a Hugging Face directory, chat template included.

Owns what those files are, and the tokenizers that work byte by byte, with what the file leaves to its readers: under
`tokenizer.ggml.pre = smollm` a text is first cut around every single digit, then as GPT-2 cuts it, then taken byte by
byte. Without the first cut ASCII digits come out alike, since no token holds two of them, but ` ²` or `٣٤` become
tokens that the model was never trained on. Knows neither weights nor where the file came from.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.errors import InputError
from headrace.model.gguf.family import Fields

NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}
CHAT_TEMPLATE = "tokenizer.chat_template"


def write_tokenizer(fields: Fields, directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises InputError, naming the field."""
    lists = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")]
    context_length = "llama.context_length"
    require_fields(fields, (*lists, *NAMED_TOKENS.values(), CHAT_TEMPLATE, context_length))
    tokenizer = build_tokenizer(*(fields[name] for name in lists))
    write_files(tokenizer, fields, directory, max_length=int(fields[context_length]))


def require_fields(fields: Fields, names: Iterable[str]) -> None:
    for name in names:
        if name not in fields:
            raise InputError(name, "must be in the file, is not")


def write_files(tokenizer: Tokenizer, fields: Fields, directory: Path, *, max_length: int) -> None:
    """The tokenizer, what its named tokens are, and the chat template if the file has one."""
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        # The class that takes tokenizer.json as it stands, whatever model it is of.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[int(fields[theirs])] for name, theirs in NAMED_TOKENS.items()},
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if CHAT_TEMPLATE in fields:
        (directory / "chat_template.jinja").write_text(fields[CHAT_TEMPLATE], encoding="utf-8")


def build_tokenizer(tokens: list[str], types: list[int], merges: list[str]) -> Tokenizer:
    """Byte-level BPE; tokens of type control are special: never made from text by merging, left out in decoding."""
    if unknown := sorted(set(types) - {TokenType.NORMAL, TokenType.CONTROL}):
        raise InputError("tokenizer.ggml.token_type", f"must be normal (1) or control (3), is {unknown[0]}")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == TokenType.CONTROL
        ]
    )
    return tokenizer
