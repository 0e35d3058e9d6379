"""The gateway's control socket: a ZeroMQ ROUTER for instances and operators. Owns the socket and counts what it drops.

Knows no instance and no request; runs on the gateway's asyncio loop. What is no message, or not from whom it claims to
be, is dropped and counted: a peer's mistake never ends the loop. Sending never waits; it tells whether somebody is
there. A plain socket, drained whenever its descriptor tells of news: pyzmq's asyncio socket makes futures for every
message, which took a quarter of the gateway's time.
"""

import asyncio
import contextlib
import errno
import logging
from collections import Counter
from pathlib import Path
from typing import Literal

import zmq

from headrace.errors import InputError, ProtocolFault
from headrace.gateway.dispatch.socket_file import SocketFile, private_socket
from headrace.protocol.control import (
    MAX_MESSAGE_BYTES,
    GatewayMessage,
    InstanceMessage,
    encode_control,
)
from headrace.protocol.messages import Uuid
from headrace.protocol.operator import OperatorAnswer, OperatorMessage, decode_at_gateway

MAX_QUEUED_MESSAGES = 10_000
"""To or from one peer. One that reads nothing is gone long before."""

MOST_AT_ONCE = 64
"""Read in one go before requests and timers get their turn."""

MAX_WARNINGS = 64
"""Each peer's first wrong message is worth a line; a flood of strangers is not."""

GOODBYE_LINGER_MS = 100
"""For the last messages at closing. Blocks as long, where somebody does not read."""

_GONE = (errno.EHOSTUNREACH, errno.EAGAIN)

# Plain numbers: pyzmq's flags are enums, and arithmetic with them costs as much as sending.
_AT_ONCE = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)

_log = logging.getLogger(__name__)

Fault = Literal["malformed", "sender"]


class ControlSocket:
    """Bound when it is made. Raises InputError where `endpoint` cannot be bound."""

    def __init__(self, endpoint: str) -> None:
        self._num_dropped: Counter[Fault] = Counter()
        self._warned: set[bytes] = set()
        self._has_news = True  # there may be a message
        self._waiting: asyncio.Future[None] | None = None  # somebody, for one
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches the descriptor
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            _configure(self._socket)
            self._file = _bind(self._socket, endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def endpoint(self) -> str:
        """As bound: with the port, where a free one was asked for."""
        return str(self._socket.get_string(zmq.LAST_ENDPOINT))

    @property
    def num_dropped(self) -> dict[Fault, int]:
        return dict(self._num_dropped)

    def send(self, to: Uuid, message: GatewayMessage | OperatorAnswer) -> bool:
        """False when nobody of that name is connected, or does not read."""
        try:
            self._socket.send(to.encode(), _MORE)
            self._socket.send(encode_control(message), _AT_ONCE)
        except zmq.ZMQError as error:
            if error.errno in _GONE:
                return False
            raise
        finally:
            # Whatever is called takes the news off the descriptor, which will not tell of them again.
            if not self._has_news and int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                self._tell_news()
        return True

    async def receive(self) -> list[InstanceMessage | OperatorMessage]:
        """What has come, once something has: MOST_AT_ONCE of anybody at the most, less those that are none."""
        taken: list[list[bytes]] = []
        while not taken:
            if not self._has_news:
                await self._wait_news()
            taken = self._take()
        return [message for identity, *parts in taken if (message := self._checked(identity, parts)) is not None]

    def _take(self) -> list[list[bytes]]:
        """Asked for first: the error of one that is not there costs as much as ten that are."""
        taken: list[list[bytes]] = []
        while len(taken) < MOST_AT_ONCE:
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                self._has_news = False
                break
            taken.append(self._take_one())
        return taken

    def _take_one(self) -> list[bytes]:
        """Its frames. Frames know whether more follow; asking the socket takes longer than all the rest."""
        parts = [self._socket.recv(_AT_ONCE)]
        more = True
        while more:
            frame = self._socket.recv(_AT_ONCE, copy=False)
            parts.append(frame.bytes)
            more = frame.more
        return parts

    async def _wait_news(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._socket.fileno(), self._tell_news)
        self._waiting = loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _tell_news(self) -> None:
        self._has_news = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _checked(self, identity: bytes, parts: list[bytes]) -> InstanceMessage | OperatorMessage | None:
        if len(parts) != 1:
            self._drop(identity, "malformed", f"must be one frame, is {len(parts)}")
            return None
        try:
            message = decode_at_gateway(parts[0])
        except ProtocolFault as fault:
            self._drop(identity, "malformed", str(fault))
            return None
        if message.sender.encode() != identity:
            self._drop(identity, "sender", f"claims to be from {message.sender}")
            return None
        return message

    def _drop(self, identity: bytes, fault: Fault, text: str) -> None:
        self._num_dropped[fault] += 1
        if identity not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(identity)
            _log.warning("dropped a message from %r: %s", identity, text)

    def close(self) -> None:
        """Idempotent. Aborts that were sent just now still go out to whoever reads."""
        if self._file is not None:
            self._file.remove()
            self._file = None
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._context.destroy(linger=GOODBYE_LINGER_MS)

    def __repr__(self) -> str:
        return f"ControlSocket({'closed' if self._socket.closed else self.endpoint}, dropped={self.num_dropped})"


def _configure(router: zmq.Socket[bytes]) -> None:
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to nobody is an error, not silence
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an instance that reconnects over a half-dead TCP connection is let in
    router.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    router.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def _bind(router: zmq.Socket[bytes], endpoint: str) -> SocketFile | None:
    if endpoint.startswith("ipc://@"):
        raise InputError("control", f"must be a file, which has a mode, is the abstract socket {endpoint!r}")
    path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
    router.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        with contextlib.nullcontext() if path is None else private_socket(path):
            router.bind(endpoint)
        return None if path is None else SocketFile.at(path)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError("control", f"{endpoint} is in use") from error
        raise InputError("control", f"must be a ZeroMQ endpoint, is {endpoint!r} ({error})") from error
    except OSError as error:
        raise InputError("control", f"cannot be bound at {endpoint}: {error}") from error
