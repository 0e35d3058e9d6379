"""How a request waits: the one place where it is suspended, and so the one where it is cancelled, stopped or too late.

Owned by the task that runs the request; woken by the exchange and by its attempt, on the same loop.
"""

import asyncio
import math
import time

from headrace.gateway.exchange import Exchange
from headrace.gateway.generation import GenerationFailed


class Patience:
    """`waiting_for` is what the request says of itself when its time is over."""

    def __init__(self, exchange: Exchange, deadline_s: float) -> None:
        self._exchange = exchange
        self._is_woken = False
        self._pausing: asyncio.Future[None] | None = None
        self._deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self.waiting_for = "its turn"

    def now(self) -> float:
        return time.monotonic()  # finer than the loop's own clock, which uvloop turns on once a millisecond

    def wake(self) -> None:
        """Something has changed: look again."""
        self._is_woken = True
        if self._pausing is not None and not self._pausing.done():
            self._pausing.set_result(None)

    async def pause(self, until: float = math.inf) -> None:
        """Until woken, or until then. Raises GenerationFailed when the deadline has passed or the gateway stops."""
        if not self._is_woken:
            await self._wait(max(0.0, min(until, self.deadline) - self.now()))
        self._is_woken = False
        self.require_running()
        if self.now() >= self.deadline:
            raise GenerationFailed(
                f"the deadline of {self._deadline_s:g} s passed while it waited for {self.waiting_for}", status=504
            )

    async def _wait(self, seconds: float) -> None:
        """A future and a timer. An event within a time-out does the same, and took a tenth of a token's time."""
        loop = asyncio.get_running_loop()
        self._pausing = loop.create_future()
        end = loop.call_later(seconds, self.wake)
        try:
            await self._pausing
        finally:
            end.cancel()
            self._pausing = None

    def require_running(self) -> None:
        """Raises GenerationFailed when the gateway stops: everything that the request held is given back already."""
        if self._exchange.stopped is not None:
            raise GenerationFailed(self._exchange.stopped)
