"""Bodies of requests: what is taken, what is refused, and that the refusal names the field."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.gateway.front.chat import ChatMessage
from headrace.gateway.front.openai_requests import ChatRequest, CompletionRequest, read_request


def completion(**fields: Any) -> CompletionRequest:
    return read_request(json.dumps({"model": "mill", "prompt": "x", **fields}).encode(), CompletionRequest)


def chat(*messages: Any, **fields: Any) -> ChatRequest:
    told = list(messages) or [{"role": "user", "content": "x"}]
    return read_request(json.dumps({"model": "mill", "messages": told, **fields}).encode(), ChatRequest)


def refusal(raw: bytes | dict[str, Any], kind: type[CompletionRequest] | type[ChatRequest] = CompletionRequest) -> str:
    with pytest.raises(InputError) as refused:
        read_request(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), kind)
    assert str(refused.value).startswith(f"{refused.value.field}: ")
    return str(refused.value)


def test_what_is_not_said_is_as_openai_has_it() -> None:
    asked = completion()
    assert (asked.temperature, asked.top_p, asked.n, asked.stream, asked.tier) == (1.0, 1.0, 1, False, "interactive")
    assert (asked.default_tokens, asked.most_tokens) == (16, None)
    assert chat().default_tokens is None


def test_null_means_the_same_as_leaving_it_out() -> None:
    fields = ("max_tokens", "temperature", "stop", "n", "seed", "stream", "stream_options", "logprobs", "suffix")
    assert completion(**dict.fromkeys(fields)) == completion()
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    assert chat(message) == chat({"role": "assistant", "content": "x"})


# ---- prompts and messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["text", [1]], ["text", [1]]),
    ],
)
def test_a_prompt_may_be_text_or_token_ids_one_or_several(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: must be a text, token ids, or a list of either, is a list of 0"),
        (7, "prompt: must be a text, token ids, or a list of either, is 7"),
        ([1, "x"], "prompt[1]: must be a token id, is 'x'"),
        ([True], "prompt[0]: must be a token id, is true"),
        ([[1], [-1]], "prompt[1][0]: must be a token id, is -1"),
        ([[1], {}], "prompt[1]: must be a text or token ids, is an object"),
        ([1.5], "prompt[0]: must be a text or token ids, is 1.5"),
        (["a"] * 17, "prompt: prompts times n must be at most 16, is 17 * 1"),
    ],
)
def test_a_prompt_that_is_none_is_refused_where_it_is_wrong(prompt: Any, message: str) -> None:
    assert refusal({"model": "mill", "prompt": prompt}) == message


def test_messages_may_be_texts_or_parts_that_are_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = chat({"role": "system", "content": "s"}, {"role": "user", "content": parts, "name": "Ann"})
    assert asked.turns() == [
        ChatMessage(role="system", content="s"),
        ChatMessage(role="user", content="one\ntwo", name="Ann"),
    ]


def test_a_developer_speaks_as_the_system() -> None:
    assert chat({"role": "developer", "content": "x"}).turns() == [ChatMessage(role="system", content="x")]


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": []}
    assert chat(answer).turns() == [ChatMessage(role="assistant", content="x")]


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("x", "messages[1]: must be an object, is 'x'"),
        ({"role": "tool", "content": "x"}, "messages[1].role: must be 'system', 'developer', 'user' or 'assistant'"),
        ({"role": "user"}, "messages[1].content: is required"),
        ({"role": "assistant", "content": None}, "messages[1].content: is required"),
        ({"role": "user", "content": 7}, "messages[1].content: must be a text or a list of text parts, is 7"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]: must be a part"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[1].content[0].type: must be 'text', is 'image_url': only text is supported",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text: must be a text, is null"),
        (
            {"role": "user", "content": [{"type": "text", "text": "", "cache_control": {}}]},
            "messages[1].content[0].cache_control: is not supported",
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{}]},
            "messages[1].tool_calls: is not supported, only []",
        ),
        ({"role": "user", "content": "x", "name": "n" * 65}, "messages[1].name: "),
    ],
)
def test_a_message_that_cannot_be_served_is_refused_where_it_is_wrong(message: Any, refused: str) -> None:
    body = {"model": "mill", "messages": [{"role": "user", "content": "x"}, message]}
    assert refusal(body, ChatRequest).startswith(refused)


def test_no_messages_and_too_many_are_refused() -> None:
    assert refusal({"model": "mill", "messages": []}, ChatRequest).startswith("messages: must have at least 1")
    many = [{"role": "user", "content": ""}] * 2049
    assert refusal({"model": "mill", "messages": many}, ChatRequest).startswith("messages: must have at most 2048")


# ---- fields ----------------------------------------------------------------------------------------------------


MANY_FIELDS = {f"field{nth}": 1 for nth in range(65)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("body", MANY_FIELDS),
        ("stream_options", {"stream_options": MANY_FIELDS}),
        ("messages[1]", {"messages": [{}, MANY_FIELDS]}),
    ],
)
def test_an_object_of_too_many_fields_is_refused_before_any_is_looked_at(path: str, body: dict[str, Any]) -> None:
    assert refusal(body, ChatRequest) == f"{path}: must have at most 64 fields, has 65"


def test_the_output_is_limited_by_either_name() -> None:
    asked = chat(max_tokens=7)
    assert (asked.most_tokens, asked.max_tokens_field) == (7, "max_tokens")
    asked = chat(max_completion_tokens=8)
    assert (asked.most_tokens, asked.max_tokens_field) == (8, "max_completion_tokens")
    assert chat(max_tokens=7, max_completion_tokens=7).most_tokens == 7


def test_stop_is_a_text_or_up_to_four() -> None:
    assert completion(stop="\n").stop == ("\n",)
    assert completion(stop=["a", "b"]).stop == ("a", "b")
    assert completion(stop=[]).stop == ()


@pytest.mark.parametrize(("tier", "name"), [("flex", "flex"), ("auto", "interactive"), ("default", "interactive")])
def test_the_tier_is_the_service_tier(tier: str, name: str) -> None:
    assert chat(service_tier=tier).tier == name


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("model", None, "model: is required"),
        ("model", 7, "model: must be a valid string, is 7"),
        ("max_tokens", 0, "max_tokens: must be greater than or equal to 1, is 0"),
        ("max_tokens", 2**31, "max_tokens: must be less than 2147483648"),
        ("max_tokens", 1.5, "max_tokens: must be a valid integer, is 1.5"),
        ("temperature", -1, "temperature: must be greater than or equal to 0, is -1"),
        ("temperature", 2.1, "temperature: must be less than or equal to 2, is 2.1"),
        ("temperature", "0.5", "temperature: must be a valid number, is '0.5'"),
        ("temperature", True, "temperature: must be a valid number, is true"),
        ("top_p", 0, "top_p: must be greater than 0, is 0"),
        ("top_k", -2, "top_k: "),
        ("seed", 2**63, "seed: must be less than 9223372036854775808"),
        ("stop", ["a", "b", "c", "d", "e"], "stop: must be a text or up to 4 of them, is a list of 5"),
        ("stop", ["a", ""], "stop[1]: must be a text of 1 to 256 characters, is ''"),
        ("stop", "s" * 257, "stop: must be a text of 1 to 256 characters, is 'sss"),
        ("stop", 7, "stop: must be a text or up to 4 of them, is 7"),
        ("stop_token_ids", [1, "x"], "stop_token_ids[1]: must be a valid integer, is 'x'"),
        ("stop_token_ids", [-1], "stop_token_ids[0]: must be greater than or equal to 0"),
        ("stop_token_ids", list(range(65)), "stop_token_ids: must have at most 64"),
        ("n", 0, "n: must be greater than or equal to 1"),
        ("n", 17, "n: must be less than or equal to 16"),
        ("stream", "yes", "stream: must be a valid boolean, is 'yes'"),
        ("stream_options", {"include_usage": True}, "stream_options: is for streams only: stream must be true"),
        ("service_tier", "priority", "service_tier: must be 'auto', 'default' or 'flex', is 'priority'"),
        ("deadline_s", 0, "deadline_s: must be greater than 0"),
        ("best_of", 2, "best_of: is not supported: must be n (1), is 2"),
    ],
)
def test_a_wrong_value_is_refused_by_its_field(field: str, value: Any, refused: str) -> None:
    assert refusal({"model": "mill", "prompt": "x", field: value}).startswith(refused)


def test_two_limits_of_the_output_that_differ_are_refused() -> None:
    body = {"model": "mill", "prompt": "x", "max_tokens": 1, "max_completion_tokens": 2}
    assert refusal(body) == "max_completion_tokens: must be max_tokens (1), is 2"


def test_several_prompts_with_several_choices_each_are_limited_together() -> None:
    assert refusal({"model": "mill", "prompt": ["a"] * 6, "n": 3}) == "n: prompts times n must be at most 16, is 6 * 3"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True),
        ("logprobs", 0),  # of a completion: the drawn token's own
        ("top_logprobs", 5),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {}),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("min_tokens", 3),
        ("suffix", "end"),
        ("reasoning_effort", "low"),
        ("best_off", 1),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_not_ignored(field: str, value: Any) -> None:
    assert refusal({"model": "mill", "prompt": "x", field: value}).startswith(f"{field}: is not supported")


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": False, "safety_identifier": "s"},
        {"prompt_cache_key": "k", "stream": False, "min_tokens": 0},
    ],
)
def test_what_asks_for_nothing_else_is_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


# ---- whole bodies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "refused"),
    [
        (b"", "body: must be JSON: "),
        (b"{", "body: must be JSON: "),
        (b"\xff\xfe", "body: must be JSON: "),
        (b'{"temperature": NaN}', "body: must be JSON: "),
        (b'{"prompt": "\\ud800"}', "body: must be JSON: "),
        (b"[" * 100_000, "body: must be JSON: "),
        (b"[1, 2]", "body: must be a JSON object, is a list of 2"),
        (b"null", "body: must be a JSON object, is null"),
        (b'{"model": "mill", "prompt": "x", "n": ' + b"9" * 4000 + b"}", "n: "),
        (b'{"model": "mill", "prompt": "x", "' + b"k" * 100_000 + b'": 1}', "k" * 64 + ": is not supported"),
        (b'{"model": "mill", "prompt": "x", "n": "' + b"v" * 100_000 + b'"}', "n: must be a valid integer, is 'vvv"),
    ],
)
def test_a_body_that_is_none_is_refused_in_a_short_message(raw: bytes, refused: str) -> None:
    message = refusal(raw)
    assert message.startswith(refused)
    assert len(message) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
field_names = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "logprobs", "user", "foo"})


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@given(body=st.dictionaries(st.sampled_from(field_names), json_values, max_size=4))
def test_any_json_is_taken_or_refused_never_an_error_of_ours(
    kind: type[CompletionRequest] | type[ChatRequest], body: dict[str, Any]
) -> None:
    whole = {"model": "mill", "prompt": "x"} if kind is CompletionRequest else {"model": "mill", "messages": []}
    for raw in (json.dumps(whole | body), json.dumps({**whole, "messages": [body]})):
        with suppress(InputError):
            read_request(raw.encode(), kind)
