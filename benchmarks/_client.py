"""A plain asyncio client of any OpenAI-compatible server, and what came of each of its requests.

A full client would compete with what is measured for the same two cores. Clock: `time.monotonic` where the bytes of an
event are read from the socket.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.prompts import VOCABULARY

NO_HEADERS: Mapping[str, str] = {}


@dataclass
class Stream:
    """What came of one request. `times` are of its tokens, one entry for each."""

    started: float = 0.0
    id: str = ""  # as the server calls it
    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.started

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(when it ended, how long it was) between tokens."""
        return [(late, late - early) for early, late in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Endpoint:
    port: int
    model: str
    host: str = "127.0.0.1"

    async def complete(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        into: Stream | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        **fields: object,
    ) -> Stream:
        """One streaming completion of a prompt of token ids, greedy, of exactly max_tokens tokens. What has come is
        in `into`, also when this is cancelled: the client has left then."""
        body = {
            "model": self.model,
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **fields,
        }
        payload = json.dumps(body).encode()
        stream = into or Stream()
        stream.started = time.monotonic()
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        try:
            head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
            writer.write(head.encode() + payload)
            while line := await reader.readline():
                now = time.monotonic()
                if line.startswith(b"data: {"):
                    _take(stream, json.loads(line[6:]), now)
                elif line.startswith(b"{"):
                    stream.error = line.decode(errors="replace")
        finally:
            writer.close()
        if not stream.error and stream.usage.get("completion_tokens") != max_tokens:
            stream.error = f"{stream.usage.get('completion_tokens')} of {max_tokens} tokens came"
        return stream


def _take(stream: Stream, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        stream.error = json.dumps(event["error"])
    stream.id = event.get("id", stream.id)
    stream.usage = event.get("usage") or stream.usage
    for choice in event.get("choices", []):
        # A server that does not tell its tokens sends one with each event.
        token_ids = choice.get("token_ids") or []
        stream.token_ids += token_ids
        is_told = "token_ids" in choice or choice.get("finish_reason")
        stream.times += [now] * (len(token_ids) if is_told else 1)


def random_prompt(num_tokens: int, seed: int, vocabulary: tuple[int, int] = VOCABULARY) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(*vocabulary) for _ in range(num_tokens)]


def require(streams: Sequence[Stream]) -> None:
    """A failed request ends the benchmark: no figure is taken from what is left."""
    if errors := [stream.error for stream in streams if stream.error]:
        raise SystemExit(f"{len(errors)} of {len(streams)} requests failed: {errors[0]}")
