"""What somebody sees who has just started it: the line to try, the official client, wrong options, and its end."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from served import Served

pytestmark = [pytest.mark.serving, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[Served]:
    with Served(smollm2, log_level="debug") as running:
        yield running


def test_the_printed_curl_line_is_answered(served: Served) -> None:
    _, found, line = served.greeting.partition("  curl ")
    assert found
    assert "KV goes from 1 prefiller to 1 decoder over mapped." in served.greeting
    words = ["/bin/sh", "-c", f"curl -sS {line}"]
    answer = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert len(answer["choices"][0]["message"]["content"]) > 20
    assert answer["usage"]["completion_tokens"] > 5


def test_the_official_client_chats_streams_and_is_told_what_is_wrong(served: Served) -> None:
    with served.client() as client:
        assert [model.id for model in client.models.list()] == [served.name]
        messages = [{"role": "user", "content": "Name three rivers — short, please. \U0001f30a"}]
        options = {"model": served.name, "messages": messages, "max_tokens": 40, "temperature": 0, "seed": 1}
        whole = client.chat.completions.create(**options)
        stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**options, "max_tokens": 100_000})
        assert refused.value.param == "max_tokens" and "8192" in str(refused.value)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**options, "model": "another"})


def test_each_process_tells_what_it_is_and_each_request_where_its_time_went(served: Served) -> None:
    with served.client() as client:
        client.completions.create(model=served.name, prompt="One request more", max_tokens=4)
    log = served.log()
    for words in (
        "prefiller prefiller-0: model served (bf16",
        "decoder decoder-0: model served (bf16",
        "mapped, tcp at 127.0.0.1",
        "is ready over mapped",
        "queue",
        "exposed transfer",
        "hand-over",
        "first step",
    ):
        assert words in log, words


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process_in_the_middle_of_a_stream(smollm2: Path, number: signal.Signals) -> None:
    with Served(smollm2) as served, served.client() as client:
        stream = client.completions.create(
            model=served.name,
            prompt="Once upon a time",
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        began = time.monotonic()
        assert served.stop(number) == 0
        assert time.monotonic() - began < 8
        stream.close()


def test_what_is_wrong_is_told_in_one_line_within_two_seconds(smollm2: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, said in {
            ("--page-size", "none"): "--page-size",
            ("--pagesize", "16"): "--page-size",
            ("--model", str(smollm2), "--port", port): port,
            ("--model", "/nowhere/at/all"): "/nowhere/at/all",
        }.items():
            began = time.monotonic()
            answer = subprocess.run(
                [sys.executable, "-m", "headrace", "serve", *words], capture_output=True, text=True, timeout=30
            )
            assert answer.returncode != 0
            assert time.monotonic() - began < 4, "two seconds are promised; this machine may be busy"
            assert len(answer.stderr.splitlines()) == 1, answer.stderr
            assert said in answer.stderr
