"""The control messages of PROTOCOL: what gateways and instances (prefillers, decoders) say to each other.

They travel over ZeroMQ: an instance's DEALER socket, its routing id the ASCII of its uuid, to every gateway's ROUTER
socket; one msgpack frame a message. Owns no state. As with the fabric messages, one that does not decode is refused
whole, all are idempotent, and deadlines travel as remaining seconds.

    instance -> gateway   Announce until a Beat comes, and again whenever one comes from a gateway that it does not
                          know yet; Status twice a second, whatever the engine does; Goodbye before it leaves
    gateway -> instance   Beat twice a second: an instance aborts the requests of a gateway that has been silent for 2 s
    gateway -> instance   Drain: it takes nothing new, ends what it runs, says Goodbye; every Status says so meanwhile
    gateway -> decoder    Prefillers{who is alive}: greeted before the first request needs one
    a request             Reserve -> Granted | Wait      with each prefiller's answer, until there is a lease
                          Generate -> Accepted | NoRoom | Rejected, then Tokens .., Finished; Abort at any time
                          NeedPrefill -> UsePrefiller, when a ticket failed
                          Prefilled: a prefiller has computed a prompt, and how long that took

A colocated instance is a decoder that is never given a prefiller.
"""

import sys
from typing import Annotated, Literal, TypeVar

import msgspec

from headrace.errors import InputError, ProtocolFault
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

Told = TypeVar("Told")

CONTROL_VERSION = 3

BEAT_S = 0.5
"""Between two Beats, and between two Status messages."""

SILENCE_S = 2.0
"""Without a message for this long the other side is taken for gone. A forward pass does not delay a beat: beats are
sent by the process's loop, not by its model thread."""

MAX_MESSAGE_BYTES = 16 << 20
"""What either socket takes (ZMQ_MAXMSGSIZE): the longest prompt, every token id in five bytes, is a third of it."""

Role = Literal[FabricRole, "colocated"]
MAX_PROMPT_TOKENS = 2**20
TokenIds = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
_LARGEST = sys.float_info.max  # bounds keep infinities out, and NaN, which no comparison lets in
Gauge = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
Counter = Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)]
TokensPerSecond = Annotated[float, msgspec.Meta(ge=0, le=_LARGEST)]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one choice of one request is drawn. temperature 0 is greedy; top_k 0 and top_p 1 keep everything."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    top_k: Count = 0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    choice: Count = 0


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an instance can hold. Tokens, or as named."""

    max_model_len: Positive  # prompt and output together
    pool_tokens: Positive  # num_pages * page_size, of all data-parallel groups; max_model_len fits into one
    page_size: Positive
    max_running: Positive  # requests that hold pages at once, in all groups


# ---- instance -> gateway ---------------------------------------------------------------------------------------


class Announce(Message, frozen=True, kw_only=True):
    """Who I am. `fabric_address` is where a decoder greets a prefiller; empty for the others."""

    role: Role
    version: Count
    name: Name  # for people: "prefiller-0"
    model: Name  # as named in requests
    fingerprint: Name
    limits: Limits
    tp: Degree  # ranks of a data-parallel group
    dp: Degree
    fabric_address: Blob
    host: Name  # equal where pids mean the same
    pid: Positive
    started: Ticks  # tells this process from the next one with its pid


class Prefilling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How fast one more prompt is computed, beside what decodes there and within its budget: n tokens in about
    step_s + n / rate."""

    step_s: Seconds
    rate: TokensPerSecond  # 0: no chunk is within the budget
    chunk_tokens: Count = 0  # of a step, at most: what an urgent prompt may have to wait for


class Decoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a decode step takes, as it was measured: step_s + row_s * rows + key_s * keys that they read; and who is in
    it, of the data-parallel group that runs most: all that hold pages, since they come to decode."""

    step_s: Seconds
    row_s: Seconds
    key_s: Seconds
    num_rows: Count
    num_keys: Count
    num_interactive: Count  # rows, of all groups


class Status(Message, frozen=True, kw_only=True):
    """How it stands, all its data-parallel groups together. `gauges` and `counters` go to /metrics by these names,
    labelled with the instance."""

    num_free_pages: Count
    num_running: Count
    num_waiting: Count
    num_queued_tokens: Count  # prompt tokens leased or waiting to be computed
    num_interactive_tokens: Count  # those of them that are interactive, and computed first
    prefilling: Prefilling | None  # None: not measured yet
    decoding: Decoding | None  # of whoever decodes; None: not measured yet
    is_draining: bool  # takes nothing new, for ever: what is asked of it is answered with Wait or NoRoom
    gauges: Annotated[dict[Name, Gauge], msgspec.Meta(max_length=256)]
    counters: Annotated[dict[Name, Counter], msgspec.Meta(max_length=256)]


class Goodbye(Message, frozen=True, kw_only=True):
    """The process ends now; whatever it ran is over."""


class Granted(Message, frozen=True, kw_only=True):
    """prefiller -> gateway: the answer to Reserve."""

    request_id: Name
    lease: Name


class Wait(Message, frozen=True, kw_only=True):
    """prefiller -> gateway: no room now; ask again later."""

    request_id: Name
    num_queued_tokens: Count


class Prefilled(Message, frozen=True, kw_only=True):
    """prefiller -> gateway: the prompt's last chunk is computed. Queue: from its Prefill to its first step; prefill:
    from there to its last layer."""

    request_id: Name
    num_computed: Count
    queue_s: Seconds
    prefill_s: Seconds


class Accepted(Message, frozen=True, kw_only=True):
    """decoder -> gateway: pages are reserved. A lease that is not used is the gateway's to return."""

    request_id: Name
    uses_lease: bool
    cached_tokens: Count  # h of the prompt: what the decoder's own prefix index had


class NoRoom(Message, frozen=True, kw_only=True):
    """decoder -> gateway: not now; nothing is held. Offer it again when a Status shows more room, or elsewhere."""

    request_id: Name
    num_free_pages: Count  # of the group that has most


class Rejected(Message, frozen=True, kw_only=True):
    """decoder -> gateway: never, not even when everything is free. A 4xx that names the field."""

    request_id: Name
    field: Name
    text: Text


class Tokens(Message, frozen=True, kw_only=True):
    """decoder -> gateway: the next tokens; `index` is the place of the first of them in this Generate's output.
    `cached_tokens` is in each of them, since a gateway that finds a stop string never hears Finished."""

    request_id: Name
    index: Count
    token_ids: TokenIds
    cached_tokens: Count  # max(h, p) of the prompt


FinishReason = Literal["stop", "length", "abort", "error"]


class Waterfall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a request's time went at the decoder, in seconds. What lies between fetch_s and the prefiller's own
    queue_s + prefill_s (Prefilled) is exposed transfer."""

    fetch_s: Seconds = 0.0  # ticket opened until its last byte landed (0: prefilled here)
    local_prefill_s: Seconds = 0.0  # admitted until the prompt was computed here (0: fetched)
    hand_over_s: Seconds = 0.0  # last byte landed until the request was in a decode step: digests, waiting
    first_step_s: Seconds = 0.0  # that step


class Finished(Message, frozen=True, kw_only=True):
    """decoder -> gateway, the last word on a Generate, after all its Tokens. A stop token is counted, and is not
    among the Tokens."""

    request_id: Name
    reason: FinishReason
    text: Text  # of an error; empty otherwise
    num_tokens: Count  # completion tokens, the stop token included
    cached_tokens: Count  # max(h, p) of the prompt
    waterfall: Waterfall


class NeedPrefill(Message, frozen=True, kw_only=True):
    """decoder -> gateway: the ticket failed. Without an answer in 200 ms the decoder prefills by itself."""

    request_id: Name
    prefiller: Uuid  # the one that failed
    reason: Text
    is_fault: bool  # of the link or the prefiller, which are suspected after repeats; a refusal is none


InstanceMessage = (
    Announce
    | Status
    | Goodbye
    | Granted
    | Wait
    | Prefilled
    | Accepted
    | NoRoom
    | Rejected
    | Tokens
    | Finished
    | NeedPrefill
)


# ---- gateway -> instance ---------------------------------------------------------------------------------------


class Beat(Message, frozen=True, kw_only=True):
    """Still here."""


class Successor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an instance goes on as, in another process and under another uuid. The bounds are a decoder's."""

    role: FabricRole
    name: Name
    tpot_s: Seconds | None
    max_stall_s: Seconds | None


class Drain(Message, frozen=True, kw_only=True):
    """gateway -> instance: leave, without losing a request. `successor` None: for good."""

    successor: Successor | None


class PrefillerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a decoder greets a prefiller, and whom it will find there."""

    uuid: Uuid
    fabric_address: Blob


class Prefillers(Message, frozen=True, kw_only=True):
    """gateway -> decoder: all prefillers that are alive, at every change. One that no gateway names any more has gone
    silent: its tickets are given up."""

    prefillers: Annotated[tuple[PrefillerAddress, ...], msgspec.Meta(max_length=1024)]


class Reserve(Message, frozen=True, kw_only=True):
    """gateway -> prefiller: a lease for a prompt of num_tokens."""

    request_id: Name
    num_tokens: Positive
    tier: Tier
    remaining_s: Seconds


class ReturnLease(Message, frozen=True, kw_only=True):
    """gateway -> prefiller: granted and not used."""

    lease: Name


class PrefillFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prefiller, and the credit there."""

    prefiller: Uuid
    lease: Name


class Generate(Message, frozen=True, kw_only=True):
    """gateway -> decoder. token_ids is the prompt, and what was generated before when a stream is resumed elsewhere:
    draws are keyed by position, so it goes on as it would have. `prefill` None: prefill there."""

    request_id: Name
    token_ids: TokenIds
    num_prompt_tokens: Positive  # how many of token_ids are the prompt
    max_tokens: Positive  # still to come
    sampling: Sampling
    stop_token_ids: Annotated[tuple[Count, ...], msgspec.Meta(max_length=256)]
    prefill: PrefillFrom | None
    tier: Tier
    remaining_s: Seconds

    def __post_init__(self) -> None:
        """Raises InputError; on the wire that is a ProtocolFault like any other."""
        if self.num_prompt_tokens > len(self.token_ids):
            raise InputError(
                "num_prompt_tokens", f"must be at most the {len(self.token_ids)} token_ids, is {self.num_prompt_tokens}"
            )


class Abort(Message, frozen=True, kw_only=True):
    """gateway -> decoder: nobody wants it any more. Answered with Finished{abort} where it was running."""

    request_id: Name


class UsePrefiller(Message, frozen=True, kw_only=True):
    """gateway -> decoder, the answer to NeedPrefill. None: prefill there. One with a lease is answered with Accepted,
    also when it came too late: a lease that is not used is the gateway's to return."""

    request_id: Name
    prefill: PrefillFrom | None


GatewayMessage = Beat | Drain | Prefillers | Reserve | ReturnLease | Generate | Abort | UsePrefiller

ControlMessage = InstanceMessage | GatewayMessage

_ENCODER = msgspec.msgpack.Encoder()
_FROM_INSTANCE: msgspec.msgpack.Decoder[InstanceMessage] = msgspec.msgpack.Decoder(InstanceMessage)
_FROM_GATEWAY: msgspec.msgpack.Decoder[GatewayMessage] = msgspec.msgpack.Decoder(GatewayMessage)


def encode_control(message: Message) -> bytes:
    """Any of them, and an operator's."""
    return _ENCODER.encode(message)


def decode_from_instance(wire: bytes) -> InstanceMessage:
    """Raises ProtocolFault naming the field when `wire` is no such message."""
    return decoded(_FROM_INSTANCE, wire)


def decode_from_gateway(wire: bytes) -> GatewayMessage:
    """Raises ProtocolFault naming the field when `wire` is no such message."""
    return decoded(_FROM_GATEWAY, wire)


def decoded(decoder: msgspec.msgpack.Decoder[Told], wire: bytes) -> Told:
    """Raises ProtocolFault."""
    try:
        return decoder.decode(wire)
    except (msgspec.DecodeError, RecursionError) as fault:
        raise ProtocolFault(f"not a control message: {fault}") from fault
