"""The official Python client, unchanged, over a real socket: whole and streamed, sync and async, errors, leaving."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_front import MODEL, Front, a_front, make_intake, served
from openai.types.chat import ChatCompletionMessageParam
from scripted_dispatch import tokens

from headrace.gateway.front.intake import Intake
from headrace.gateway.generation import BudgetExceeded, GenerationFailed, Overloaded, Progress

TEXT = "and the mill turned."
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}], "name": "Ann"},
]


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    return make_intake(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def serving(intake: Intake) -> Iterator[tuple[Front, str]]:
    with a_front(intake) as front, served(front.app) as url:
        yield front, url


@pytest.fixture
def front(serving: tuple[Front, str]) -> Front:
    front, _ = serving
    front.dispatch.asked.clear()
    front.dispatch.aborted.clear()
    front.says(TEXT, cached_tokens=1)
    return front


@pytest.fixture
def client(front: Front, serving: tuple[Front, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_completion(front: Front, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=9, user="u", metadata={"a": "b"}, store=False
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.usage.completion_tokens == len(front.ids(TEXT)) + 1
    assert answer._request_id == answer.id


def test_an_answer_can_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    longer: list[Any] = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "And?"}]
    assert client.chat.completions.create(model=MODEL, messages=longer).choices[0].message.content == TEXT


def test_a_completion_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, echo=True, max_tokens=5)
    assert [choice.text for choice in answer.choices] == [f"one{TEXT}"] * 2 + [f"two{TEXT}"] * 2


def test_extensions_travel_in_the_extra_body(front: Front, client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "ignore_eos": True, "stop_token_ids": [7]}
    client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra)
    assert (front.dispatch.asked[0].sampling.top_k, front.dispatch.asked[0].stop_token_ids) == (5, (7,))


def test_a_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == [] and last.usage is not None
    assert last.usage == client.chat.completions.create(model=MODEL, messages=MESSAGES).usage


def test_a_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="x", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_stream_helper_puts_the_whole_answer_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == TEXT


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "headrace"


def test_the_async_client_streams_several_answers_at_once(front: Front, serving: tuple[Front, str]) -> None:
    async def text_of(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{serving[1]}/v1", api_key="none", max_retries=0) as client:
            whole = await client.completions.create(model=MODEL, prompt="x")
            assert whole.choices[0].text == TEXT
            assert await asyncio.gather(*(text_of(client) for _ in range(8))) == [TEXT] * 8

    asyncio.run(scenario())


# ---- errors ----------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_a_bad_request_with_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True)
    assert (refused.value.param, refused.value.type) == ("logprobs", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="")
    assert refused.value.param == "prompt"


def test_another_model_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert refused.value.code == "model_not_found"


def test_no_room_is_a_rate_limit_error_that_says_when_to_come_back(front: Front, client: openai.OpenAI) -> None:
    front.dispatch.script = lambda _: [Overloaded("full", status=429, retry_after_s=4)]
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
        assert refused.value.response.headers["retry-after"] == "4"


def test_a_budget_that_is_out_of_reach_is_told_once_and_not_tried_again(
    front: Front, serving: tuple[Front, str]
) -> None:
    never = BudgetExceeded("slow", latency="ttft", predicted_s=0.5, budget_s=0.1, retry_after_s=None)
    front.dispatch.script = lambda _: [never]
    patient = openai.OpenAI(base_url=f"{serving[1]}/v1", api_key="none", max_retries=2)
    with patient as client, pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(front.dispatch.asked) == 1
    assert refused.value.code == "ttft_budget_exceeded"
    assert isinstance(refused.value.body, dict) and refused.value.body["predicted_ttft_ms"] == 500.0


def test_a_failure_is_an_internal_server_error(front: Front, client: openai.OpenAI) -> None:
    front.dispatch.script = lambda _: [GenerationFailed("lost")]
    with pytest.raises(openai.InternalServerError, match="lost"):
        client.completions.create(model=MODEL, prompt="x")


def test_a_failure_in_a_stream_is_raised_and_not_taken_for_its_end(front: Front, client: openai.OpenAI) -> None:
    front.dispatch.script = lambda _: [Progress(token_ids=(50,)), GenerationFailed("its decoder was lost")]
    with pytest.raises(openai.APIError, match="its decoder was lost"):
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


# ---- leaving ---------------------------------------------------------------------------------------------------


def until(front: Front, num_aborted: int) -> None:
    deadline = time.monotonic() + 5
    while len(front.dispatch.aborted) < num_aborted:
        assert time.monotonic() < deadline, front.dispatch
        time.sleep(0.01)


def test_a_stream_that_is_closed_aborts_its_generation(front: Front, client: openai.OpenAI) -> None:
    never = asyncio.Event()
    front.dispatch.script = lambda _: [*tokens(front.ids(TEXT))[:3], never]
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
        next(iter(stream))
    until(front, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_loses_patience_while_it_waits_aborts_its_generation(
    front: Front, client: openai.OpenAI, stream: bool
) -> None:
    never = asyncio.Event()
    front.dispatch.script = lambda _: [never]
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt="x", n=2, stream=stream, timeout=0.3)
    until(front, 2)
    assert front.dispatch.running == set()
