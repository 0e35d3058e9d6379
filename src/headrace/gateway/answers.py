"""How an answer is sent: whole, or as server-sent events. One task of the server's loop runs each, to its end.

    whole:    choices run -> JSON                                  an error: a status and its JSON
    stream:   choices run -> headers with the first token,         an error before the headers: the same;
              chunks as they come, usage, [DONE]                   after them: an event with the error, [DONE]

Nothing is sent before the first token is there, so that a request that finds no room is a 429 and not a broken stream.
A stream never just stops: its last event is [DONE], also after an error. A client that leaves ends the work at once.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.gateway.choices import Delta, Tell, Usage
from headrace.gateway.connection import Closing, attend
from headrace.gateway.generation import FinishReason, GenerationFailed
from headrace.gateway.openai_answers import Finished, Shape
from headrace.gateway.openai_errors import ErrorAnswer, error_answer

LAST_WORD_S = 10.0  # for the end of a stream whose client reads no more
SSE_HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the events of a whole answer
}

_encode = msgspec.json.Encoder().encode  # a tenth of json's time

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A planned request. `run` gives every Delta to its argument and returns when all choices have ended."""

    shape: Shape
    run: Callable[[Tell], Coroutine[Any, Any, Usage]]
    closing: Closing
    patience_s: float  # the generations have deadlines; this ends a client that takes its chunks no more

    async def attended(self, receive: Receive, tell: Tell) -> Usage:
        """Raises HeadraceError, ClientDisconnect."""
        try:
            return await attend(self.run(tell), receive, self.closing, self.patience_s)
        except TimeoutError:
            raise GenerationFailed("its answer could not be delivered in time", status=504) from None


class JsonResponse(Response):
    """One JSON object."""

    media_type = "application/json"

    def render(self, content: dict[str, Any]) -> bytes:
        return _encode(content)


class WholeAnswer:
    """Runs the work when it is called, and sends the result."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._texts: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._reasons: dict[int, FinishReason] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            usage = await self._work.attended(receive, self._keep)
        except ClientDisconnect:
            return
        finished = [
            Finished(
                text="".join(self._texts[index]),
                token_ids=tuple(self._token_ids[index]),
                finish_reason=self._reasons[index],
            )
            for index in sorted(self._reasons)
        ]
        await JsonResponse(self._work.shape.whole(finished, usage))(scope, receive, send)

    async def _keep(self, delta: Delta) -> None:
        self._texts.setdefault(delta.index, []).append(delta.text)
        self._token_ids.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            self._reasons[delta.index] = delta.finish_reason


class StreamedAnswer:
    """Runs the work when it is called, and sends its chunks."""

    def __init__(self, work: Work, *, include_usage: bool) -> None:
        self._work = work
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventWriter(send)
        opened: set[int] = set()

        async def tell(delta: Delta) -> None:
            chunks = [] if delta.index in opened else self._work.shape.opening(delta.index)
            opened.add(delta.index)
            await events.write(*chunks, *self._work.shape.chunks(delta))

        try:
            usage = await self._work.attended(receive, tell)
        except ClientDisconnect:
            return
        except Exception as error:  # the top of a request: what has begun is told its end
            if not events.begun:
                raise
            if not isinstance(error, HeadraceError):
                logger.exception("request %s failed", self._work.shape.request_id)
            last = [error_answer(error).body()]
        else:
            last = [self._work.shape.usage_chunk(usage)] if self._include_usage else []
        with suppress(TimeoutError):  # then the server closes the connection on what was not read
            async with asyncio.timeout(LAST_WORD_S):
                await events.end(*last)


class EventWriter:
    """Server-sent events over one ASGI send. The headers go with the first events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def write(self, *events: dict[str, Any]) -> None:
        await self._write(b"".join(map(_event, events)), more_body=True)

    async def end(self, *events: dict[str, Any]) -> None:
        await self._write(b"".join(map(_event, events)) + b"data: [DONE]\n\n", more_body=False)

    async def _write(self, body: bytes, *, more_body: bool) -> None:
        if not self.begun:
            self.begun = True  # before the first pause: choices write side by side
            headers = [(name.encode(), value.encode()) for name, value in SSE_HEADERS.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if body or not more_body:
            await self._send({"type": "http.response.body", "body": body, "more_body": more_body})


def _event(content: dict[str, Any]) -> bytes:
    wire = _encode(content)
    if not wire.isascii():
        # Readers that split lines as Python does would also split at U+2028 and U+0085 inside a text.
        wire = json.dumps(content, separators=(",", ":")).encode()
    return b"data: " + wire + b"\n\n"


class ErrorResponse(JsonResponse):
    """An error as the whole answer."""

    def __init__(self, answer: ErrorAnswer, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(answer.body(), status_code=answer.status, headers={**answer.headers(), **(headers or {})})
