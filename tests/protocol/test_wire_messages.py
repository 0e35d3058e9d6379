"""Every message comes back as it was sent, and whatever is no message is refused as a ProtocolFault that says why."""

import re
from functools import partial
from typing import Any, get_args

import msgspec
import pytest
import wire_fields
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_fields import anything

from headrace.errors import ProtocolFault
from headrace.protocol.control import Granted, Reserve, encode_control
from headrace.protocol.messages import (
    MOST_REMAINING_S,
    AnyMessage,
    Cancel,
    CancelAck,
    Failed,
    Hello,
    HelloRefused,
    LayersShape,
    PoolShape,
    Prefill,
    Refused,
    Ticket,
    TicketClosed,
    clipped,
    decode,
    encode,
    is_name,
)

UUID = "0123456789abcdef" * 2
TICKET = Ticket(decoder=UUID, epoch=3, imm=2**32 - 1)
LAYERS = LayersShape(kind="gqa", num_layers=30, num_kv_heads=3, page_size=16, head_dim=64, dtype="bf16")
POOL = PoolShape(layers=(LAYERS,), tp=4, dp=2, num_pages=1000, num_aux_slots=8, aux_slot_bytes=4096)
MESSAGES: list[AnyMessage] = [
    Hello(
        sender=UUID,
        role="decoder",
        protocol=1,
        epoch=1,
        fingerprint="model",
        layout="HND-KV",
        pool=POOL,
        address=b"\x00\xff",
        descriptor=b"\x01" * 29,
        host="boot/1",
        pid=17,
        started=2**31 + 5,
    ),
    HelloRefused(sender=UUID, epoch=1, address=b"a", field="dtype", ours="bf16", theirs="fp32"),
    Prefill(
        sender=UUID,
        ticket=TICKET,
        request_id="r",
        lease="1",
        token_ids=(0, 1, 2**31 - 1),
        group=1,
        pages=(5, 0),
        aux_slot=0,
        seed=2**32 - 1,
        remaining_s=1.5,
    ),
    Cancel(sender=UUID, ticket=TICKET),
    Refused(sender=UUID, ticket=TICKET, reason="no_room", text="full", retry_after_s=0.5),
    Failed(sender=UUID, ticket=TICKET, num_posted=3, num_unknown=1, reason="the step failed"),
    CancelAck(sender=UUID, ticket=TICKET, num_posted=0, num_unknown=0),
    TicketClosed(sender=UUID, ticket=TICKET, num_posted=61),
]
each_message = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)


def fields_of(message: AnyMessage) -> dict[str, Any]:
    return wire_fields.fields_of(encode(message))


refusal = partial(wire_fields.refusal_of, decode)


def test_every_kind_of_message_is_tried_here() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(AnyMessage))


@each_message
def test_a_message_comes_back_as_it_was_sent(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


@each_message
def test_every_message_names_its_kind_and_its_sender(message: AnyMessage) -> None:
    fields = fields_of(message)
    assert (fields["type"], fields["sender"]) == (type(message).__name__, UUID)


@each_message
def test_a_field_that_nobody_knows_is_refused_by_name(message: AnyMessage) -> None:
    assert "`surprise`" in refusal(fields_of(message) | {"surprise": 1})


@each_message
def test_a_missing_field_is_refused_by_name(message: AnyMessage) -> None:
    fields = fields_of(message)
    for name in fields:
        if name != "type":
            assert f"`{name}`" in refusal({key: value for key, value in fields.items() if key != name})


@each_message
def test_a_field_of_another_type_is_refused_by_name(message: AnyMessage) -> None:
    fields = fields_of(message)
    for name in fields:
        if name != "type":
            assert f"`$.{name}`" in refusal(fields | {name: {"of": ["another", "type"]}})


@each_message
def test_numbers_that_are_negative_or_huge_are_refused_by_name(message: AnyMessage) -> None:
    fields = fields_of(message)
    for name, value in fields.items():
        if isinstance(value, int):
            assert f"`$.{name}`" in refusal(fields | {name: -1})
            assert f"`$.{name}`" in refusal(fields | {name: 2**63})
        if isinstance(value, float):
            for wrong in (-0.5, float("nan"), -float("inf")):
                assert f"`$.{name}`" in refusal(fields | {name: wrong})


LONGEST: dict[str, dict[str, int]] = {
    "Hello": {"fingerprint": 256, "layout": 256, "host": 256, "address": 512, "descriptor": 512},
    "HelloRefused": {"field": 256, "ours": 1024, "theirs": 1024, "address": 512},
    "Prefill": {"request_id": 256, "lease": 256},
    "Refused": {"text": 1024},
    "Failed": {"reason": 1024},
}
"""In characters, or bytes, by kind and field: nobody stores or repeats more of what a stranger wrote."""

OF_CLOSED_SETS = {"type", "sender", "role", "reason"}


@each_message
def test_a_text_is_taken_up_to_its_length_and_refused_by_name_beyond_it(message: AnyMessage) -> None:
    fields = fields_of(message)
    longest = LONGEST.get(type(message).__name__, {})
    texts = {name for name, value in fields.items() if isinstance(value, str | bytes)}
    assert texts - set(longest) <= OF_CLOSED_SETS, "a text without a limit"
    for name, most in longest.items():
        character = b"\xff" if isinstance(fields[name], bytes) else "\U0001f600"  # four bytes, one character
        taken = decode(msgspec.msgpack.encode(fields | {name: character * most}))
        assert getattr(taken, name) == character * most
        assert f"`$.{name}`" in refusal(fields | {name: character * (most + 1)})


@pytest.mark.parametrize("field", ["kind", "dtype"])
def test_the_names_of_layers_have_a_limit_too(field: str) -> None:
    fields = fields_of(MESSAGES[0])
    [layers] = fields["pool"]["layers"]
    wrong = fields["pool"] | {"layers": [layers | {field: "x" * 257}]}
    assert f"`$.pool.layers[0].{field}`" in refusal(fields | {"pool": wrong})


@each_message
def test_seconds_are_taken_up_to_a_million_and_refused_by_name_beyond_it(message: AnyMessage) -> None:
    fields = fields_of(message)
    for name in (name for name in fields if name.endswith("_s")):
        assert getattr(decode(msgspec.msgpack.encode(fields | {name: 1e6})), name) == MOST_REMAINING_S == 1e6
        for wrong in (1e6 + 1, float("inf")):
            assert f"`$.{name}`" in refusal(fields | {name: wrong})


@given(st.text(st.characters(), max_size=300))
@settings(max_examples=200)
def test_what_is_a_name_travels_and_what_is_none_does_not(name: str) -> None:
    sent = HelloRefused(sender=UUID, epoch=1, address=b"a", field=name, ours="", theirs="")
    try:
        travels = decode(encode(sent))
    except (ProtocolFault, UnicodeEncodeError):
        assert not is_name(name)
    else:
        assert is_name(name)
        assert travels == sent


@pytest.mark.parametrize(
    ("name", "is_one"), [("", True), ("x" * 256, True), ("x" * 257, False), ("a\ud800", False), ("\udfff", False)]
)
def test_a_name_is_short_enough_and_can_be_encoded(name: str, is_one: bool) -> None:
    assert is_name(name) is is_one


@given(st.text(st.characters(), max_size=20), st.sampled_from([1, 49, 50, 51, 60, 1000]))
@settings(max_examples=200)
def test_whatever_is_clipped_travels_as_a_text_and_begins_as_it_did(text: str, times: int) -> None:
    sent = Failed(sender=UUID, ticket=TICKET, num_posted=0, num_unknown=0, reason=clipped(text * times))
    told = decode(encode(sent))
    assert told == sent
    right = (text * times).encode(errors="replace").decode()
    assert sent.reason == (right if len(right) <= 1000 else right[:1000] + "...")


@each_message
def test_a_sender_that_is_no_uuid_is_refused(message: AnyMessage) -> None:
    for wrong in ("", UUID[1:], UUID.upper(), UUID + "0", UUID + "\n", UUID[1:] + "\n"):
        assert "`$.sender`" in refusal(fields_of(message) | {"sender": wrong})


@pytest.mark.parametrize(("field", "wrong"), [("imm", 2**32), ("imm", -1), ("epoch", 2**31), ("decoder", "x")])
def test_a_ticket_that_cannot_be_is_refused_by_name(field: str, wrong: Any) -> None:
    fields = fields_of(MESSAGES[3])
    assert f"`$.ticket.{field}`" in refusal(fields | {"ticket": fields["ticket"] | {field: wrong}})


@pytest.mark.parametrize("field", PoolShape.__struct_fields__)
def test_a_pool_without_one_of_its_sizes_is_refused_by_name(field: str) -> None:
    fields = fields_of(MESSAGES[0])
    wrong: Any = [] if field == "layers" else 0
    assert f"`$.pool.{field}`" in refusal(fields | {"pool": fields["pool"] | {field: wrong}})


@pytest.mark.parametrize("field", LayersShape.__struct_fields__)
def test_layers_without_one_of_their_sizes_are_refused_by_name(field: str) -> None:
    fields = fields_of(MESSAGES[0])
    [layers] = fields["pool"]["layers"]
    wrong = fields["pool"] | {"layers": [layers | {field: 0}]}
    assert f"`$.pool.layers[0].{field}`" in refusal(fields | {"pool": wrong})


@pytest.mark.parametrize("field", ["tp", "dp"])
def test_an_instance_of_more_ranks_than_routes_can_be_numbered_for_is_refused(field: str) -> None:
    fields = fields_of(MESSAGES[0])
    assert f"`$.pool.{field}`" in refusal(fields | {"pool": fields["pool"] | {field: 1025}})


@pytest.mark.parametrize(("field", "wrong"), [("token_ids", [1, -1]), ("pages", [2**31]), ("pages", ["1"])])
def test_a_wrong_entry_of_a_list_is_refused_by_name(field: str, wrong: list[Any]) -> None:
    assert f"`$.{field}[{len(wrong) - 1}]`" in refusal(fields_of(MESSAGES[2]) | {field: wrong})


@pytest.mark.parametrize("tag", ["Goodbye", "", "hello", 1, None])
def test_a_kind_that_nobody_knows_is_refused(tag: Any) -> None:
    assert "`$.type`" in refusal(fields_of(MESSAGES[3]) | {"type": tag})


@pytest.mark.parametrize(
    "control",
    [
        Reserve(sender=UUID, request_id="r", num_tokens=9, tier="flex", remaining_s=0.0),
        Granted(sender=UUID, request_id="r", lease="1"),
    ],
)
def test_what_gateways_and_instances_say_to_each_other_is_no_fabric_message(control: Reserve | Granted) -> None:
    with pytest.raises(ProtocolFault, match=re.escape("`$.type`")):
        decode(encode_control(control))


def test_a_process_started_after_a_year_of_uptime_can_say_hello() -> None:
    hello = MESSAGES[0]
    assert isinstance(hello, Hello)
    ticks = 400 * 24 * 3600 * 100  # clock ticks since boot: beyond 31 bits after 248 days
    late = msgspec.structs.replace(hello, started=ticks)
    assert decode(encode(late)) == late


def test_a_message_within_an_unknown_field_as_deep_as_the_stack_is_a_fault() -> None:
    wire = b"\x82" + msgspec.msgpack.encode("surprise") + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(ProtocolFault):
        decode(wire)


@each_message
def test_a_message_cut_short_or_with_more_behind_it_is_a_fault(message: AnyMessage) -> None:
    wire = encode(message)
    for end in range(len(wire)):
        with pytest.raises(ProtocolFault):
            decode(wire[:end])
    with pytest.raises(ProtocolFault):
        decode(wire + b"\xc0")


def test_a_message_is_plain_msgpack_without_code_or_extension_types() -> None:
    for message in MESSAGES:
        # An extension type would decode to msgspec.Ext, anything else to plain data that encodes to the same bytes.
        assert msgspec.msgpack.encode(fields_of(message)) == encode(message)
        assert not re.search(rb"c(os|posix|builtins)\n|\x80[\x02-\x05]c", encode(message))


def decodes_or_is_a_fault(wire: bytes) -> None:
    try:
        message = decode(wire)
    except ProtocolFault:
        return
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_a_message_or_a_fault(wire: bytes) -> None:
    decodes_or_is_a_fault(wire)


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=300)
def test_a_message_with_changed_bytes_is_a_message_or_a_fault(message: AnyMessage, data: st.DataObject) -> None:
    wire = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_is_a_fault(bytes(wire))


@given(st.sampled_from(MESSAGES), st.data(), anything)
@settings(max_examples=300)
def test_a_message_with_anything_in_a_field_is_a_message_or_a_fault(
    message: AnyMessage, data: st.DataObject, value: Any
) -> None:
    fields = fields_of(message)
    fields[data.draw(st.sampled_from([*fields, "surprise"]))] = value
    decodes_or_is_a_fault(msgspec.msgpack.encode(fields))
