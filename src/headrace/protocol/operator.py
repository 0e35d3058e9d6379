"""What an operator and a gateway say to each other: how the deployment stands, and what is to change in it.

An operator is a command of this user (`headrace status`, `drain`, `role`): a DEALER at the gateway's control socket, as
instances are, its routing id the ASCII of a uuid that it draws. Owns no state. Each message is answered by one; a
gateway shows what itself knows, for gateways share nothing.

    Inspect    -> Deployment, or Refused where the versions differ
    Dismiss    -> Leaves, or Refused with the reason; that it has left is seen in the next Deployments
"""

from typing import Annotated, Literal

import msgspec

from headrace.protocol.control import InstanceMessage, Limits, Role, Status, decoded
from headrace.protocol.messages import (
    Blob,
    Count,
    Degree,
    FabricRole,
    Message,
    Name,
    Positive,
    Seconds,
    Text,
    Ticks,
    Tier,
    Uuid,
)

MOST_REQUESTS_TOLD = 10_000
"""In one Deployment, some 2 MB."""

Standing = Literal["serving", "draining", "absent", "refused"]
"""draining: takes no new request, ends what it runs, then leaves. absent: silent, or its connection is gone; it may
come back. refused: it differs from the others."""

Stage = Literal["waiting", "offered", "prefilling", "transferring", "decoding"]
"""Of a request, as far as its gateway hears of it:

    waiting        for its turn, a prefiller's lease or room at a decoder
    offered        to a decoder, which has not answered yet
    prefilling     accepted; its prompt is computed, by `prefiller` (layers leave meanwhile) or the decoder
    transferring   the prefiller has computed it; no token came yet
    decoding       tokens came
"""


# ---- operator -> gateway ---------------------------------------------------------------------------------------


class Inspect(Message, frozen=True, kw_only=True):
    """How does the deployment stand?"""

    version: Count


class Dismiss(Message, frozen=True, kw_only=True):
    """An instance is to leave without losing a request, and where `role` is one to come back in that role. The bounds
    are those of a decoder. `is_forced`: also the last decoder."""

    instance: Uuid
    role: FabricRole | None
    tpot_s: Seconds | None
    max_stall_s: Seconds | None
    is_forced: bool


OperatorMessage = Inspect | Dismiss


# ---- gateway -> operator ---------------------------------------------------------------------------------------


class GatewayFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who answers. `url` is where it serves HTTP."""

    uuid: Uuid
    name: Name
    model: Name
    url: Name
    pid: Positive


class InstanceFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An instance that the gateway knows. `host`, `pid` and `started` as in Announce."""

    uuid: Uuid
    name: Name
    role: Role
    standing: Standing
    refusal: Text  # why it is refused; empty otherwise
    silent_s: Seconds  # since it was last heard
    host: Name
    pid: Positive
    started: Ticks
    fabric_address: Blob  # of a prefiller
    limits: Limits
    tp: Degree
    dp: Degree
    status: Status | None  # the last one that came


class RequestFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request that is under way. `request_id` is its present attempt's, as decoders and prefillers know it: resumed
    elsewhere it ends in ~1, ~2."""

    request_id: Name
    tier: Tier
    stage: Stage
    decoder: Uuid | None  # that it is offered to, or runs at
    prefiller: Uuid | None  # that its prompt was given to; None: the decoder computes it, or nobody yet
    num_prompt_tokens: Count
    num_tokens: Count  # that came so far, in all its attempts


class Deployment(Message, frozen=True, kw_only=True):
    """Of more than MOST_REQUESTS_TOLD requests those that came first."""

    gateway: GatewayFacts
    instances: tuple[InstanceFacts, ...]
    requests: Annotated[tuple[RequestFacts, ...], msgspec.Meta(max_length=MOST_REQUESTS_TOLD)]
    num_requests: Count


class Leaves(Message, frozen=True, kw_only=True):
    """It has been told. `successor`: the name under which it comes back, if it does."""

    instance: Uuid
    successor: Name | None


class Refused(Message, frozen=True, kw_only=True):
    """It is not done, and why."""

    field: Name
    text: Text


OperatorAnswer = Deployment | Leaves | Refused

_AT_GATEWAY: msgspec.msgpack.Decoder[InstanceMessage | OperatorMessage] = msgspec.msgpack.Decoder(
    InstanceMessage | OperatorMessage
)
_AT_OPERATOR: msgspec.msgpack.Decoder[OperatorAnswer] = msgspec.msgpack.Decoder(OperatorAnswer)


def decode_at_gateway(wire: bytes) -> InstanceMessage | OperatorMessage:
    """Whatever comes in at a control socket. Raises ProtocolFault naming the field when `wire` is none of it."""
    return decoded(_AT_GATEWAY, wire)


def decode_at_operator(wire: bytes) -> OperatorAnswer:
    """Raises ProtocolFault naming the field when `wire` is no such message."""
    return decoded(_AT_OPERATOR, wire)
