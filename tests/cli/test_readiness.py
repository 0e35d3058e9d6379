"""Waiting for a gateway: whatever it answers, or does not, only a 200 and all instances are the end of it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from headrace.cli import readiness
from headrace.cli.readiness import get, wait_until_ready, what_is_missing

ONE_OF_EACH = {"prefiller": 1, "decoder": 1}


@asynccontextmanager
async def gateway(health: Sequence[bytes], metrics: Sequence[bytes]) -> AsyncIterator[tuple[int, list[str]]]:
    """Gives these answers one after the other, the last one again and again. -> its port, the paths asked for."""
    asked: list[str] = []
    left = {"/health": list(health), "/metrics": list(metrics)}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, host, *_ = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        assert host == "Host: 127.0.0.1"
        path = line.removeprefix("GET ").removesuffix(" HTTP/1.1")
        asked.append(path)
        answers = left[path]
        writer.write(answers.pop(0) if len(answers) > 1 else answers[0])
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], asked


def response(status: str, body: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def alive(**roles: int) -> bytes:
    lines = [f'headrace_instances_alive{{role="{role}"}} {number}.0' for role, number in roles.items()]
    return response("200 OK", "# HELP headrace_instances_alive x\n" + "\n".join(lines) + "\nheadrace_queued 0.0\n")


OK = response("200 OK")
NOT_YET = response("503 Service Unavailable", "no decoder yet")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "ASK_EVERY_S", 0.001)


async def wait_for(health: Sequence[bytes], metrics: Sequence[bytes]) -> list[str]:
    async with gateway(health, metrics) as (port, asked):
        await wait_until_ready("127.0.0.1", port, ONE_OF_EACH)
        return asked


def test_it_waits_for_a_200_whatever_comes_before() -> None:
    health = [NOT_YET, b"", b"nonsense", b"\xff\r\n\r\n", OK]
    assert asyncio.run(wait_for(health, [alive(prefiller=1, decoder=1)])) == ["/health"] * 5 + ["/metrics"]


def test_it_waits_until_all_instances_are_there() -> None:
    metrics = [NOT_YET, alive(decoder=1), alive(prefiller=0, decoder=1), alive(prefiller=2, decoder=1)]
    assert asyncio.run(wait_for([OK], metrics)) == ["/health", "/metrics"] * 4


def test_what_is_missing_is_named() -> None:
    async def ask(health: bytes, metrics: bytes) -> str | None:
        async with gateway([health], [metrics]) as (port, _):
            return await what_is_missing("127.0.0.1", port, {"prefiller": 2, "decoder": 1})

    assert asyncio.run(ask(NOT_YET, alive())) == "no decoder yet"
    assert asyncio.run(ask(OK, alive(prefiller=1))) == "1 of 2 of role prefiller, 0 of 1 of role decoder"
    assert asyncio.run(ask(OK, alive(prefiller=2, decoder=1))) is None


def test_it_says_now_and_then_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(readiness, "TELL_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "headrace"):
        asyncio.run(wait_for([NOT_YET, OK], [alive(prefiller=1, decoder=1)]))
    assert caplog.messages == ["not ready yet: no decoder yet"]


def test_nobody_there_is_no_error() -> None:
    status, why = asyncio.run(get("127.0.0.1", 1, "/health"))
    assert status == 0 and why.startswith("no answer at 127.0.0.1:1 (")


def test_a_gateway_that_never_answers_is_given_up_for_this_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "ANSWER_WITHIN_S", 0.05)

    async def ask_silent() -> tuple[int, str]:
        is_left = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            await writer.wait_closed()
            is_left.set()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            answer = await get("127.0.0.1", server.sockets[0].getsockname()[1], "/health")
            await is_left.wait()
            return answer

    assert asyncio.run(ask_silent())[0] == 0
