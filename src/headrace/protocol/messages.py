"""The fabric messages of PROTOCOL as closed, tagged structs, and their one encoding (msgpack).

Between decoders and prefillers; what these and gateways say to each other is in `control`. Owns no state. A message
that does not decode is refused whole: `decode` raises ProtocolFault with the field. All of them are idempotent and may
arrive in any order. Deadlines travel as remaining seconds, never as a time of day. Every message names its sender by
the uuid that the process drew at its start.
"""

from typing import Annotated, Literal

import msgspec

from headrace.errors import ProtocolFault

PROTOCOL_VERSION = 2

FabricRole = Literal["prefiller", "decoder"]
Tier = Literal["interactive", "flex"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=1024)]  # a plan has at most two routes a rank: their numbers are 16 bits
MOST_REMAINING_S = 1e6
MAX_NAME = 256
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_REMAINING_S)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Blob = Annotated[bytes, msgspec.Meta(max_length=512)]
Uuid = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]  # $ would let a newline follow
Bits32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Ticks = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # 31 bits of clock ticks are 248 days of uptime


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder's one-time permission to write a request's pages. `epoch` rises with every revoke of the pair."""

    decoder: Uuid
    epoch: Count
    imm: Bits32


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Any message. `sender` is what its content claims; proving it is the business of the transport's MAC."""

    sender: Uuid


class LayersShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole model's KV in a run of layers whose pages are alike."""

    kind: Name
    dtype: Name
    page_size: Positive
    num_layers: Positive
    num_kv_heads: Positive
    head_dim: Positive


class PoolShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What must be known of a peer's KV pool to write into it: what the model has, how the ranks share it, and how many
    pages each of them has. Sizes in bytes, counts, or as named."""

    layers: Annotated[tuple[LayersShape, ...], msgspec.Meta(min_length=1, max_length=4)]
    tp: Degree
    dp: Degree
    num_pages: Positive
    num_aux_slots: Positive
    aux_slot_bytes: Positive


class Hello(Message, frozen=True, kw_only=True):
    """Both ways. A decoder's opens `epoch` with the descriptor of a fresh grant; a prefiller's answer repeats it."""

    role: FabricRole
    protocol: Count
    epoch: Count
    fingerprint: Name  # of the model's weights and configuration
    layout: Name  # name of the byte order inside a page
    pool: PoolShape
    address: Blob  # of the sender's fabric endpoint
    descriptor: Blob  # empty in a prefiller's answer: nobody writes there
    host: Name  # equal where pids mean the same
    pid: Positive
    started: Ticks  # tells this process from the next one with its pid


class HelloHead(msgspec.Struct, frozen=True, kw_only=True, tag="Hello"):
    """What is in a Hello of every version of the protocol, whatever else is: enough to refuse it by name."""

    sender: Uuid
    protocol: Count
    epoch: Count
    address: Blob


class HelloRefused(Message, frozen=True, kw_only=True):
    """The answer to a Hello that differs in `field`. `address` is the refusing endpoint's."""

    epoch: Count
    address: Blob
    field: Name
    ours: Text
    theirs: Text


class Prefill(Message, frozen=True, kw_only=True):
    """decoder -> prefiller. `pages` are page ids of the decoder's data-parallel `group` for positions [h, n-1) of the n
    token ids, in order. `seed` says which replicas of the prefiller send (see `messenger.plan`)."""

    ticket: Ticket
    request_id: Name
    lease: Name
    token_ids: tuple[Count, ...]
    group: Count
    pages: tuple[Count, ...]
    aux_slot: Count
    seed: Bits32
    remaining_s: Seconds


class Cancel(Message, frozen=True, kw_only=True):
    """decoder -> prefiller. Post nothing more under this ticket, whether it was seen or not."""

    ticket: Ticket


RefusalReason = Literal["no_lease", "no_room", "too_long", "held_cap", "stale", "malformed"]


class Refused(Message, frozen=True, kw_only=True):
    """prefiller -> decoder. Nothing was or will be posted under this ticket."""

    ticket: Ticket
    reason: RefusalReason
    text: Text
    retry_after_s: Seconds


class Failed(Message, frozen=True, kw_only=True):
    """prefiller -> decoder. The list is closed; of num_posted writes num_unknown completed in error."""

    ticket: Ticket
    num_posted: Count
    num_unknown: Count
    reason: Text


class CancelAck(Message, frozen=True, kw_only=True):
    """prefiller -> decoder. The answer to Cancel; num_posted is final."""

    ticket: Ticket
    num_posted: Count
    num_unknown: Count


class TicketClosed(Message, frozen=True, kw_only=True):
    """prefiller -> decoder (PROTOCOL: Closed). Everything was posted and has completed here; not awaited."""

    ticket: Ticket
    num_posted: Count


AnyMessage = Hello | HelloRefused | Prefill | Cancel | Refused | Failed | CancelAck | TicketClosed

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_HEAD_DECODER = msgspec.msgpack.Decoder(HelloHead)


def is_name(name: str) -> bool:
    """Whether it travels as a Name: short enough, and Unicode that can be encoded."""
    return len(name) <= MAX_NAME and not any("\ud800" <= character <= "\udfff" for character in name)


def clipped(text: str) -> str:
    """What travels as a Text: a reason may quote what came from outside, names of files that are no Unicode too."""
    sendable = text[:1001].encode(errors="replace").decode()
    return sendable if len(text) <= 1000 else f"{sendable[:1000]}..."


def encode(message: AnyMessage) -> bytes:
    return _ENCODER.encode(message)


def decode(wire: bytes) -> AnyMessage:
    """Raises ProtocolFault naming the field when `wire` is no message of this version."""
    try:
        return _DECODER.decode(wire)
    except (msgspec.DecodeError, RecursionError) as fault:  # the latter: 100 KB of nested arrays in an unknown field
        raise ProtocolFault(f"not a headrace message: {fault}") from fault


def hello_of_another_version(wire: bytes) -> HelloHead | None:
    """Of what does not decode: its head, where a peer of another version greets."""
    try:
        head = _HEAD_DECODER.decode(wire)
    except (msgspec.DecodeError, RecursionError):
        return None
    return head if head.protocol != PROTOCOL_VERSION else None
