"""What a client asks, and what came of it: a plain asyncio client of completions, written to be watched.

Owns its connections. A connection that ends before its answer has is what a gateway's death looks like: the client asks
again, as clients do, and remembers that. Clock: `time.monotonic` where the bytes of an event are read.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.protocol.messages import Tier

PATIENCE_S = 90.0
"""For an answer's end. Whatever takes longer never ends, as far as a client can tell."""

ASK_AGAIN_S = 0.2
"""After a connection that broke, or that nobody took."""

MAX_LINE_BYTES = 1 << 20

End = Literal["whole", "refused", "unavailable", "failed", "never", "left"]
"""Of an answer: whole; 429; 503; any other error; not within PATIENCE_S; the client itself left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. temperature 0 is greedy."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: str | None = None
    streams: bool = True
    tier: Tier = "interactive"

    def body(self, model: str) -> Mapping[str, Any]:
        stop = {} if self.stop is None else {"stop": self.stop}
        usage = {"stream_options": {"include_usage": True}} if self.streams else {}
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": self.streams,
            "service_tier": "flex" if self.tier == "flex" else "default",
            "ignore_eos": True,
            "return_token_ids": True,
            **stop,
            **usage,
        }


@dataclass(slots=True, kw_only=True)
class Answer:
    """What has come so far. `times` are of the tokens of a stream, of its last asking."""

    ask: Ask
    asked_at: float = 0.0
    request_ids: list[str] = field(default_factory=list)  # as its headers tell them
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    num_tokens: int | None = None  # as the usage tells it; so is the prompt's
    num_prompt_tokens: int = 0
    broken_at: list[float] = field(default_factory=list)  # connections that ended too early
    error: str = ""
    end: End | None = None
    ended_at: float = 0.0

    def forget(self) -> None:
        """It is asked anew."""
        self.token_ids, self.times, self.text, self.finish_reason, self.num_tokens = [], [], "", None, None


class _Broken(Exception):
    """The connection ended before the answer had."""


class Client:
    """Of one server."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self._host = host
        self._port = port
        self._model = model

    async def ask(self, ask: Ask, into: Answer) -> None:
        """Until it has ended. Cancelled, it leaves: its connection is closed in the middle."""
        into.asked_at = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while into.end is None:
                    await self._try(ask, into)
        except TimeoutError:
            into.end, into.error = "never", f"not within {PATIENCE_S:g} s"
        except asyncio.CancelledError:
            into.end = "left"
        into.ended_at = time.monotonic()

    async def _try(self, ask: Ask, into: Answer) -> None:
        try:
            await self._exchange(ask, into)
        except (_Broken, OSError) as error:
            into.broken_at.append(time.monotonic())
            into.error = str(error)
            into.forget()
            await asyncio.sleep(ASK_AGAIN_S)

    async def _exchange(self, ask: Ask, into: Answer) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_LINE_BYTES)
        try:
            writer.write(self._request(json.dumps(ask.body(self._model)).encode()))
            status = await _read_head(reader, into)
            if status == 503 and into.broken_at:
                raise _Broken("a gateway that has just come back knows no decoder yet")
            if status != 200:
                _take_error(await reader.read(), status, into)
            elif ask.streams:
                await _read_events(reader, into)
            else:
                _take_whole(await reader.read(), into)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _request(self, payload: bytes) -> bytes:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload


async def _read_head(reader: asyncio.StreamReader, into: Answer) -> int:
    """-> the status."""
    words = (await reader.readline()).split()
    while (line := await reader.readline()).strip():
        name, _, value = line.decode(errors="replace").partition(":")
        if name.lower() == "x-request-id":
            into.request_ids.append(value.strip())
    if len(words) < 2 or not line:
        raise _Broken("the connection ended before an answer began")
    return int(words[1])


async def _read_events(reader: asyncio.StreamReader, into: Answer) -> None:
    while line := await reader.readline():
        now = time.monotonic()
        if line.startswith(b"data: [DONE]"):
            into.end = "whole" if into.end is None else into.end
            return
        if line.startswith(b"data: {"):
            _take_event(json.loads(line[6:]), now, into)
    raise _Broken("the connection ended in the middle of a stream")


def _take_event(event: Mapping[str, Any], now: float, into: Answer) -> None:
    if "error" in event:
        into.end, into.error = "failed", str(event["error"].get("message", event["error"]))
    for choice in event.get("choices", ()):
        _take_choice(choice, into)
        into.times += [now] * (len(into.token_ids) - len(into.times))
    _take_usage(event, into)


def _take_whole(body: bytes, into: Answer) -> None:
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise _Broken("the connection ended in the middle of an answer") from error
    for choice in answer["choices"]:
        _take_choice(choice, into)
    _take_usage(answer, into)
    into.end = "whole"


def _take_choice(choice: Mapping[str, Any], into: Answer) -> None:
    into.token_ids += choice.get("token_ids") or ()
    into.text += choice.get("text") or ""
    into.finish_reason = choice.get("finish_reason") or into.finish_reason


def _take_usage(event: Mapping[str, Any], into: Answer) -> None:
    if usage := event.get("usage"):
        into.num_tokens, into.num_prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


def _take_error(body: bytes, status: int, into: Answer) -> None:
    into.error = f"{status}: {body.decode(errors='replace').strip()}"
    into.end = "refused" if status == 429 else "unavailable" if status == 503 else "failed"
