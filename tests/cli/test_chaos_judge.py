"""Whether an answer is judged as it differs: each kind of difference, and none where there is none."""

from dataclasses import replace

import pytest

from headrace.cli.chaos.asking import Answer, Ask
from headrace.cli.chaos.judge import judge

ASK = Ask(prompt="water wheel", max_tokens=8)


def answer(token_ids: list[int], **fields: object) -> Answer:
    text = " ".join(map(str, token_ids))
    whole = Answer(
        ask=ASK, token_ids=token_ids, text=text, finish_reason="length", num_tokens=len(token_ids), end="whole"
    )
    return replace(whole, **fields)


RIGHT = answer([1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize(
    ("token_ids", "kind"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], "right"),
        ([1, 2, 3, 9, 5, 6, 7, 8], "wrong"),
        ([9, 9], "wrong"),
        ([1, 2, 3, 4, 5, 6], "lost"),
        ([1, 2, 3, 6, 7, 8], "lost"),
        ([], "lost"),
        ([1, 2, 3, 3, 4, 5, 6, 7, 8], "repeated"),
        ([1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8], "repeated"),
        ([1, 2, 3, 4, 5, 6, 7, 8, 8], "repeated"),
    ],
)
def test_a_whole_answer_is_right_or_says_how_it_differs(token_ids: list[int], kind: str) -> None:
    assert judge(answer(token_ids), RIGHT).kind == kind


def test_an_answer_that_ends_or_is_counted_otherwise_is_wrong() -> None:
    assert judge(answer(RIGHT.token_ids, finish_reason="stop"), RIGHT).kind == "wrong"
    assert judge(answer(RIGHT.token_ids, num_tokens=9), RIGHT).kind == "wrong"


def test_of_an_answer_that_a_stop_string_cut_the_text_counts() -> None:
    right = answer([1, 2], text="a mill", finish_reason="stop")
    assert judge(answer([1, 2, 3], text="a mill", finish_reason="stop"), right).kind == "right"
    assert judge(answer([1, 2], text="a mill s", finish_reason="stop"), right).kind == "wrong"


@pytest.mark.parametrize("end", ["refused", "unavailable", "failed", "never", "left"])
def test_an_answer_that_is_not_whole_is_what_its_end_says_if_it_began_right(end: str) -> None:
    assert judge(answer([1, 2], end=end), RIGHT).kind == end
    assert judge(answer([], end=end), RIGHT).kind == end


def test_a_client_that_left_after_a_wrong_token_has_seen_a_wrong_token() -> None:
    assert judge(answer([1, 3, 4], end="left"), RIGHT).kind == "lost"
    assert judge(answer([1, 9], end="left"), RIGHT).kind == "wrong"
