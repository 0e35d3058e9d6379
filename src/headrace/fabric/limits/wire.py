"""What is asked of a side process and what it answers: closed, tagged structs in msgpack, each behind its length.

The stream is a socket pair for a process of this host, or a TCP connection to another. Owns no state. A question that
does not decode ends the side; an answer that does not is a FabricError.
"""

import errno
import socket
from typing import Annotated, Literal

import msgspec

from headrace.errors import FabricError, InputError
from headrace.fabric.limits.frames import read_frame, write_frame
from headrace.fabric.limits.names import PATTERN

MAX_PAGES = 1 << 19
MAX_MEMORY_BYTES = 1 << 30
"""What a side makes for somebody who has no memory of his own there."""

Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Rounds = Annotated[int, msgspec.Meta(ge=1, le=10**7)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Word64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has none beyond 64 bits
EndpointName = Annotated[str, msgspec.Meta(pattern=rf"^{PATTERN}\Z")]
OffsetBytes = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_PAGES)]  # [num_pages] int64, little-endian


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    pass


# ---- questions -------------------------------------------------------------------------------------------------


class MakeMemory(Message, frozen=True, kw_only=True):
    """For a side that was given none. -> Done"""

    num_bytes: Annotated[int, msgspec.Meta(ge=4096, le=MAX_MEMORY_BYTES)]


class OpenWake(Message, frozen=True, kw_only=True):
    """-> Done"""

    kind: Literal["futex", "eventfd", "spin"]


class Listen(Message, frozen=True, kw_only=True):
    """For one connection, on the address where our questions arrive. -> Listening"""


class Connect(Message, frozen=True, kw_only=True):
    """-> Done"""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class OpenEndpoint(Message, frozen=True, kw_only=True):
    """Bound to `node`; named `name` where the provider keeps a file. -> Target"""

    provider: Name
    node: Name | None
    name: EndpointName | None


class ConnectEndpoint(Message, frozen=True, kw_only=True):
    """-> Done"""

    target: "Target"


class Send(Message, frozen=True, kw_only=True):
    """-> Spent"""

    src_offsets: OffsetBytes
    dst_offsets: OffsetBytes
    page_bytes: Bytes
    window: Annotated[int, msgspec.Meta(ge=1, le=8192)]  # of libfabric


class Receive(Message, frozen=True, kw_only=True):
    """-> Spent"""

    dst_offsets: OffsetBytes
    page_bytes: Bytes


class Ping(Message, frozen=True, kw_only=True):
    """-> Times"""

    num_rounds: Rounds
    pause_ns: Annotated[int, msgspec.Meta(ge=0, le=10**9)]  # before each round


class Pong(Message, frozen=True, kw_only=True):
    """-> Done"""

    num_rounds: Rounds


Question = MakeMemory | OpenWake | Listen | Connect | OpenEndpoint | ConnectEndpoint | Send | Receive | Ping | Pong


# ---- answers ---------------------------------------------------------------------------------------------------


class Done(Message, frozen=True, kw_only=True):
    pass


class Listening(Message, frozen=True, kw_only=True):
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Target(Message, frozen=True, kw_only=True):
    """What the other endpoint needs in order to write here."""

    address: Annotated[bytes, msgspec.Meta(max_length=512)]
    base: Word64
    key: Word64
    length: Bytes


class Spent(Message, frozen=True, kw_only=True):
    ns: Word64
    cpu_ns: Word64


class Times(Message, frozen=True, kw_only=True):
    p50_ns: Word64
    p99_ns: Word64


class Refused(Message, frozen=True, kw_only=True):
    """An InputError (`field`) or a FabricError (`call` and `code`) of the side."""

    text: Annotated[str, msgspec.Meta(max_length=4096)]
    field: Name | None = None
    call: Name = ""
    code: int = 0


Answer = Done | Listening | Target | Spent | Times | Refused

questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)
_MAX_TEXT, _MAX_CALL = 4096, 256


def refused(text: str, *, field: str | None = None, call: str = "", code: int = 0) -> Refused:
    """No longer than it may be."""
    return Refused(text=text[:_MAX_TEXT], field=field, call=call[:_MAX_CALL], code=code)


# ---- the stream ------------------------------------------------------------------------------------------------


def check(question: Question) -> None:
    """Before it is asked: raises InputError where a side would end at it."""
    try:
        questions.decode(msgspec.msgpack.encode(question))
    except msgspec.ValidationError as error:
        text, _, path = str(error).rpartition(" - at `$.")
        raise InputError(path.rstrip("`"), text) from None


def tell(stream: socket.socket, message: Message, *, timeout_s: float | None = None) -> None:
    """Raises OSError; TimeoutError is one."""
    write_frame(stream, msgspec.msgpack.encode(message), timeout_s=timeout_s)


def next_answer(stream: socket.socket, *, deadline: float) -> Answer | None:
    """Until `deadline` of the monotonic clock; None when the other side is gone. Raises OSError and FabricError."""
    try:
        body = read_frame(stream, deadline=deadline)
        return None if body is None else _answers.decode(body)
    except ValueError as error:
        raise FabricError("limits: answer", errno.EPROTO, str(error)) from error
