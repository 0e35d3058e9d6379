"""A model's text side, made on the spot: a byte-level tokenizer trained on a few lines, with a chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LINES = (
    "The water ran down the hill and over the wheel, and the wheel turned the mill.",
    "A miller kept the race clear of leaves; what the river gave, the mill could use.",
    "Zwölf Mühlen, ein Fluß. 水は低きに流れる。 😀 Où va l'eau?",
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT, IM_START, IM_END = range(3)

TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models come: spaces marked in the tokens, unknown characters as one token a byte, BOS first."""
    words = ("<unk>", "<s>", "</s>", "▁", "▁the", "▁mill", "er", "x", "\ufffd", "水", "")
    letters = tuple("abcdefghijklmnopqrstuvw")
    tokens = (*words, *(f"<0x{byte:02X}>" for byte in range(256)), *letters)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write_model(directory: Path, tokenizer: Tokenizer, *, template: str | None = TEMPLATE, eos: str) -> Path:
    """The text side of a model's directory. config.json counts more ids than the tokenizer has, as padded ones do."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    rows = tokenizer.get_vocab_size() + 8
    (directory / "config.json").write_text(json.dumps({"vocab_size": rows, "eos_token_id": tokenizer.token_to_id(eos)}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
