"""The profile's client, against a server that plays its answers."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from headrace.cli.profile_step.client import Asked, Came, ask, main, read_came, write_asked


def asked(port: int, *, num_streams: int = 2) -> Asked:
    return Asked(
        host="127.0.0.1",
        port=port,
        model="played",
        num_streams=num_streams,
        prompt_tokens=5,
        max_tokens=3,
        temperature=0.5,
        vocab_size=100,
        seed=1,
    )


def event(*token_ids: int) -> str:
    return f"data: {json.dumps({'choices': [{'token_ids': token_ids}]})}\n\n"


class Server:
    """Answers each request with the same lines, and keeps what it was asked."""

    def __init__(self, *lines: str, status: str = "200 OK") -> None:
        self.lines, self.status = lines, status
        self.bodies: list[dict[str, object]] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split()[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {self.status}\r\nConnection: close\r\n\r\n{''.join(self.lines)}".encode())
        writer.close()

    async def asks(self, num_streams: int) -> Came:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        async with server:
            return await ask(asked(server.sockets[0].getsockname()[1], num_streams=num_streams))


def test_each_token_of_each_stream_has_its_time() -> None:
    server = Server(event(4), event(5, 6), "data: [DONE]\n\n")
    began = time.monotonic_ns()
    came = asyncio.run(server.asks(2))
    assert came.error == "" and [len(times) for times in came.times_ns] == [3, 3]
    for times in came.times_ns:
        assert began < times[0] <= times[1] == times[2] < time.monotonic_ns()
    first, second = (body["prompt"] for body in server.bodies)
    assert first != second
    assert all(body["temperature"] == 0.5 and body["max_tokens"] == 3 and body["ignore_eos"] for body in server.bodies)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Server('{"error": {"message": "no"}}\n', status="400 Bad Request"), '"message": "no"'),
        (Server(event(1), 'data: {"error": {"message": "broken"}}\n\n'), "broken"),
        (Server(event(1), event(2)), "2 of 3 tokens came"),
    ],
    ids=["refused", "broken", "short"],
)
def test_a_stream_that_fails_is_told(server: Server, said: str) -> None:
    assert said in asyncio.run(server.asks(1)).error


def test_what_came_is_written_where_the_question_was(tmp_path: Path) -> None:
    file = tmp_path / "asked.json"
    write_asked(file, asked(1, num_streams=1))  # a port where nobody listens
    main(file)
    came = read_came(file)
    assert came.times_ns == [[]] and "1" in came.error
