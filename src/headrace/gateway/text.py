"""One choice's tokens become text as they come: pieces that never have to be taken back. Pure; knows no requests.

    token ids -> Detokenizer -> settled text -> StopStrings -> text that may leave
                 holds a split character        holds what may become a stop string

Whatever the chunking, the pieces of a Detokenizer add up to the tokenizer's decode of all ids, and what StopStrings
lets out does not depend on how the text was cut.
"""

from collections.abc import Iterable, Sequence

from headrace.gateway.vocabulary import Vocabulary

UNDECODABLE = "\ufffd"
MOST_TOKENS_OF_A_CHARACTER = 4  # UTF-8 has at most four bytes, and a token has at least one


class Detokenizer:
    """Token ids in, settled text out.

    Decoders look at their first token in a special way (a space is stripped), so new ids are decoded together with
    those that were settled last, whose own text is then cut off. `tokenizers.decoders.DecodeStream` does the same, but
    takes a run of byte tokens for settled as soon as it is valid UTF-8: decode() spoils the whole run when a later
    byte is not, and the stream raises from then on.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context: list[int] = []  # the last settled tokens, if any
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that is certain now: empty while a character is incomplete."""
        if self._vocabulary.is_silent(token_id):
            return ""
        self._pending.append(token_id)
        if token_id in self._vocabulary.byte_ids or self._is_split():
            return ""
        return self._settle()

    def flush(self) -> str:
        """What was held, as decode() ends a text that stops here: incomplete characters become U+FFFD."""
        return self._settle()

    def _is_split(self) -> bool:
        """Whether the last character may still change. As many tokens as a character can have decide that, so that an
        endless run of broken ones costs no more per token."""
        return self._vocabulary.decode(self._pending[-MOST_TOKENS_OF_A_CHARACTER:]).endswith(UNDECODABLE)

    def _settle(self) -> str:
        text = self._vocabulary.decode(self._context + self._pending)[len(self._context_text) :]
        if text:  # tokens without any text are no context: the next one would count as the first
            self._context = self._pending
            self._context_text = self._vocabulary.decode(self._context)
            self._pending = []
        return text


class StopStrings:
    """Text in, text out up to the first stop string: the one that is complete first, the longest of those that end at
    the same character. What may be its beginning is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        if self.matched:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = ((start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0)
        if first := min(ends, default=None):
            self.matched, self._held = True, ""
            return text[: first[1]]
        free = len(text) - max((_num_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[free:]
        return text[:free]

    def flush(self) -> str:
        """What was held: nothing comes any more that could complete it."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


class ChoiceText:
    """The text of one choice, from its first token to its last."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._stops = StopStrings(stops)
        self.num_tokens = 0  # consumed: up to the one that completed a stop string

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come; nothing is let out after it."""
        return self._stops.matched

    def push(self, token_ids: Iterable[int]) -> str:
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            pieces.append(self._stops.push(self._detokenizer.push(token_id)))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest, when no token comes any more. What was held may be a stop string after all."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
