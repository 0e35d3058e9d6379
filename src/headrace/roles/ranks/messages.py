"""What the lead of an instance and its rank processes say to each other, one packet of a socket pair a message.

msgpack of closed, tagged structs, without a version: one end has started the other. What a step computes is not in
here, it lies in the step memory. Owns nothing. The life of a rank:

    lead -> rank   RankTask                 what to load
    rank -> lead   Here                     it has loaded torch: all ranks meet
    lead -> rank   the KV memory's descriptor, beside a byte
    rank -> lead   Loaded | Refused         it can compute; or why it cannot, and it ends
    lead -> rank   Compute                  a step lies in the step memory
    rank -> lead   Computed | Refused | Failed   done, tokens drawn; or its logits are no numbers; or nothing works

Beside it the rank writes a byte into a pipe twice a second, its pulse, whatever it computes.
"""

import socket
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.step_memory import StepLimits
from headrace.errors import InputError
from headrace.kvcache.layout import PoolLayout
from headrace.roles.options import InstanceOptions

BEAT_S = 0.5
"""Between two bytes of a rank's pulse."""

_LONGEST = 1 << 16
"""Bytes of a packet: of a task, whose options name files and gateways."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    pass


class RankTask(_Message, frozen=True, kw_only=True):
    """`meeting_points` is a folder where only the instance's ranks can write."""

    options: InstanceOptions
    rank: int
    fingerprint: str
    layout: PoolLayout
    limits: StepLimits
    meeting_points: str


class Here(_Message, frozen=True, kw_only=True):
    pass


class Loaded(_Message, frozen=True, kw_only=True):
    pass


class Compute(_Message, frozen=True, kw_only=True):
    pass


class Computed(_Message, frozen=True, kw_only=True):
    pass


class Refused(_Message, frozen=True, kw_only=True):
    """An InputError."""

    field: str
    text: str

    @classmethod
    def of(cls, error: InputError) -> "Refused":
        return cls(field=error.field, text=str(error).removeprefix(f"{error.field}: "))


class Failed(_Message, frozen=True, kw_only=True):
    """A step was not computed to its end, so the ranks are not in step any more."""

    text: str


RankMessage = RankTask | Here | Loaded | Compute | Computed | Refused | Failed


def _encoded(value: object) -> str:
    assert isinstance(value, Path), f"cannot send {value!r}"
    return str(value)


def _decoded(kind: type, value: Any) -> object:  # noqa: ANN401 (msgspec's)
    return kind(value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_DECODER: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage, dec_hook=_decoded)


def send(to: socket.socket, message: RankMessage) -> None:
    """Raises OSError where the other end is gone."""
    to.send(_ENCODER.encode(message))


def receive(from_: socket.socket) -> RankMessage | None:
    """Waits. None where the other end is gone."""
    try:
        packet = from_.recv(_LONGEST)
    except ConnectionError:
        return None
    return _DECODER.decode(packet) if packet else None
