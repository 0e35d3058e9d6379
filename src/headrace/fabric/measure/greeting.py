"""How a machine that lends its side is entered. Pure, but for the client's end of it.

    server   magic, version, nonce                         42 bytes
    client   version, kind, session, proof                 51 bytes
    server   verdict                                        1 byte

The proof is an HMAC with the token as its key, over the nonce and everything else the client says: who listens cannot
enter with it later, and no token travels. The server looks at the proof before it looks at anything else. Lengths are
fixed in every version to come, so that two versions can tell each other apart.
"""

import errno
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from headrace.errors import FabricError, HandshakeRefused, InputError
from headrace.fabric.limits.frames import read_bytes

VERSION = 1
MAGIC = b"hr-measr"
NONCE_BYTES = 32
SESSION_BYTES = 16
LONGEST_S = 10.0

_GREETING = struct.Struct(f"<8sH{NONCE_BYTES}s")
_HELLO = struct.Struct(f"<HB{SESSION_BYTES}s32s")
GREETING_BYTES, HELLO_BYTES = _GREETING.size, _HELLO.size


class Kind(IntEnum):
    """What the other end of a connection is to become."""

    ENGINE = 1  # opens a session, which lasts as long as this connection
    LOOP = 2  # of an open session


class Verdict(IntEnum):
    WELCOME = 0
    WRONG_TOKEN = 1
    WRONG_VERSION = 2
    BUSY = 3
    REFUSED = 4  # what no client of ours asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    kind: int
    session: bytes
    version: int = VERSION


def new_token() -> str:
    return secrets.token_urlsafe(16)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def greeting(nonce: bytes) -> bytes:
    return _GREETING.pack(MAGIC, VERSION, nonce)


def read_greeting(wire: bytes) -> bytes:
    """-> the nonce. Raises ValueError, and HandshakeRefused for another version."""
    magic, version, nonce = _GREETING.unpack(wire)
    if magic != MAGIC:
        raise ValueError("no `headrace fabric serve` answers there")
    if version != VERSION:
        raise HandshakeRefused("version", VERSION, version)
    assert isinstance(nonce, bytes)
    return nonce


def hello(said: Hello, *, nonce: bytes, token: str) -> bytes:
    return _HELLO.pack(said.version, said.kind, said.session, _proof(said, nonce, token))


def read_hello(wire: bytes, *, nonce: bytes, token: str) -> Hello | None:
    """None where the proof is not one of the token's; nothing else of it may be believed then."""
    version, kind, session, proof = _HELLO.unpack(wire)
    said = Hello(kind=kind, session=session, version=version)
    return said if hmac.compare_digest(proof, _proof(said, nonce, token)) else None


def _proof(said: Hello, nonce: bytes, token: str) -> bytes:
    said_bytes = struct.pack(f"<HB{SESSION_BYTES}s", said.version, said.kind, said.session)
    return hmac.digest(token.encode(), MAGIC + nonce + said_bytes, "sha256")


def enter(host: str, port: int, *, token: str, said: Hello) -> socket.socket:
    """A connection to the side that was asked for. Raises InputError for the token, HandshakeRefused, FabricError."""
    call = f"fabric serve at {host}:{port}"
    try:
        stream = socket.create_connection((host, port), timeout=LONGEST_S)
        try:
            _require_welcome(_introduce(stream, token=token, said=said), call)
            stream.settimeout(None)
            return stream
        except BaseException:
            stream.close()
            raise
    except TimeoutError as error:
        raise FabricError(call, errno.ETIMEDOUT, f"silent for {LONGEST_S:g} s") from error
    except OSError as error:
        raise FabricError(call, error.errno or 0, error.strerror or str(error)) from error
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise FabricError(call, errno.EPROTO, str(error)) from error


def _introduce(stream: socket.socket, *, token: str, said: Hello) -> Verdict:
    deadline = time.monotonic() + LONGEST_S
    wire = read_bytes(stream, GREETING_BYTES, deadline=deadline)
    if wire is None:
        raise ConnectionResetError(errno.ECONNRESET, "closed before it said anything")
    stream.sendall(hello(said, nonce=read_greeting(wire), token=token))
    answer = read_bytes(stream, 1, deadline=deadline)
    if answer is None:
        raise ConnectionResetError(errno.ECONNRESET, "closed without a word")
    return Verdict(answer[0])


def _require_welcome(verdict: Verdict, call: str) -> None:
    match verdict:
        case Verdict.WELCOME:
            return
        case Verdict.WRONG_TOKEN:
            raise InputError("token", "must be the one that `headrace fabric serve` printed there, is another")
        case Verdict.WRONG_VERSION:
            raise FabricError(call, errno.EPROTO, f"does not know version {VERSION}, which is ours")
        case Verdict.BUSY:
            raise FabricError(call, errno.EBUSY, "busy: it serves one client at a time, and there is another")
        case Verdict.REFUSED:
            raise FabricError(call, errno.EPROTO, "refuses what was asked")
