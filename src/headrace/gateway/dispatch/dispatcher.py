"""The dispatch side of a gateway: its control socket, the loop that reads it, and requests handed to instances.

Implements `generation.Dispatch` for the HTTP side. Lives on one asyncio loop, that of whoever enters it; a request runs
in the task of whoever iterates over it. The tables are the exchange's, a request's life is `life`'s.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import NoReturn, Self

from headrace.gateway.budgets import TIERS
from headrace.gateway.dispatch.control import ControlSocket
from headrace.gateway.dispatch.exchange import DispatchStatistics, Exchange
from headrace.gateway.dispatch.instances import Instance
from headrace.gateway.dispatch.life import live
from headrace.gateway.dispatch.metrics import GatewayMetrics
from headrace.gateway.dispatch.operator_desk import OperatorDesk
from headrace.gateway.generation import Generation, Progress
from headrace.gateway.options import DEFAULT_TIMINGS, GatewayOptions, Timings
from headrace.protocol.control import Limits
from headrace.protocol.operator import OperatorMessage

_log = logging.getLogger(__name__)


class Dispatcher:
    """Entered once: `async with Dispatcher(options) as dispatcher`; binding raises InputError. An error in its loop
    ends every request, and `wait_failed` raises it."""

    def __init__(self, options: GatewayOptions, timings: Timings = DEFAULT_TIMINGS) -> None:
        self._options = options
        self._timings = timings
        self.metrics = GatewayMetrics()

    async def __aenter__(self) -> Self:
        self._control = ControlSocket(self._options.control)
        self._exchange = Exchange(
            uuid=uuid.uuid4().hex,
            model=self._options.model,
            timings=self._timings,
            send=self._control.send,
            now=time.monotonic(),
            tiers=self._options.tiers,
            local_prefill=self._options.local_prefill,
        )
        self._desk = OperatorDesk(self._options, self._exchange)
        self.metrics.expose(self)
        self._running = asyncio.create_task(self._run(), name="dispatch")
        _log.info("%s serves %s, control at %s", self._options.name, self._options.model, self._control.endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Requests that are under way end with an error. What failed the loop is raised, unless something else is."""
        self._running.cancel()
        await asyncio.wait([self._running])
        self._stop()  # also where the loop was cancelled before its first step
        failure = None if self._running.cancelled() else self._running.exception()
        if failure is not None and error is None:
            raise failure

    async def wait_failed(self) -> NoReturn:
        """Until the loop fails, which it never should. Raises what it failed with."""
        await asyncio.shield(self._running)
        raise AssertionError("the dispatcher's loop has ended by itself")

    # ---- what the HTTP side asks -------------------------------------------------------------------------------

    def limits(self) -> Limits | None:
        """Of the decoder that holds the shortest sequences; None while there is none."""
        return self._exchange.instances.limits()

    def is_ready(self) -> bool:
        """Whether a request could be served now: a decoder is alive."""
        return self._exchange.stopped is None and self.limits() is not None

    def generate(self, generation: Generation) -> AsyncGenerator[Progress, None]:
        """See `Dispatch.generate`. Nothing happens before it is iterated over."""
        return live(generation, exchange=self._exchange, metrics=self.metrics, max_queued=self._options.max_queued)

    # ---- what shows its state ----------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where instances reach it, as bound."""
        return self._control.endpoint

    def alive(self) -> Sequence[Instance]:
        return list(self._exchange.instances.alive())

    def statistics(self) -> DispatchStatistics:
        exchange = self._exchange
        return DispatchStatistics(
            num_queued={tier: exchange.line.num_waiting(tier) for tier in TIERS},
            num_running=exchange.num_running,
            num_events=dict(exchange.events),
            num_dropped=self._control.num_dropped,
        )

    def __repr__(self) -> str:
        return f"Dispatcher({self._options.control}, {self._exchange!r})"

    # ---- its loop ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(), name="dispatch: receive")
                tasks.create_task(self._beat(), name="dispatch: beat")
        finally:
            self._stop()

    def _stop(self) -> None:
        self._exchange.stop("the gateway is stopping")
        self._control.close()

    async def _receive(self) -> None:
        while True:
            for message in await self._control.receive():
                if isinstance(message, OperatorMessage):
                    self._control.send(message.sender, self._desk.answer(message, time.monotonic()))
                else:
                    self._exchange.take(message, time.monotonic())
            await asyncio.sleep(0)

    async def _beat(self) -> None:
        while True:
            self._exchange.beat(time.monotonic())
            await asyncio.sleep(self._timings.beat_s)
