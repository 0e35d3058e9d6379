"""What `return_token_ids` adds to answers: each choice's own token ids, whole and in chunks, as far as they count."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_front import MODEL, Front, a_front, events_of, make_intake, served
from scripted_dispatch import tokens
from tiny_vocabulary import IM_END

from headrace.gateway.front.intake import Intake
from headrace.gateway.generation import Generation, Progress

TEXT = "and the mill turned."


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    return make_intake(tmp_path_factory.mktemp("model"))


@pytest.fixture
def front(intake: Intake) -> Iterator[Front]:
    with a_front(intake) as front:
        front.says(TEXT)
        yield front


def asked(front: Front, kind: str, **fields: Any) -> Any:
    return front.chat(**fields) if kind == "chat" else front.complete(**fields)


def chunk_choices(response: Any) -> list[dict[str, Any]]:
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in chunk["choices"]]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice.get("delta", choice.get("message")).get("content", ""))


kinds = pytest.mark.parametrize("kind", ["chat", "completion"])


@kinds
def test_a_whole_answer_carries_the_ids_that_its_text_is_made_of(front: Front, kind: str) -> None:
    (choice,) = asked(front, kind, return_token_ids=True).json()["choices"]
    assert choice["token_ids"] == front.ids(TEXT)
    assert choice["finish_reason"] == "stop"  # by a token that is counted, and no text


@kinds
def test_the_ids_of_a_streams_chunks_add_up_to_those_of_the_whole_answer(front: Front, kind: str) -> None:
    choices = chunk_choices(asked(front, kind, return_token_ids=True, stream=True))
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == front.ids(TEXT)
    assert "".join(map(text_of, choices)) == TEXT
    said = choices[1:-1] if kind == "chat" else choices[:-1]  # a chat opens with its role; both close with the reason
    assert all(choice["token_ids"] for choice in said), "a chunk that says nothing"


@kinds
@pytest.mark.parametrize("stream", [False, True])
def test_nobody_who_does_not_ask_gets_ids(front: Front, kind: str, stream: bool) -> None:
    assert "token_ids" not in asked(front, kind, stream=stream).text


@kinds
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_a_message", [1, 100])
def test_with_a_stop_string_the_ids_go_up_to_the_token_that_completed_it(
    front: Front, kind: str, stream: bool, tokens_a_message: int
) -> None:
    ids = front.ids(TEXT)
    until_stop = next(n for n in range(len(ids)) if "mill" in front.intake.vocabulary.decode(ids[:n]))
    messages = [tuple(ids[at : at + tokens_a_message]) for at in range(0, len(ids), tokens_a_message)]
    front.dispatch.script = lambda _: [*(Progress(token_ids=some) for some in messages), *tokens([])]
    fields = {"return_token_ids": True, "stop": ["mill"], "max_tokens": 50}
    if stream:
        response = asked(front, kind, stream=True, stream_options={"include_usage": True}, **fields)
        choices, usage = chunk_choices(response), events_of(response)[-2]["usage"]
    else:
        answer = asked(front, kind, **fields).json()
        choices, usage = answer["choices"], answer["usage"]
    assert "".join(map(text_of, choices)) == "and the "
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == ids[:until_stop]
    assert usage["completion_tokens"] == until_stop
    assert choices[-1]["finish_reason"] == "stop"


def test_ids_without_text_are_told_when_they_come(front: Front) -> None:
    """A special token, and the first half of a character: a client that counts tokens sees each in its chunk."""
    halves = front.ids("é")
    assert len(halves) == 2
    front.dispatch.script = lambda _: tokens([IM_END, *halves], "length")
    choices = chunk_choices(front.complete(return_token_ids=True, stream=True))
    assert [(choice["text"], choice["token_ids"]) for choice in choices[:-1]] == [
        ("", [IM_END]),
        ("", halves[:1]),
        ("é", halves[1:]),
    ]
    assert all(choice["text"] or choice["finish_reason"] for choice in chunk_choices(front.complete(stream=True)))


def test_every_choice_has_its_own_ids_and_an_echo_has_none(front: Front) -> None:
    def script(generation: Generation) -> list[Any]:
        return tokens([30 + generation.sampling.choice], "length")

    front.dispatch.script = script
    fields = {"n": 3, "echo": True, "return_token_ids": True}
    answer = front.complete("The water", **fields).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[30], [31], [32]]
    assert all(choice["text"].startswith("The water") for choice in answer["choices"])
    choices = chunk_choices(front.complete("The water", stream=True, **fields))
    for index in range(3):
        told = [choice["token_ids"] for choice in choices if choice["index"] == index]
        assert told[0] == [] and [token_id for some in told for token_id in some] == [30 + index]


def test_the_official_client_hands_them_on(front: Front) -> None:
    messages: list[Any] = [{"role": "user", "content": "Why?"}]
    with served(front.app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body={"return_token_ids": True})
    told = json.loads(answer.choices[0].model_dump_json())
    assert told["token_ids"] == front.ids(TEXT)
