"""The client of a profile, as a process of its own: streams over HTTP, and when each of their tokens came.

Owns its connections. Imports nothing but what it needs to read a stream, and loads no other room: it runs beside what
is measured. Clock: `time.monotonic_ns` where the bytes of an event are read, the same in every process of a host.

    python -m headrace.cli.profile_step.client FILE    FILE holds an Asked as JSON; what came is written in its place
"""

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`num_streams` requests at once, each with a prompt of its own: so many random ids below `vocab_size`."""

    host: str
    port: int
    model: str
    num_streams: int
    prompt_tokens: int
    max_tokens: int
    temperature: float
    vocab_size: int
    seed: int


@dataclass(slots=True, kw_only=True)
class Came:
    """`times_ns` of each stream's tokens; `error` of the first that failed, empty where none did."""

    times_ns: list[list[int]] = field(default_factory=list)
    error: str = ""


def read_came(file: Path) -> Came:
    return Came(**json.loads(file.read_text()))


def write_asked(file: Path, asked: Asked) -> None:
    file.write_text(json.dumps(asdict(asked)))


def main(file: Path) -> None:
    came = asyncio.run(ask(Asked(**json.loads(file.read_text()))))
    file.write_text(json.dumps(asdict(came)))


async def ask(asked: Asked) -> Came:
    came = Came(times_ns=[[] for _ in range(asked.num_streams)])
    try:
        async with asyncio.TaskGroup() as tasks:
            for number, times_ns in enumerate(came.times_ns):
                tasks.create_task(_stream(asked, number, times_ns))
    except ExceptionGroup as errors:
        came.error = str(errors.exceptions[0])
    return came


async def _stream(asked: Asked, number: int, times_ns: list[int]) -> None:
    draw = random.Random(f"{asked.seed} {asked.num_streams} {number}")
    body = {
        "model": asked.model,
        "prompt": [draw.randrange(asked.vocab_size) for _ in range(asked.prompt_tokens)],
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {asked.host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(asked.host, asked.port, limit=1 << 20)
    try:
        writer.write(head.encode() + payload)
        while line := await reader.readline():
            now_ns = time.monotonic_ns()
            if line.startswith(b"data: {"):
                _take(json.loads(line[6:]), now_ns, times_ns)
            elif line.startswith(b"{"):
                raise ConnectionError(line.decode(errors="replace").strip())
    finally:
        writer.close()
    if len(times_ns) != asked.max_tokens:
        raise ConnectionError(f"{len(times_ns)} of {asked.max_tokens} tokens came")


def _take(event: dict[str, Any], now_ns: int, times_ns: list[int]) -> None:
    if "error" in event:
        raise ConnectionError(json.dumps(event["error"]))
    for choice in event.get("choices", []):
        times_ns += [now_ns] * len(choice.get("token_ids", []))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
