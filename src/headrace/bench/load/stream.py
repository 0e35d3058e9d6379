"""One streamed completion of an OpenAI-compatible server. Runs on the client's loop; knows no schedule.

A protocol of our own over httptools: a full client takes a millisecond a request from the cores that are measured. Each
request has a connection of its own, as independent users have: none waits behind another's bytes. Clock:
`time.monotonic` when the bytes of an event are read from the socket.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

from headrace.errors import InputError


class _Choice(msgspec.Struct):
    """`token_ids`: where the server tells them. Of one that does not, an event is a token."""

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        if self.token_ids is not None:
            return len(self.token_ids)
        return 1 if self.text or self.finish_reason is None else 0


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    id: str = ""
    choices: Sequence[_Choice] = ()
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
MOST_ERROR_CHARACTERS = 500


class Target:
    """Where requests go. Raises InputError for what is no http(s) address."""

    def __init__(self, url: str, model: str, *, headers: Sequence[tuple[str, str]] = ()) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError("target", f"must be an address such as http://127.0.0.1:8000, is {url!r}")
        self.model = model
        self._parts = parts
        self._headers = headers

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether it speaks TLS."""
        parts: SplitResult = self._parts
        is_tls = parts.scheme == "https"
        return cast("str", parts.hostname), parts.port or (443 if is_tls else 80), is_tls

    def request(self, token_ids: Sequence[int], max_tokens: int, **fields: object) -> bytes:
        """Greedy, of exactly `max_tokens` tokens, streamed; ready to be sent."""
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": token_ids,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **fields,
            }
        )
        path = self._parts.path.rstrip("/").removesuffix("/v1")
        head = [
            f"POST {path}/v1/completions HTTP/1.1",
            f"Host: {self._parts.netloc}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self._headers),
        ]
        return "\r\n".join([*head, "", ""]).encode() + body


class Stream(asyncio.Protocol):
    """`over` is done when nothing more comes; what came is in the fields. `token_s`: of `time.monotonic`."""

    def __init__(self, request: bytes) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_s = 0.0
        self.token_s: list[float] = []
        self.id = ""
        self.num_reported: int | None = None
        self.cached_tokens: int | None = None
        self.error: str | None = None
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._lines = b""
        self._has_ended = False
        self._now = 0.0
        self._transport: asyncio.Transport | None = None

    # ---- of asyncio --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writer = self._transport = cast("asyncio.Transport", transport)
        self.sent_s = time.monotonic()
        writer.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._end(f"its answer cannot be read: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None if self._has_ended else f"the connection broke{'' if exc is None else f': {exc}'}")

    def close(self, error: str | None = None) -> None:
        """The client leaves. Idempotent."""
        self._end(error)
        if self._transport is not None:
            self._transport.abort()

    # ---- of httptools ------------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        *lines, self._lines = (self._lines + body).split(b"\n")
        if self._parser.get_status_code() != 200:
            self._lines = b"\n".join([*lines, self._lines])
            return
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            text = self._lines.decode(errors="replace")[:MOST_ERROR_CHARACTERS]
            self._end(f"HTTP {status}: {text}")
        else:
            self._end(None if self._has_ended else "its stream ended without [DONE]")

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._has_ended = True
            return
        event = _decode(data)
        self.id = event.id or self.id
        if event.error is not None:
            self.error = self.error or msgspec.json.encode(event.error).decode()[:MOST_ERROR_CHARACTERS]
        if event.usage is not None:
            self.num_reported = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                self.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        for choice in event.choices:
            self.token_s += [self._now] * choice.num_tokens

    def _end(self, error: str | None) -> None:
        if not self.over.done():
            self.error = self.error or error
            self.over.set_result(None)
