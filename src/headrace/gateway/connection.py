"""One client's connection: its body, taken up to a limit, and work that ends when the client does. Knows ASGI alone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from headrace.gateway.generation import Overloaded
from headrace.gateway.openai_errors import Refused, ShuttingDown

MAX_BODY_BYTES = 10 * 2**20
MAX_BODIES_BYTES = 128 * 2**20  # of all clients together: a thousand may come at once
BODY_PATIENCE_S = 60.0  # for all of a body: a client that trickles it in holds a connection, not more

Result = TypeVar("Result")


class Bodies:
    """What all clients have sent and is not made into tokens yet: no more than a process can hold."""

    def __init__(self) -> None:
        self._num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body, which takes room as long as this is entered. Raises Refused (413, 408) or Overloaded (429) without
        reading on; ClientDisconnect when the client leaves."""
        told = request.headers.get("content-length", "0")
        if told.isdecimal() and int(told) > MAX_BODY_BYTES:
            raise _too_large()
        body = bytearray()
        try:
            await self._fill(body, request)
            yield bytes(body)
        finally:
            self._num_bytes -= len(body)

    async def _fill(self, body: bytearray, request: Request) -> None:
        try:
            async with asyncio.timeout(BODY_PATIENCE_S):
                async for piece in request.stream():
                    self._num_bytes += len(piece)
                    body += piece
                    self._require_room(len(body))
        except TimeoutError:
            message = f"must arrive within {BODY_PATIENCE_S:g} s"
            raise Refused("body", message, status=408, code="request_timeout") from None

    def _require_room(self, num_bytes: int) -> None:
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        if self._num_bytes > MAX_BODIES_BYTES:
            raise Overloaded("too many long requests come in at once", status=429, retry_after_s=1.0)

    def __repr__(self) -> str:
        return f"Bodies({self._num_bytes} bytes)"


def _too_large() -> Refused:
    return Refused("body", f"must be at most {MAX_BODY_BYTES} bytes", status=413, code="request_too_large")


class Closing:
    """That the gateway ends: once set, whoever has asked for it is called, and whoever asks."""

    def __init__(self) -> None:
        self._is_set = False
        self._calls: set[Callable[[], None]] = set()

    def set(self) -> None:
        self._is_set = True
        for call in list(self._calls):
            call()

    def is_set(self) -> bool:
        return self._is_set

    @contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """While this is entered."""
        self._calls.add(call)
        if self._is_set:
            call()
        try:
            yield
        finally:
            self._calls.discard(call)


async def attend(work: Coroutine[Any, Any, Result], receive: Receive, closing: Closing, patience_s: float) -> Result:
    """The result of `work`, which is cancelled, and has ended, when this raises.

    Raises ClientDisconnect as soon as the client is gone, ShuttingDown when `closing` is set, TimeoutError after
    `patience_s`, and what `work` raises.
    """
    reasons: list[BaseException] = []
    is_over = False

    def end(reason: BaseException) -> None:
        if not (is_over or reasons or scope.expired()):
            reasons.append(reason)
            scope.reschedule(0.0)  # now

    def watched(watch: "asyncio.Task[None]") -> None:
        if not watch.cancelled():
            end(watch.exception() or ClientDisconnect())

    try:
        # One scope for all that may end it: a group of tasks for each request would take longer than its routing.
        async with asyncio.timeout(patience_s) as scope:
            watch = asyncio.create_task(_wait_gone(receive))
            watch.add_done_callback(watched)
            try:
                with closing.calling(lambda: end(ShuttingDown())):
                    return await work
            finally:
                is_over = True
                watch.cancel()
    except TimeoutError:
        if reasons:
            raise reasons[0] from None
        raise


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
