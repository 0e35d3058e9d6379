"""From a GGUF file's list of SentencePiece pieces to a tokenizer that cuts as Gemma's does.

Owns what the list leaves out: SentencePiece joins the two neighbours whose piece has the highest score, `tokenizers`
those whose merge stands first in a list; so every cut of every piece into two others becomes a merge, and the order of
merges is that of scores. For Gemma 3 the result is, merge by merge, the list that it was published with.

    text      "a  b"          spaces become ▁; no space is put before a text
    pieces    a ▁▁ b          a piece that is not in the list falls apart into its bytes, <0xE2> <0x96> ..
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace.errors import InputError
from headrace.model.gguf.family import Fields
from headrace.model.gguf.tokenizer import NAMED_TOKENS, require_fields, write_files

SPACE = "▁"

KNOWN_TYPES = {TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE}


def write_tokenizer(fields: Fields, directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja. Raises InputError,
    naming the field."""
    lists = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores")]
    context_length = "gemma3.context_length"
    require_fields(fields, (*lists, *NAMED_TOKENS.values(), context_length))
    bos, unknown = (int(fields[NAMED_TOKENS[name]]) for name in ("bos_token", "unk_token"))
    tokenizer = build_tokenizer(*(fields[name] for name in lists), bos=bos, unknown=unknown)
    write_files(tokenizer, fields, directory, max_length=int(fields[context_length]))


def build_tokenizer(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], *, bos: int, unknown: int
) -> Tokenizer:
    """Tokens of type control are special: never made from text by merging, left out in decoding. User-defined ones are
    found in text before anything is merged, and are text like any other. Every text begins with `bos`."""
    if strange := sorted(set(types) - KNOWN_TYPES):
        known = "normal (1), control (3), user-defined (4) or byte (6)"
        raise InputError("tokenizer.ggml.token_type", f"must be {known}, is {strange[0]}")
    # The conversion to GGUF writes user-defined runs of spaces as spaces, and puts their score below all others.
    pieces = [token.replace(" ", SPACE) for token in tokens]
    places = {piece: place for place, piece in enumerate(pieces)}
    own_scores = [0.0 if kind == TokenType.USER_DEFINED else score for kind, score in zip(types, scores, strict=True)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=places,
            merges=merges_of(places, own_scores),
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # none are left: as it was published
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{pieces[bos]} $A",
        pair=f"{pieces[bos]} $A {pieces[bos]}:1 $B:1",
        special_tokens=[(pieces[bos], bos)],
    )
    tokenizer.add_special_tokens(_added(pieces, types, TokenType.CONTROL, special=True))
    tokenizer.add_tokens(_added(pieces, types, TokenType.USER_DEFINED, special=False))
    return tokenizer


def _added(pieces: Sequence[str], types: Sequence[int], kind: TokenType, *, special: bool) -> list[AddedToken]:
    """All at once: each call builds the search for all of them anew."""
    return [
        AddedToken(piece, special=special, normalized=False)
        for piece, own_kind in zip(pieces, types, strict=True)
        if own_kind == kind
    ]


def merges_of(places: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece; high scores first, of equal ones those with the longer left part."""

    def rank(merge: tuple[str, str]) -> tuple[float, int, int]:
        first, second = merge
        return scores[places[first + second]], len(first), len(second)

    return sorted(_cuts(places), key=rank, reverse=True)


def _cuts(places: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for piece in places:
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        both = [cut for cut in cuts if cut[0] in places and cut[1] in places]
        yield from sorted(both, key=lambda cut: (places[cut[0]], places[cut[1]]))
