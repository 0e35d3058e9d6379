"""An instance's links to its gateways: one DEALER socket to each, and who is at its other end.

Owns the sockets and when each gateway was last heard of; knows no requests. Runs on the role's loop. Life of a link:

    unknown    nobody answers yet: Announce every half second
    known      Beats come: Status every half second; another uuid in a Beat is a gateway that took the endpoint over
    lost       silent for 2 s, or replaced: told once, so that its requests are aborted; unknown again
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import NewType, Self

import zmq
import zmq.asyncio

from headrace.errors import InputError, ProtocolFault
from headrace.protocol.control import (
    BEAT_S,
    MAX_MESSAGE_BYTES,
    SILENCE_S,
    Announce,
    Beat,
    GatewayMessage,
    Goodbye,
    InstanceMessage,
    Status,
    decode_from_gateway,
    encode_control,
)

GatewayUuid = NewType("GatewayUuid", str)

GOODBYE_LINGER_MS = 200

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Link:
    endpoint: str
    socket: zmq.asyncio.Socket
    gateway: GatewayUuid | None = None
    heard_at: float = 0.0


class Links:
    """`status` is asked for what to tell; `on_message(gateway, message)` and `on_lost(gateway)` are called on the
    loop. Messages to a gateway that is gone are dropped: what it asked for is aborted anyway."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        announce: Announce,
        status: Callable[[], Status],
        on_message: Callable[[GatewayUuid, GatewayMessage], None],
        on_lost: Callable[[GatewayUuid], None],
    ) -> None:
        if not endpoints:
            raise InputError("gateway", "must be at least one endpoint, such as ipc:///run/headrace/control.sock")
        self._announce = announce
        self._status = status
        self._on_message = on_message
        self._on_lost = on_lost
        self._exits = ExitStack()
        self._links: list[_Link] = []
        self._num_strange = 0
        context = zmq.asyncio.Context()
        self._exits.callback(context.term)
        try:
            for endpoint in endpoints:
                self._links.append(_Link(endpoint, self._connect(context, endpoint)))
        except BaseException:
            self._exits.close()
            raise

    def _connect(self, context: zmq.asyncio.Context, endpoint: str) -> zmq.asyncio.Socket:
        socket = context.socket(zmq.DEALER)
        self._exits.callback(socket.close, GOODBYE_LINGER_MS)
        socket.setsockopt(zmq.ROUTING_ID, self._announce.sender.encode())
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for somebody who is not there
        socket.setsockopt(zmq.IPV6, 1)  # IPv4 too
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.SNDHWM, 0)  # a stream's tokens are never dropped while its gateway is there
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise InputError("gateway", f"must be a ZeroMQ endpoint, is {endpoint!r} ({error})") from error
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Says Goodbye, also where nobody has answered yet: the gateway may know us already."""
        with self._exits:
            for link in self._links:
                self._send(link, Goodbye(sender=self._announce.sender))

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(self._receive(link))
            tasks.create_task(self._beat())

    async def _receive(self, link: _Link) -> None:
        while True:
            wire = await link.socket.recv()
            try:
                message = decode_from_gateway(wire)
            except ProtocolFault as fault:
                self._num_strange += 1
                _log.warning("dropped a message from %s: %s", link.endpoint, fault)
                continue
            self._heard(link, GatewayUuid(message.sender))
            if not isinstance(message, Beat):
                self._on_message(GatewayUuid(message.sender), message)

    def _heard(self, link: _Link, gateway: GatewayUuid) -> None:
        link.heard_at = asyncio.get_running_loop().time()
        if link.gateway == gateway:
            return
        self._lose(link)
        link.gateway = gateway
        _log.debug("gateway %s at %s", gateway, link.endpoint)
        self._send(link, self._announce)

    def _lose(self, link: _Link) -> None:
        """Told first: a gateway that was only slow reads the last words on its requests when it goes on."""
        if link.gateway is not None:
            _log.info("the gateway at %s is gone", link.endpoint)
            self._on_lost(link.gateway)
            link.gateway = None

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for link in self._links:
                if link.gateway is not None and loop.time() - link.heard_at > SILENCE_S:
                    self._lose(link)
                self._send(link, self._announce if link.gateway is None else self._status())
            await asyncio.sleep(BEAT_S)

    def send(self, gateway: GatewayUuid, message: InstanceMessage) -> None:
        for link in self._links:
            if link.gateway == gateway:
                self._send(link, message)
                return  # one word once, also to a gateway that two endpoints lead to

    def broadcast(self, message: InstanceMessage) -> None:
        for link in self._links:
            if link.gateway is not None:
                self._send(link, message)

    def _send(self, link: _Link, message: InstanceMessage) -> None:
        # Done when it returns: a send that must not wait is tried at once.
        sent = link.socket.send(encode_control(message), zmq.DONTWAIT)
        assert isinstance(sent, asyncio.Future)
        failure = sent.exception()
        if failure is not None and not isinstance(failure, zmq.Again):
            raise failure

    @property
    def num_known(self) -> int:
        return sum(link.gateway is not None for link in self._links)

    @property
    def num_strange_messages(self) -> int:
        return self._num_strange

    def __repr__(self) -> str:
        return f"Links({self.num_known} of {len(self._links)} gateways)"
