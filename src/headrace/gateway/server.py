"""The gateway's process: its port, its loop, and its end. Holds HTTP side and dispatch side together.

The port is bound first, before anything slow: in use is an error within moments. SIGTERM and SIGINT end the process
within two seconds: nobody is accepted any more, what runs may finish for GRACE_S, the rest is told that the gateway
ends. When the dispatch side fails, everything ends with what it failed with.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.gateway.dispatch.dispatcher import Dispatcher
from headrace.gateway.front.app import make_app
from headrace.gateway.front.chat import load_chat_template
from headrace.gateway.front.connection import Closing
from headrace.gateway.front.intake import Intake
from headrace.gateway.front.vocabulary import load_vocabulary
from headrace.gateway.listening import bind
from headrace.gateway.options import GatewayOptions

GRACE_S = 0.5  # after a signal, for answers that are nearly done
MOST_HEAD_BYTES = 64 * 2**10
MOST_READ_AHEAD = 8  # requests behind the one that runs; of more, the connection is not read
HEAD_PATIENCE_S = 10.0  # for a request's head: who connects and says nothing holds a connection so long, not for ever
CANCEL_S = 1  # from then on: a client that does not even read its error is cut off

logger = logging.getLogger(__name__)


def run_gateway(options: GatewayOptions) -> None:
    """Serves until a signal ends it. Raises InputError for what is wrong at the start."""
    take_all_descriptors()
    with bind(options.host, options.port) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options, listener))


async def serve(options: GatewayOptions, listener: socket.socket) -> None:
    """Signals are taken from the first moment, also while the tokenizer is loaded."""
    loop, signalled, closing = asyncio.get_running_loop(), asyncio.Event(), Closing()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    intake = await asyncio.to_thread(load_intake, options)
    async with Dispatcher(options) as dispatcher:
        app = make_app(dispatcher, intake, options, dispatcher.metrics.render, closing=closing)
        server = make_server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        failing = asyncio.create_task(dispatcher.wait_failed())
        ending = asyncio.create_task(signalled.wait())
        logger.info("%s answers at %s", options.name, url_of(listener))
        try:
            await asyncio.wait({serving, failing, ending}, return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await asyncio.wait({serving, failing}, return_when=asyncio.FIRST_COMPLETED, timeout=GRACE_S)
            closing.set()
            await serving
            if failing.done():
                failing.result()
        finally:
            ending.cancel()
            failing.cancel()


def take_all_descriptors() -> None:
    """Every connection is one, and the usual soft limit of 1,024 is soon reached."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def load_intake(options: GatewayOptions) -> Intake:
    """The model's text side. Raises InputError."""
    vocabulary = load_vocabulary(options.tokenizer)
    template = load_chat_template(options.tokenizer, vocabulary.special_tokens)
    return Intake(model=options.model, vocabulary=vocabulary, template=template)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class SignalFreeServer(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn would take them over, and raise them again once it has shut down."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class PunctualProtocol(HttpToolsProtocol):
    """Hangs up on who does not send a request's head in time, or in MOST_HEAD_BYTES: uvicorn waits for ever for a
    connection's first one, and for any that trickles in, and its parser takes any number of headers, also behind a
    request that runs, and as a body's trailers.

    And tells a request that its client has left where others wait behind it on the connection (pipelining): uvicorn
    tells the last one alone, and reads no more, so that it hears of no end either."""

    _head_due: asyncio.TimerHandle | None = None
    _head_bytes = 0  # since the last head, or piece of a body, was whole
    _running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()
        if len(self.pipeline) <= MOST_READ_AHEAD:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._head_came()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _await_head(self) -> None:
        if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"A request's head must be at most {MOST_HEAD_BYTES} bytes.")
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_came()
        elif self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_PATIENCE_S, self.transport.close)

    def _head_came(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


def make_server(app: ASGIApp) -> SignalFreeServer:
    config = uvicorn.Config(
        app,
        http=PunctualProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,  # a request's one line is the dispatch side's
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CANCEL_S,
    )
    return SignalFreeServer(config)
