"""What an engine's side is asked and what it answers: closed, tagged structs in msgpack.

A question that does not decode ends the side; an answer that does not is a FabricError. In the order of a life:
Describe, MakeMemory where none was given, Fill or Poison; then for each transport Open, Admit, Join, and what is timed.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.fabric.interface import Descriptor
from headrace.fabric.limits.wire import (
    Bytes,
    Done,
    MakeMemory,
    Message,
    Name,
    OffsetBytes,
    Refused,
    Spent,
    Times,
    Word64,
)

Rounds = Annotated[int, msgspec.Meta(ge=1, le=10**6)]
PageCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 19)]
PauseNs = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
AddressBytes = Annotated[bytes, msgspec.Meta(max_length=4096)]
DescriptorBytes = Annotated[bytes, msgspec.Meta(max_length=Descriptor.MAX_BYTES)]

RoundsBy = Literal["owner", "python", "message"]


class Describe(Message, frozen=True, kw_only=True):
    """-> Described"""


class Fill(Message, frozen=True, kw_only=True):
    """The whole memory with bytes that follow from the seed. -> Done"""

    seed: Word64


class Poison(Message, frozen=True, kw_only=True):
    """-> Done"""


class Open(Message, frozen=True, kw_only=True):
    """An engine on this transport alone, instead of an earlier one. -> Opened"""

    transport: Name


class Admit(Message, frozen=True, kw_only=True):
    """Of the other side's address: it may write here. -> Admitted"""

    address: AddressBytes


class Join(Message, frozen=True, kw_only=True):
    """With what the other side's Admit gave. -> Done"""

    descriptor: DescriptorBytes


class WritePages(Message, frozen=True, kw_only=True):
    """To a side that is asked ReceivePages. -> Wrote"""

    src_offsets: OffsetBytes
    dst_offsets: OffsetBytes
    page_bytes: Bytes


class ReceivePages(Message, frozen=True, kw_only=True):
    """-> Received"""

    num_pages: PageCount


class CopyPages(Message, frozen=True, kw_only=True):
    """The same by a bare loop, into the other side's memory, on the owner's CPU. -> Copied"""

    src_offsets: OffsetBytes
    dst_offsets: OffsetBytes
    page_bytes: Bytes


class DigestPages(Message, frozen=True, kw_only=True):
    """-> Digested"""

    offsets: OffsetBytes
    page_bytes: Bytes


class CountChanged(Message, frozen=True, kw_only=True):
    """What is no poison beside these pages. -> Changed"""

    offsets: OffsetBytes
    page_bytes: Bytes


class SubmitPages(Message, frozen=True, kw_only=True):
    """Times of the call that submits them all, to a side that is asked CollectPages. -> Times"""

    src_offsets: OffsetBytes
    dst_offsets: OffsetBytes
    page_bytes: Bytes
    num_rounds: Rounds


class CollectPages(Message, frozen=True, kw_only=True):
    """Times from the last of their arrivals until a coroutine that waits for it runs. -> Times"""

    num_pages: PageCount
    num_rounds: Rounds


class Ping(Message, frozen=True, kw_only=True):
    """-> Times"""

    by: RoundsBy
    num_rounds: Rounds
    pause_ns: PauseNs  # before each


class Pong(Message, frozen=True, kw_only=True):
    """-> Done"""

    by: RoundsBy
    num_rounds: Rounds


class Idle(Message, frozen=True, kw_only=True):
    """Nothing is done for so long. -> Idled"""

    ns: Annotated[int, msgspec.Meta(ge=10**6, le=60 * 10**9)]


Question = (
    Describe
    | MakeMemory
    | Fill
    | Poison
    | Open
    | Admit
    | Join
    | WritePages
    | ReceivePages
    | CopyPages
    | DigestPages
    | CountChanged
    | SubmitPages
    | CollectPages
    | Ping
    | Pong
    | Idle
)


class Described(Message, frozen=True, kw_only=True):
    """By preference."""

    transports: Annotated[list[Name], msgspec.Meta(max_length=16)]


class Opened(Message, frozen=True, kw_only=True):
    address: AddressBytes


class Admitted(Message, frozen=True, kw_only=True):
    descriptor: DescriptorBytes


class Wrote(Message, frozen=True, kw_only=True):
    """By the monotonic clock: when the pages were submitted, and when the other side's answer came that it has all."""

    began_ns: Word64
    answered_ns: Word64
    cpu_ns: Word64


class Received(Message, frozen=True, kw_only=True):
    reached_ns: Word64  # the last arrival, by the monotonic clock
    cpu_ns: Word64


class Copied(Message, frozen=True, kw_only=True):
    method: Name
    spent: Spent


class Digested(Message, frozen=True, kw_only=True):
    """Of the pages in their order."""

    digest: Annotated[bytes, msgspec.Meta(max_length=64)]


class Changed(Message, frozen=True, kw_only=True):
    num_bytes: Word64


class Idled(Message, frozen=True, kw_only=True):
    ns: Word64
    cpu_ns: Word64
    owner_cpu_ns: Word64


Answer = Done | Described | Opened | Admitted | Wrote | Received | Copied | Digested | Changed | Times | Idled | Refused

questions = msgspec.msgpack.Decoder(Question)
answers = msgspec.msgpack.Decoder(Answer)
encode = msgspec.msgpack.encode


def wired(offsets: NDArray[np.int64]) -> bytes:
    return offsets.astype("<i8").tobytes()
