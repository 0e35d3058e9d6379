"""The gateway's control socket: a ZeroMQ ROUTER for instances and operators. Owns the socket and counts what it drops.

Knows no instance and no request; runs on the gateway's asyncio loop. What is no message, or not from whom it claims to
be, is dropped and counted: a peer's mistake never ends the loop. Sending never waits; it tells whether somebody is
there.
"""

import asyncio
import contextlib
import errno
import logging
from collections import Counter
from pathlib import Path
from typing import Literal

import zmq
import zmq.asyncio

from headrace.errors import InputError, ProtocolFault
from headrace.gateway.socket_file import SocketFile, private_socket
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

MAX_WARNINGS = 64
"""Each peer's first wrong message is worth a line; a flood of strangers is not."""

GOODBYE_LINGER_MS = 100
"""For the last messages at closing. Blocks as long, where somebody does not read."""

_GONE = (errno.EHOSTUNREACH, errno.EAGAIN)

_log = logging.getLogger(__name__)

Fault = Literal["malformed", "sender"]


class ControlSocket:
    """Bound when it is made. Raises InputError where `endpoint` cannot be bound."""

    def __init__(self, endpoint: str) -> None:
        self._num_dropped: Counter[Fault] = Counter()
        self._warned: set[bytes] = set()
        self._context = zmq.asyncio.Context()
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
        # Done when it returns: with DONTWAIT it is tried at once, and never queued in Python.
        sent = self._socket.send_multipart([to.encode(), encode_control(message)], flags=zmq.DONTWAIT)
        assert isinstance(sent, asyncio.Future) and sent.done(), "a send that must not wait did"
        error = sent.exception()
        if isinstance(error, zmq.ZMQError) and error.errno in _GONE:
            return False
        if error is not None:
            raise error
        return True

    async def receive(self) -> InstanceMessage | OperatorMessage:
        """The next message of anybody that is one."""
        while True:
            parts = await self._socket.recv_multipart()
            message = self._checked([bytes(part) for part in parts])
            if message is not None:
                return message

    def _checked(self, parts: list[bytes]) -> InstanceMessage | OperatorMessage | None:
        if len(parts) != 2:
            self._drop(parts[0], "malformed", f"must be one frame, is {len(parts) - 1}")
            return None
        identity, wire = parts
        try:
            message = decode_at_gateway(wire)
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
        self._context.destroy(linger=GOODBYE_LINGER_MS)

    def __repr__(self) -> str:
        return f"ControlSocket({'closed' if self._socket.closed else self.endpoint}, dropped={self.num_dropped})"


def _configure(router: zmq.asyncio.Socket) -> None:
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to nobody is an error, not silence
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an instance that reconnects over a half-dead TCP connection is let in
    router.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    router.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def _bind(router: zmq.asyncio.Socket, endpoint: str) -> SocketFile | None:
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
