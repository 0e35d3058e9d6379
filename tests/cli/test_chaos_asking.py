"""The watched client: what it makes of whole answers, streams, errors, and connections that end too early."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from headrace.cli.chaos.asking import Answer, Ask, Client

WHOLE = {
    "choices": [{"text": "a mill", "token_ids": [4, 5], "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
EVENTS = [
    {"choices": [{"text": "a", "token_ids": [4], "finish_reason": None}]},
    {"choices": [{"text": " mill", "token_ids": [5], "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]
STREAM, AT_ONCE = Ask(prompt="water", max_tokens=2), Ask(prompt="water", max_tokens=2, streams=False)


def head(status: int = 200) -> bytes:
    return f"HTTP/1.1 {status} so\r\nx-request-id: cmpl-7\r\n\r\n".encode()


def events(told: Sequence[dict[str, Any]], *, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in told]
    return "".join([*lines, "data: [DONE]\n\n" * done]).encode()


def asked(ask: Ask, *answers: bytes) -> Answer:
    """Of a server that gives these answers, one a connection, and closes each."""
    left = list(answers)
    answer = Answer(ask=ask)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            client = Client("127.0.0.1", server.sockets[0].getsockname()[1], "tiny")
            await client.ask(ask, answer)

    asyncio.run(run())
    assert not left
    return answer


def test_a_whole_answer_is_taken() -> None:
    answer = asked(AT_ONCE, head() + json.dumps(WHOLE).encode())
    assert (answer.end, answer.text, answer.token_ids, answer.num_tokens) == ("whole", "a mill", [4, 5], 2)
    assert answer.request_ids == ["cmpl-7"]


def test_a_stream_is_taken_with_the_times_of_its_tokens() -> None:
    answer = asked(STREAM, head() + events(EVENTS))
    assert (answer.end, answer.text, answer.token_ids, answer.finish_reason) == ("whole", "a mill", [4, 5], "length")
    assert len(answer.times) == 2 and answer.num_prompt_tokens == 3


def test_statuses_and_events_of_errors_are_told_apart() -> None:
    ends = [asked(ask, head(status) + b"{}").end for ask in (STREAM, AT_ONCE) for status in (429, 503, 500)]
    assert ends == ["refused", "unavailable", "failed"] * 2
    answer = asked(STREAM, head() + events([EVENTS[0], {"error": {"message": "its decoder failed"}}]))
    assert (answer.end, answer.error, answer.token_ids) == ("failed", "its decoder failed", [4])


def test_what_breaks_is_asked_again_from_the_beginning() -> None:
    broken = (b"", head() + events(EVENTS[:1], done=False))
    answer = asked(STREAM, *broken, head(503) + b"{}", head() + events(EVENTS))
    assert (answer.end, answer.token_ids, len(answer.broken_at)) == ("whole", [4, 5], 3)
    assert asked(AT_ONCE, head() + b'{"choi', head() + json.dumps(WHOLE).encode()).token_ids == [4, 5]


def test_a_client_that_is_cancelled_has_left() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until it leaves
        writer.close()

    async def leave() -> Answer:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server:
            answer = Answer(ask=STREAM)
            client = Client("127.0.0.1", server.sockets[0].getsockname()[1], "tiny")
            asking = asyncio.create_task(client.ask(STREAM, answer))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.wait([asking])
            return answer

    assert asyncio.run(leave()).end == "left"
