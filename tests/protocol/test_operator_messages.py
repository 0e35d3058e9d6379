"""What operators and gateways say to each other comes back as it was sent, and nothing else is let in."""

from typing import Any, get_args

import msgspec
import pytest
from wire_fields import fields_of, leaves, refusal_of

from headrace.errors import ProtocolFault
from headrace.protocol.control import CONTROL_VERSION, Beat, Limits, Prefilling, Status, encode_control
from headrace.protocol.messages import Message
from headrace.protocol.operator import (
    Deployment,
    Dismiss,
    GatewayFacts,
    Inspect,
    InstanceFacts,
    Leaves,
    OperatorAnswer,
    OperatorMessage,
    Refused,
    RequestFacts,
    decode_at_gateway,
    decode_at_operator,
)

UUID = "0123456789abcdef" * 2
STATUS = Status(
    sender=UUID,
    num_free_pages=3,
    num_running=0,
    num_waiting=1,
    num_queued_tokens=512,
    num_interactive_tokens=12,
    prefilling=Prefilling(step_s=0.01, rate=1500.0),
    decoding=None,
    is_draining=True,
    gauges={"pages": 4.0},
    counters={"steps": 0.0},
)
INSTANCE = InstanceFacts(
    uuid=UUID,
    name="prefiller-0",
    role="prefiller",
    standing="serving",
    refusal="",
    silent_s=0.25,
    host="boot/1",
    pid=17,
    started=1,
    fabric_address=b"\x00\xff",
    limits=Limits(max_model_len=2048, pool_tokens=4096, page_size=16, max_running=32),
    tp=2,
    dp=1,
    status=STATUS,
)
REQUEST = RequestFacts(
    request_id="r~1",
    tier="flex",
    stage="decoding",
    decoder=UUID,
    prefiller=None,
    num_prompt_tokens=9,
    num_tokens=4,
)
DEPLOYMENT = Deployment(
    sender=UUID,
    gateway=GatewayFacts(uuid=UUID, name="gateway", model="m", url="http://127.0.0.1:8000", pid=1),
    instances=(INSTANCE, msgspec.structs.replace(INSTANCE, status=None)),
    requests=(REQUEST,),
    num_requests=1,
)
TO_GATEWAY: list[OperatorMessage] = [
    Inspect(sender=UUID, version=CONTROL_VERSION),
    Dismiss(sender=UUID, instance=UUID, role="decoder", tpot_s=0.05, max_stall_s=None, is_forced=False),
]
TO_OPERATOR: list[OperatorAnswer] = [
    DEPLOYMENT,
    Leaves(sender=UUID, instance=UUID, successor="decoder-3"),
    Refused(sender=UUID, field="version", text="must be 3, is 2"),
]
MESSAGES: list[Message] = [*TO_GATEWAY, *TO_OPERATOR]
each_message = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)


def receive(message: Message, wire: bytes) -> Any:
    return (decode_at_gateway if message in TO_GATEWAY else decode_at_operator)(wire)


def test_every_kind_of_message_is_tried_here() -> None:
    assert {type(message) for message in TO_GATEWAY} == set(get_args(OperatorMessage))
    assert {type(message) for message in TO_OPERATOR} == set(get_args(OperatorAnswer))


@each_message
def test_a_message_comes_back_as_it_was_sent(message: Message) -> None:
    assert receive(message, encode_control(message)) == message


@each_message
def test_a_message_that_goes_the_wrong_way_is_refused(message: Message) -> None:
    wrong = decode_at_operator if message in TO_GATEWAY else decode_at_gateway
    assert "`$.type`" in refusal_of(wrong, fields_of(encode_control(message)))


def test_a_gateway_hears_instances_at_the_same_socket_and_no_other_gateway() -> None:
    assert decode_at_gateway(encode_control(STATUS)) == STATUS
    with pytest.raises(ProtocolFault):
        decode_at_gateway(encode_control(Beat(sender=UUID)))


@each_message
def test_a_field_that_nobody_knows_is_refused_by_name(message: Message) -> None:
    fields = fields_of(encode_control(message))
    with pytest.raises(ProtocolFault, match="`surprise`"):
        receive(message, msgspec.msgpack.encode(fields | {"surprise": 1}))


@each_message
def test_a_value_of_another_type_is_refused_by_its_place(message: Message) -> None:
    fields = fields_of(encode_control(message))
    for leaf in leaves(fields):
        with pytest.raises(ProtocolFault) as fault:
            receive(message, msgspec.msgpack.encode(leaf.replaced(fields, {"a": [1]})))
        assert f"`{leaf.path}`" in str(fault.value)
