"""One client's connection: its body, taken up to a limit, and work that ends when the client does. Knows ASGI alone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Never, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from headrace.gateway.openai_errors import Refused, ShuttingDown

MAX_BODY_BYTES = 10 * 2**20
BODY_PATIENCE_S = 60.0  # for all of a body: a client that trickles it in holds a connection, not more

Result = TypeVar("Result")


async def read_body(request: Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Raises Refused (413, 408) without reading on; ClientDisconnect when the client leaves."""
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > most_bytes:
        raise _too_large(most_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_PATIENCE_S):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise _too_large(most_bytes)
    except TimeoutError:
        message = f"must arrive within {BODY_PATIENCE_S:g} s"
        raise Refused("body", message, status=408, code="request_timeout") from None
    return bytes(body)


def _too_large(most_bytes: int) -> Refused:
    return Refused("body", f"must be at most {most_bytes} bytes", status=413, code="request_too_large")


async def attend(
    work: Coroutine[Any, Any, Result], receive: Receive, closing: asyncio.Event, patience_s: float
) -> Result:
    """The result of `work`, which is cancelled, and has ended, when this raises.

    Raises ClientDisconnect as soon as the client is gone, ShuttingDown when `closing` is set, TimeoutError after
    `patience_s`, and what `work` raises: of a group of errors the first one, the others followed from it.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(_raise_when_gone(receive)), group.create_task(_raise_when_set(closing))]
            async with asyncio.timeout(patience_s):
                result = await work
            for watch in watches:
                watch.cancel()
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return result


async def _raise_when_gone(receive: Receive) -> Never:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def _raise_when_set(closing: asyncio.Event) -> Never:
    await closing.wait()
    raise ShuttingDown


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
