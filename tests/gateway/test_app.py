"""The HTTP side over a scripted dispatch: answers whole and streamed, errors, models, health, metrics."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_front import MODEL, Front, a_front, events_of, make_intake
from scripted_dispatch import tokens
from tiny_vocabulary import ENDOFTEXT, IM_END

from headrace.errors import InputError
from headrace.gateway.generation import Generation, GenerationFailed, Overloaded, Progress
from headrace.gateway.intake import Intake
from headrace.protocol.control import Sampling

TEXT = "and the mill turned."


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    return make_intake(tmp_path_factory.mktemp("model"))


@pytest.fixture
def front(intake: Intake) -> Iterator[Front]:
    with a_front(intake) as front:
        front.says(TEXT)
        yield front


def without(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in names}


# ---- whole answers ---------------------------------------------------------------------------------------------


def test_a_completion_has_openais_fields(front: Front) -> None:
    front.says(TEXT, cached_tokens=2)
    answer = front.complete("The water").json()
    num_prompt, num_text = len(front.ids("The water")), len(front.ids(TEXT))
    assert answer["id"].startswith("cmpl-") and isinstance(answer["created"], int)
    assert without(answer, "id", "created") == {
        "object": "text_completion",
        "model": MODEL,
        "service_tier": "default",
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_text + 1,
            "total_tokens": num_prompt + num_text + 1,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_chat_completion_has_openais_fields(front: Front) -> None:
    answer = front.chat("Why?").json()
    assert answer["id"].startswith("chatcmpl-") and isinstance(answer["created"], int)
    assert without(answer, "id", "created", "usage") == {
        "object": "chat.completion",
        "model": MODEL,
        "service_tier": "default",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
    }


def test_the_prompt_is_rendered_and_tokenised_once_and_travels_as_ids(front: Front) -> None:
    front.chat("Why?")
    front.complete("The water")
    front.complete([5, 6, 7])
    assert [list(generation.token_ids) for generation in front.dispatch.asked] == [
        front.ids("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"),
        front.ids("The water"),
        [5, 6, 7],
    ]


def test_sampling_limits_and_tier_reach_the_dispatch_side(front: Front) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": -1, "max_tokens": 9, "service_tier": "flex"}
    answer = front.chat("Why?", stop_token_ids=[7, 7, 9], deadline_s=20, **fields).json()
    (generation,) = front.dispatch.asked
    assert generation.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=3, seed=2**63 - 1, choice=0)
    assert generation.request_id == f"{answer['id']}-0"
    assert (generation.max_tokens, generation.tier, generation.deadline_s) == (9, "flex", 20.0)
    assert generation.stop_token_ids == (IM_END, 7, 9)
    assert answer["service_tier"] == "flex"


def test_without_a_seed_every_request_draws_its_own(front: Front) -> None:
    front.complete(n=2)
    front.complete()
    first, second, other = (generation.sampling for generation in front.dispatch.asked)
    assert first.seed == second.seed != other.seed
    assert (first.choice, second.choice) == (0, 1)


def test_ignoring_eos_leaves_only_the_clients_own_stop_tokens(front: Front) -> None:
    front.complete(ignore_eos=True, stop_token_ids=[ENDOFTEXT])
    assert front.dispatch.asked[0].stop_token_ids == (ENDOFTEXT,)


def test_what_is_not_limited_is_16_tokens_of_a_completion_and_all_that_fit_of_a_chat(front: Front) -> None:
    front.complete()
    front.chat()
    front.complete([5] * 510)  # of 512: the default never makes a request too long
    assert [generation.max_tokens for generation in front.dispatch.asked] == [16, None, 2]


def test_every_prompt_and_each_of_its_n_is_a_choice_in_order(front: Front) -> None:
    def script(generation: Generation) -> list[Any]:
        return tokens([*generation.token_ids, 5 + generation.sampling.choice], "length", cached_tokens=3)

    front.dispatch.script = script
    answer = front.complete([[10], [11]], n=2).json()
    decode = front.intake.vocabulary.decode
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        (0, decode([10, 5]), "length"),
        (1, decode([10, 6]), "length"),
        (2, decode([11, 7]), "length"),
        (3, decode([11, 8]), "length"),
    ]
    assert [generation.request_id for generation in front.dispatch.asked] == [f"{answer['id']}-{n}" for n in range(4)]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 8)


def test_cached_tokens_are_those_of_the_choice_that_found_the_fewest(front: Front) -> None:
    front.dispatch.script = lambda generation: tokens([5], cached_tokens=generation.sampling.choice * 4)
    assert front.complete([9] * 9, n=3).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_echo_gives_the_prompt_back_before_each_choice(front: Front) -> None:
    token_ids = front.ids("over the wheel")
    answer = front.complete(["The water", token_ids], echo=True, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == [
        *[f"The water{TEXT}"] * 2,
        *[f"over the wheel{TEXT}"] * 2,
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_choice_aborts_the_generation_and_is_not_in_the_text(front: Front, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    front.says(TEXT, cached_tokens=2)
    response = front.complete(stop=["mill tur"], **options)
    if stream:
        *chunks, last, _ = events_of(response)
        text, usage = "".join(chunk["choices"][0]["text"] for chunk in chunks), last["usage"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        answer = response.json()
        text, usage = answer["choices"][0]["text"], answer["usage"]
        assert answer["choices"][0]["finish_reason"] == "stop"
    consumed = next(n for n in range(99) if "mill tur" in front.intake.vocabulary.decode(front.ids(TEXT)[:n]))
    assert text == "and the "
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]) == (consumed, {"cached_tokens": 2})
    assert front.dispatch.aborted == [front.dispatch.asked[0].request_id]


def test_what_was_held_back_for_a_stop_string_that_did_not_come_is_in_the_text(front: Front) -> None:
    assert front.complete(stop=["turned.!"]).json()["choices"][0]["text"] == TEXT
    *chunks, _ = events_of(front.complete(stop=["turned.!"], stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT


def test_a_generation_that_ran_to_its_end_is_not_aborted(front: Front) -> None:
    front.complete(n=2)
    assert (front.dispatch.aborted, front.dispatch.running) == ([], set())


def test_a_long_prompt_takes_the_way_through_a_thread_to_the_same_tokens(front: Front) -> None:
    prompt = "the mill " * 1000
    front.dispatch.told_limits = None
    front.complete(prompt)
    assert list(front.dispatch.asked[0].token_ids) == front.ids(prompt)


# ---- streams ---------------------------------------------------------------------------------------------------


def test_a_completions_stream_gives_text_then_the_reason_then_done(front: Front) -> None:
    *chunks, done = events_of(front.complete(stream=True))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({json.dumps(without(chunk, "choices")) for chunk in chunks}) == 1
    assert without(chunks[0], "id", "created", "choices") == {
        "object": "text_completion",
        "model": MODEL,
        "service_tier": "default",
        "system_fingerprint": None,
    }


def test_a_chat_stream_begins_with_the_role_and_ends_with_an_empty_delta(front: Front) -> None:
    *chunks, done = events_of(front.chat(stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(choice["delta"]["content"] for choice in choices[:-1]) == TEXT
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("ask", [Front.complete, Front.chat])
def test_usage_is_the_same_streamed_or_whole(front: Front, ask: Callable[..., Any]) -> None:
    front.says(TEXT, cached_tokens=1)
    whole = ask(front).json()
    *chunks, last, _ = events_of(ask(front, stream=True, stream_options={"include_usage": True}))
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)


def test_choices_of_a_stream_are_told_apart_by_their_index(front: Front) -> None:
    front.dispatch.script = lambda generation: tokens(front.ids(TEXT)[generation.sampling.choice :], "length")
    *chunks, _ = events_of(front.chat(stream=True, n=3))
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert own[0]["delta"]["role"] == "assistant" and own[-1]["finish_reason"] == "length"
        assert text == front.intake.vocabulary.decode(front.ids(TEXT)[index:])


def test_a_streamed_echo_comes_before_the_text(front: Front) -> None:
    *chunks, _ = events_of(front.complete("The water", echo=True, stream=True))
    assert chunks[0]["choices"][0]["text"] == "The water"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"The water{TEXT}"


def test_a_stream_without_any_token_still_says_how_it_ended(front: Front) -> None:
    front.dispatch.script = lambda _: tokens([])
    chunk, done = events_of(front.complete(stream=True))
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"], done) == ("", "stop", "[DONE]")
    opening, last, done = events_of(front.chat(stream=True))
    assert (opening["choices"][0]["delta"]["role"], last["choices"][0]["delta"]) == ("assistant", {})


def test_streams_are_not_to_be_cached_or_collected_on_their_way(front: Front) -> None:
    headers = front.chat(stream=True).headers
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


# ---- errors ----------------------------------------------------------------------------------------------------


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert response.headers["x-request-id"]
    return dict(error)


def test_a_wrong_field_is_a_400_that_names_it(front: Front) -> None:
    error = error_of(front.chat(temperature=3), 400)
    assert error == {
        "message": "temperature: must be less than or equal to 2, is 3",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": None,
    }


def test_a_body_that_is_no_json_object_is_a_400(front: Front) -> None:
    assert error_of(front.ask("POST", "/v1/completions", content=b"{"), 400)["param"] == "body"
    assert error_of(front.ask("POST", "/v1/chat/completions", content=b"[]"), 400)["param"] == "body"


def test_another_model_is_not_found(front: Front) -> None:
    for response in (
        front.complete(model="other"),
        front.chat(model="other"),
        front.ask("GET", "/v1/models/other"),
    ):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "must be 'mill'" in error["message"] and "'other'" in error["message"]


def test_unknown_paths_and_wrong_methods_are_answered_in_the_same_form(front: Front) -> None:
    assert error_of(front.ask("GET", "/v1/nothing"), 404)["message"] == "no such path: /v1/nothing"
    assert error_of(front.ask("GET", "/docs"), 404)
    assert error_of(front.ask("POST", "/v1/completions/", json={}), 404)
    response = front.ask("GET", "/v1/completions")
    assert error_of(response, 405)["message"] == "GET is not for /v1/completions"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([[5], []], "prompt[1]"),
        (["x", ""], "prompt[1]"),
        ([5, 10**6], "prompt[1]"),
        ([[5], [5, 10**6]], "prompt[1][1]"),
        ("x" * 20_000, "prompt"),
    ],
)
def test_a_prompt_that_is_empty_unknown_or_surely_too_long_never_reaches_the_dispatch_side(
    front: Front, prompt: Any, param: str
) -> None:
    assert error_of(front.complete(prompt), 400)["param"] == param
    assert front.dispatch.asked == []


def test_ids_up_to_the_models_own_number_are_taken(front: Front) -> None:
    size = front.intake.vocabulary.size
    assert front.complete([size - 1]).status_code == 200
    assert error_of(front.complete([size]), 400)["message"] == f"prompt[0]: must be a token id below {size}, is {size}"
    assert error_of(front.complete(stop_token_ids=[size]), 400)["param"] == "stop_token_ids[0]"


@pytest.mark.parametrize(
    ("ask", "fields", "params"),
    [
        (Front.complete, {}, ("prompt", "max_tokens")),
        (Front.complete, {"prompt": ["x", "y"]}, ("prompt[0]", "max_tokens")),
        (Front.complete, {"max_completion_tokens": 7}, ("prompt", "max_completion_tokens")),
        (Front.chat, {}, ("messages", "max_tokens")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_dispatch_side_refuses_is_named_as_the_client_named_it(
    front: Front, ask: Callable[..., Any], fields: dict[str, Any], params: tuple[str, str], stream: bool
) -> None:
    for field_name, param in zip(("prompt", "max_tokens"), params, strict=True):
        front.dispatch.script = lambda _, name=field_name: [InputError(name, "must be at most 5, is 6")]
        error = error_of(ask(front, stream=stream, **fields), 400)
        assert (error["param"], error["message"]) == (param, f"{param}: must be at most 5, is 6")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "retry_after", "code"),
    [
        (Overloaded("256 wait", status=429, retry_after_s=2.2), "3", "rate_limit_exceeded"),
        (Overloaded("no decoder", status=503, retry_after_s=0.1), "1", "service_unavailable"),
        (GenerationFailed("lost"), None, "generation_failed"),
        (GenerationFailed("too late", status=504), None, "deadline_exceeded"),
    ],
)
def test_an_error_before_the_first_token_is_a_status_also_of_a_stream(
    front: Front, error: Any, retry_after: str | None, code: str, stream: bool
) -> None:
    front.dispatch.script = lambda _: [error]
    response = front.chat(stream=stream)
    assert error_of(response, error.status)["message"] == str(error)
    assert response.headers.get("retry-after") == retry_after
    assert response.json()["error"]["code"] == code


def test_an_error_after_the_first_token_is_an_event_and_the_stream_still_ends(front: Front) -> None:
    front.dispatch.script = lambda _: [Progress(token_ids=(50,)), GenerationFailed("its decoder was lost twice")]
    first, error, done = events_of(front.complete(stream=True, stream_options={"include_usage": True}))
    assert first["choices"][0]["finish_reason"] is None
    assert error == {
        "error": {
            "message": "its decoder was lost twice",
            "type": "server_error",
            "param": None,
            "code": "generation_failed",
        }
    }
    assert done == "[DONE]"


def test_a_mistake_of_ours_tells_the_client_no_more_than_that(front: Front) -> None:
    front.dispatch.script = lambda _: [KeyError("secret")]
    response = front.chat()
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text


def test_events_are_ascii_whatever_their_text(front: Front) -> None:
    text = "das M\u00fchlrad\u2028 \u6c34\u0085!"
    front.says(text)
    response = front.complete(stream=True)
    assert response.content.isascii()
    assert "".join(event["choices"][0]["text"] for event in events_of(response)[:-1]) == text
    assert front.complete().json()["choices"][0]["text"] == text


def test_a_mistake_of_ours_in_a_stream_is_logged_and_told(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    front.dispatch.script = lambda _: [Progress(token_ids=(50,)), KeyError("secret")]
    *_, error, done = events_of(front.chat(stream=True))
    assert (error["error"]["message"], done) == ("internal error", "[DONE]")
    (record,) = caplog.records
    assert record.exc_info is not None and front.dispatch.asked[0].request_id.startswith(record.args[0])  # type: ignore


def test_a_generation_that_ends_without_a_reason_is_an_error_not_an_answer(front: Front) -> None:
    front.dispatch.script = lambda _: [Progress(token_ids=(50,))]
    assert "without a reason" in error_of(front.complete(), 500)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_when_one_choice_fails_the_others_are_aborted(front: Front, stream: bool) -> None:
    never = asyncio.Event()

    def script(generation: Generation) -> list[Any]:
        waits = [never] if generation.sampling.choice != 1 else [GenerationFailed("lost")]
        return [*waits, *tokens([5])]

    front.dispatch.script = script
    assert error_of(front.complete(n=3, stream=stream), 500)["message"] == "lost"
    assert front.dispatch.running == set() and len(front.dispatch.aborted) == 2


# ---- the rest --------------------------------------------------------------------------------------------------


def test_the_one_model_is_listed_and_found_by_name(front: Front) -> None:
    listed = front.ask("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert front.ask("GET", f"/v1/models/{MODEL}").json() == listed["data"][0]
    assert without(listed["data"][0], "created") == {"id": MODEL, "object": "model", "owned_by": "headrace"}


def test_a_model_named_like_a_path_is_found(intake: Intake) -> None:
    named = Intake(model="org/mill", vocabulary=intake.vocabulary, template=intake.template)
    with a_front(named) as front:
        assert front.ask("GET", "/v1/models/org/mill").json()["id"] == "org/mill"
        assert front.ask("GET", "/v1/models/org%2Fmill").json()["id"] == "org/mill"


def test_health_says_whether_a_request_could_be_served_and_else_why_not(front: Front) -> None:
    assert front.ask("GET", "/health").status_code == 200
    front.dispatch.ready = False
    response = front.ask("GET", "/health")
    assert (response.status_code, response.json()["reason"]) == (503, "no instance takes requests now")
    front.dispatch.told_limits = None
    assert front.ask("GET", "/health").json()["reason"] == "no decoder has announced itself"
    front.closing.set()
    assert front.ask("GET", "/health").json()["reason"] == "the gateway is shutting down"


def test_metrics_are_given_as_prometheus_reads_them(front: Front) -> None:
    response = front.ask("GET", "/metrics")
    assert response.text == "headrace_requests_total 7\n"
    assert response.headers["content-type"].startswith("text/plain; version=")


def test_every_answer_has_its_id_in_a_header(front: Front) -> None:
    response = front.chat()
    assert response.headers["x-request-id"] == response.json()["id"]
    response = front.complete(stream=True)
    assert response.headers["x-request-id"] == events_of(response)[0]["id"]
    assert front.ask("GET", "/health").headers["x-request-id"]


def test_a_model_without_a_chat_template_says_so(intake: Intake) -> None:
    plain = Intake(model=MODEL, vocabulary=intake.vocabulary, template=None)
    with a_front(plain) as front:
        error = error_of(front.chat(), 400)
    assert error["message"] == "messages: mill has no chat template: /v1/completions takes plain text"


def test_a_deadline_beyond_the_servers_own_is_refused(front: Front) -> None:
    assert error_of(front.chat(deadline_s=601), 400)["message"] == "deadline_s: must be at most 600 s, is 601"
    front.chat()
    assert front.dispatch.asked[0].deadline_s == 600.0
