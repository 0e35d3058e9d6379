"""`headrace fabric serve`: lends this machine's side of a measurement, to one client at a time.

Owns the listening socket and the processes of the one session; an event loop's. It knows neither questions nor answers:
once somebody has proved that he has the token, his connection is handed to a process of its own, which ends with it.
Whoever has the token can keep a few cores busy and fill a few GiB for as long as his session lasts.

    accepted -> greeted (`greeting`, within seconds, few at a time) -> ENGINE: the session | LOOP: a part of it
    a session ends with its engine's connection, or when it has lasted too long; its loops end with it
"""

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.fabric.limits.side import serve_side
from headrace.fabric.measure.greeting import (
    HELLO_BYTES,
    VERSION,
    Hello,
    Kind,
    Verdict,
    greeting,
    new_nonce,
    read_hello,
)
from headrace.fabric.measure.side import Given, start_side

MAX_GREETINGS = 8
MAX_LOOPS = 3
"""At once; a client of ours has two."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    greeting_s: float = 5.0
    session_s: float = 3600.0
    silence_s: int = 15  # of a host that has vanished


@dataclass(slots=True, kw_only=True)
class _Session:
    id: bytes
    num_loops: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)


class MeasureServer:
    """`listener` is bound already, and the caller's to close; `cpu` is where bare loops and the engine's owner run."""

    def __init__(
        self, listener: socket.socket, token: str, *, cpu: int | None = None, patience: Patience | None = None
    ) -> None:
        self._listener = listener
        self._token = token
        self._cpu = cpu
        self._patience = patience or Patience()
        self._session: _Session | None = None
        self._num_greetings = 0

    async def run(self) -> None:
        """Until cancelled."""
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listener)
                except OSError as error:  # of one connection, or of too many open files: neither lasts
                    _log.warning("accept: %s", error)
                    await asyncio.sleep(0.1)
                    continue
                if self._num_greetings == MAX_GREETINGS:
                    connection.close()
                    continue
                tasks.create_task(self._meet(connection, f"{address[0]}:{address[1]}"))

    async def _meet(self, connection: socket.socket, who: str) -> None:
        with connection:
            try:
                said = await self._greet(connection)
            except (OSError, TimeoutError) as error:
                _log.debug("%s left without a greeting: %s", who, error or "too slow")
                return
            if said is None:
                _log.warning("%s has no token of ours", who)
                return
            await self._serve(connection, said, who)

    async def _greet(self, connection: socket.socket) -> Hello | None:
        """What somebody with our token wants; None for anybody else. Raises OSError, TimeoutError."""
        loop, nonce = asyncio.get_running_loop(), new_nonce()
        self._num_greetings += 1
        try:
            async with asyncio.timeout(self._patience.greeting_s):
                await loop.sock_sendall(connection, greeting(nonce))
                wire = await _receive(connection, HELLO_BYTES)
                said = read_hello(wire, nonce=nonce, token=self._token)
                if said is None:
                    await _say(connection, Verdict.WRONG_TOKEN)
                return said
        finally:
            self._num_greetings -= 1

    async def _serve(self, connection: socket.socket, said: Hello, who: str) -> None:
        verdict = self._verdict(said)
        try:
            # Before anything is awaited, so that nobody else comes in between.
            if verdict == Verdict.WELCOME and said.kind == Kind.ENGINE:
                self._session = _Session(id=said.session)
                await self._serve_session(connection, self._session, who)
            elif verdict == Verdict.WELCOME:
                assert self._session is not None
                await self._serve_loop(connection, self._session)
            else:
                _log.info("%s: %s", who, verdict.name.lower().replace("_", " "))
                await _say(connection, verdict)
        except OSError as error:
            _log.debug("%s is gone: %s", who, error)

    def _verdict(self, said: Hello) -> Verdict:
        if said.version != VERSION:
            return Verdict.WRONG_VERSION
        if said.kind == Kind.ENGINE:
            return Verdict.WELCOME if self._session is None else Verdict.BUSY
        if said.kind != Kind.LOOP or self._session is None:
            return Verdict.REFUSED
        if said.session != self._session.id:
            return Verdict.BUSY
        return Verdict.WELCOME if self._session.num_loops < MAX_LOOPS else Verdict.REFUSED

    async def _serve_session(self, connection: socket.socket, session: _Session, who: str) -> None:
        _log.info("%s: a session begins", who)
        try:
            async with asyncio.timeout(self._patience.session_s):
                given = Given(cpu=self._cpu)
                await self._lend(connection, lambda: start_side(connection, given))
        except TimeoutError:
            _log.warning("%s: its session took longer than %g s", who, self._patience.session_s)
        finally:
            session.over.set()
            self._session = None
            _log.info("%s: the session is over", who)

    async def _serve_loop(self, connection: socket.socket, session: _Session) -> None:
        session.num_loops += 1
        try:
            lent = asyncio.ensure_future(self._lend(connection, lambda: serve_side(connection, cpu=self._cpu)))
            over = asyncio.ensure_future(session.over.wait())
            try:
                await asyncio.wait((lent, over), return_when=asyncio.FIRST_COMPLETED)
            finally:
                over.cancel()
                lent.cancel()
                await asyncio.gather(lent, over, return_exceptions=True)
        finally:
            session.num_loops -= 1

    async def _lend(self, connection: socket.socket, start: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        """Until its process has ended; killed when that is not waited for any more."""
        self._watch_for_silence(connection)
        await _say(connection, Verdict.WELCOME)
        async with _ended(start()) as end:
            connection.close()  # the process has a copy: nobody else may keep the client from seeing its end
            await end

    def _watch_for_silence(self, connection: socket.socket) -> None:
        """A host that vanishes closes nothing."""
        every_s = max(1, self._patience.silence_s // 3)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, every_s),
            (socket.TCP_KEEPINTVL, every_s),
            (socket.TCP_KEEPCNT, 2),
            (socket.TCP_USER_TIMEOUT, self._patience.silence_s * 1000),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def _say(connection: socket.socket, verdict: Verdict) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, bytes([verdict]))


async def _receive(connection: socket.socket, length: int) -> bytes:
    """Not a byte more: what comes after it is another's to read."""
    parts = bytearray()
    while len(parts) < length:
        part = await asyncio.get_running_loop().sock_recv(connection, length - len(parts))
        if not part:
            raise ConnectionResetError("closed")
        parts += part
    return bytes(parts)


@asynccontextmanager
async def _ended(process: "subprocess.Popen[bytes]") -> AsyncIterator["asyncio.Future[None]"]:
    """Of a process that is killed, if need be, and reaped on leaving."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(process.pid)
    try:
        loop.add_reader(pidfd, _resolve, end)
        yield end
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.kill()
        process.wait()


def _resolve(end: "asyncio.Future[None]") -> None:
    if not end.done():
        end.set_result(None)
