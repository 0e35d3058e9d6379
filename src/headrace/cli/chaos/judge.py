"""Whether an answer is the one that was given to the same request in quiet, and how it differs. Pure.

A token is wrong, lost or repeated: what is missing of the right answer at the place where both part is lost, what is
there twice is repeated, everything else is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.cli.chaos.asking import Answer

Kind = Literal["right", "wrong", "lost", "repeated", "refused", "unavailable", "failed", "never", "left"]

DIFFERENT: frozenset[Kind] = frozenset({"wrong", "lost", "repeated"})
"""Never allowed, whatever happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    kind: Kind
    text: str = ""


def judge(answer: Answer, right: Answer) -> Verdict:
    """`answer` has ended, well or not; what came of it must be how `right` begins."""
    if answer.end == "whole":
        return _judge_whole(answer, right)
    came, expected = tuple(answer.token_ids), tuple(right.token_ids)
    # A stop string cuts tokens off that may have been told: text is compared there, which is what a client asked for.
    is_begin = right.text.startswith(answer.text) if right.finish_reason == "stop" else came == expected[: len(came)]
    if not is_begin:
        return Verdict(kind=_difference(came, expected), text=_shown(came, expected))
    match answer.end:
        case "refused" | "unavailable" | "failed" | "never" | "left":
            return Verdict(kind=answer.end, text=answer.error)
    raise AssertionError(f"it has not ended: {answer}")


def _judge_whole(answer: Answer, right: Answer) -> Verdict:
    came, expected = tuple(answer.token_ids), tuple(right.token_ids)
    is_cut = right.finish_reason == "stop"  # how many tokens were told before the text was known is no promise
    if answer.text != right.text or not (is_cut or came == expected):
        return Verdict(kind=_difference(came, expected), text=_shown(came, expected))
    if answer.finish_reason != right.finish_reason:
        return Verdict(kind="wrong", text=f"it ended with {answer.finish_reason}, not {right.finish_reason}")
    if not is_cut and answer.num_tokens not in (None, len(expected)):
        return Verdict(kind="wrong", text=f"{answer.num_tokens} tokens were counted, {len(expected)} came")
    return Verdict(kind="right")


def _difference(came: Sequence[int], expected: Sequence[int]) -> Kind:
    parting = _num_alike(came, expected)
    rest_came, rest_expected = tuple(came[parting:]), tuple(expected[parting:])
    if rest_came == rest_expected:
        return "wrong"  # the same tokens, another text
    if not rest_came or _is_later(rest_came, rest_expected):
        return "lost"
    return "repeated" if _is_repeated(came, parting, rest_expected) else "wrong"


def _num_alike(came: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip(came, expected, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(came), len(expected)))


def _is_later(rest_came: tuple[int, ...], rest_expected: tuple[int, ...]) -> bool:
    """It goes on as the right answer does some tokens further."""
    return any(rest_expected[skip : skip + len(rest_came)] == rest_came for skip in range(1, len(rest_expected)))


def _is_repeated(came: Sequence[int], parting: int, rest_expected: tuple[int, ...]) -> bool:
    """Some tokens before the parting come again, and then it goes on as it should."""
    rest_came = tuple(came[parting:])
    for number in range(1, parting + 1):
        again = tuple(came[parting - number : parting])
        after = rest_came[number:]
        if rest_came[:number] == again[: len(rest_came)] and after == rest_expected[: len(after)]:
            return True
    return False


def _shown(came: Sequence[int], expected: Sequence[int]) -> str:
    parting = _num_alike(came, expected)
    return f"after {parting} tokens {list(came[parting : parting + 8])}, not {list(expected[parting : parting + 8])}"
