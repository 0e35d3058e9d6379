"""Every control message comes back as it was sent, and whatever is none, or goes the other way, is a ProtocolFault."""

import math
import re
from functools import partial
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_fields import Decode, anything, fields_of, leaves, refusal_of

from headrace.errors import InputError, ProtocolFault
from headrace.protocol.control import (
    CONTROL_VERSION,
    MAX_MESSAGE_BYTES,
    MAX_PROMPT_TOKENS,
    Abort,
    Accepted,
    Announce,
    Beat,
    ControlMessage,
    Decoding,
    Drain,
    Finished,
    GatewayMessage,
    Generate,
    Goodbye,
    Granted,
    InstanceMessage,
    Limits,
    NeedPrefill,
    NoRoom,
    Prefilled,
    PrefillerAddress,
    Prefillers,
    PrefillFrom,
    Prefilling,
    Rejected,
    Reserve,
    ReturnLease,
    Role,
    Sampling,
    Status,
    Successor,
    Tokens,
    UsePrefiller,
    Wait,
    Waterfall,
    decode_from_gateway,
    decode_from_instance,
    encode_control,
)
from headrace.protocol.messages import Cancel, FabricRole, Ticket, decode, encode

UUID = "0123456789abcdef" * 2
LIMITS = Limits(max_model_len=2048, pool_tokens=2**31 - 1, page_size=16, max_running=32)
FROM = PrefillFrom(prefiller=UUID, lease="1")
ANNOUNCE = Announce(
    sender=UUID,
    role="prefiller",
    version=CONTROL_VERSION,
    name="prefiller-0",
    model="smollm2",
    fingerprint="f00d",
    limits=LIMITS,
    tp=1,
    dp=1,
    fabric_address=b"\x00\xff",
    host="boot/1",
    pid=17,
    started=2**63 - 1,
)
STATUS = Status(
    sender=UUID,
    num_free_pages=3,
    num_running=0,
    num_waiting=1,
    num_queued_tokens=512,
    num_interactive_tokens=12,
    prefilling=Prefilling(step_s=0.01, rate=1500.0, chunk_tokens=256),
    decoding=Decoding(step_s=0.01, row_s=0.001, key_s=1e-6, num_rows=4, num_keys=900, num_interactive=1),
    is_draining=False,
    gauges={"skew": -1.5, "most": 1.7976931348623157e308},
    counters={"steps": 0.0, "bytes": 1e15},
)
GENERATE = Generate(
    sender=UUID,
    request_id="r",
    token_ids=(0, 5, 2**31 - 1),
    num_prompt_tokens=3,
    max_tokens=64,
    sampling=Sampling(temperature=0.7, top_k=40, top_p=0.9, seed=2**63 - 1, choice=1),
    stop_token_ids=(2,),
    prefill=FROM,
    tier="flex",
    remaining_s=1.5,
)
TOKENS = Tokens(sender=UUID, request_id="r", index=7, token_ids=(1, 2), cached_tokens=16)
FINISHED = Finished(
    sender=UUID,
    request_id="r",
    reason="length",
    text="",
    num_tokens=9,
    cached_tokens=16,
    waterfall=Waterfall(fetch_s=0.5, local_prefill_s=0.0, hand_over_s=0.01, first_step_s=0.02),
)
DRAIN = Drain(sender=UUID, successor=Successor(role="decoder", name="decoder-3", tpot_s=0.05, max_stall_s=None))
PREFILLERS = Prefillers(sender=UUID, prefillers=(PrefillerAddress(uuid=UUID, fabric_address=b"\x01"),))
RESERVE = Reserve(sender=UUID, request_id="r", num_tokens=9, tier="flex", remaining_s=0.0)
USE_PREFILLER = UsePrefiller(sender=UUID, request_id="r", prefill=FROM)
FROM_INSTANCE: list[InstanceMessage] = [
    ANNOUNCE,
    STATUS,
    Goodbye(sender=UUID),
    Granted(sender=UUID, request_id="r", lease="1"),
    Wait(sender=UUID, request_id="r", num_queued_tokens=512),
    Prefilled(sender=UUID, request_id="r", num_computed=0, queue_s=0.001, prefill_s=0.25),
    Accepted(sender=UUID, request_id="r", uses_lease=True, cached_tokens=0),
    NoRoom(sender=UUID, request_id="r", num_free_pages=0),
    Rejected(sender=UUID, request_id="r", field="max_tokens", text="must be at most 3, is 4"),
    TOKENS,
    FINISHED,
    NeedPrefill(sender=UUID, request_id="r", prefiller=UUID, reason="peer_lost: it has exited", is_fault=True),
]
FROM_GATEWAY: list[GatewayMessage] = [
    Beat(sender=UUID),
    DRAIN,
    PREFILLERS,
    RESERVE,
    ReturnLease(sender=UUID, lease="1"),
    GENERATE,
    Abort(sender=UUID, request_id="r"),
    USE_PREFILLER,
]
MESSAGES: list[ControlMessage] = [*FROM_INSTANCE, *FROM_GATEWAY]
each_message = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)


def decoder_of(message: ControlMessage) -> Decode:
    return decode_from_instance if isinstance(message, InstanceMessage) else decode_from_gateway


def fields(message: ControlMessage) -> dict[str, Any]:
    return fields_of(encode_control(message))


def refusal(message: ControlMessage, changed: object) -> str:
    """What its receiver says against it when its fields are these."""
    return refusal_of(decoder_of(message), changed)


def taken(message: ControlMessage, changed: object) -> Any:
    return decoder_of(message)(msgspec.msgpack.encode(changed))


def test_every_kind_of_message_is_tried_here() -> None:
    assert {type(message) for message in FROM_INSTANCE} == set(get_args(InstanceMessage))
    assert {type(message) for message in FROM_GATEWAY} == set(get_args(GatewayMessage))


def test_instances_are_those_that_say_hello_and_the_colocated() -> None:
    assert get_args(Role) == (*get_args(FabricRole), "colocated")


# ---- whole -----------------------------------------------------------------------------------------------------


@each_message
def test_a_message_comes_back_as_it_was_sent(message: ControlMessage) -> None:
    assert decoder_of(message)(encode_control(message)) == message


@each_message
def test_every_message_names_its_kind_and_its_sender(message: ControlMessage) -> None:
    assert (fields(message)["type"], fields(message)["sender"]) == (type(message).__name__, UUID)


@pytest.mark.parametrize("prefill", [None, FROM])
def test_nobody_to_prefill_from_is_said_too(prefill: PrefillFrom | None) -> None:
    for message in (GENERATE, USE_PREFILLER):
        said = msgspec.structs.replace(message, prefill=prefill)
        assert decode_from_gateway(encode_control(said)) == said


def test_what_is_not_said_of_sampling_and_times_is_greedy_and_nothing() -> None:
    assert taken(GENERATE, fields(GENERATE) | {"sampling": {}}).sampling == Sampling()
    assert Sampling() == Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, choice=0)
    assert taken(FINISHED, fields(FINISHED) | {"waterfall": {}}).waterfall == Waterfall()


def test_an_instance_of_another_version_can_be_told_from_one_that_talks_nonsense() -> None:
    assert taken(ANNOUNCE, fields(ANNOUNCE) | {"version": CONTROL_VERSION + 1}).version == CONTROL_VERSION + 1


# ---- the other way, and strangers ------------------------------------------------------------------------------


@each_message
def test_a_message_that_goes_the_wrong_way_is_refused_by_its_kind(message: ControlMessage) -> None:
    wrong = decode_from_gateway if isinstance(message, InstanceMessage) else decode_from_instance
    assert "`$.type`" in refusal_of(wrong, fields(message))


@each_message
def test_a_control_message_is_no_fabric_message(message: ControlMessage) -> None:
    assert "`$.type`" in refusal_of(decode, fields(message))


@pytest.mark.parametrize("receive", [decode_from_instance, decode_from_gateway])
def test_a_fabric_message_is_no_control_message(receive: Decode) -> None:
    fabric = encode(Cancel(sender=UUID, ticket=Ticket(decoder=UUID, epoch=1, imm=1)))
    assert "`$.type`" in refusal_of(receive, fields_of(fabric))


@pytest.mark.parametrize("tag", ["Prefill", "", "beat", "Status ", 1, None])
def test_a_kind_that_nobody_knows_is_refused(tag: Any) -> None:
    for message in (STATUS, GENERATE):
        assert "`$.type`" in refusal(message, fields(message) | {"type": tag})


@each_message
def test_a_uuid_that_is_none_is_refused_by_name(message: ControlMessage) -> None:
    for leaf in leaves(fields(message)):
        if leaf.value == UUID:
            for wrong in ("", UUID[1:], UUID.upper(), UUID + "0", UUID + "\n", UUID[1:] + "\n"):
                assert f"`{leaf.path}`" in refusal(message, leaf.replaced(fields(message), wrong))


# ---- closed ----------------------------------------------------------------------------------------------------

INNER: list[tuple[ControlMessage, str]] = [
    (ANNOUNCE, "limits"),
    (FINISHED, "waterfall"),
    (GENERATE, "sampling"),
    (GENERATE, "prefill"),
    (USE_PREFILLER, "prefill"),
    (PREFILLERS, "prefillers"),
    (DRAIN, "successor"),
]


@each_message
def test_a_field_that_nobody_knows_is_refused_by_name(message: ControlMessage) -> None:
    assert "`surprise`" in refusal(message, fields(message) | {"surprise": 1})


@pytest.mark.parametrize(("message", "name"), INNER)
def test_a_field_that_nobody_knows_inside_another_is_refused_by_name_and_place(
    message: ControlMessage, name: str
) -> None:
    inner = fields(message)[name]
    changed = [inner[0] | {"surprise": 1}] if isinstance(inner, list) else inner | {"surprise": 1}
    said = refusal(message, fields(message) | {name: changed})
    assert "`surprise`" in said
    assert f"`$.{name}" in said


@each_message
def test_a_missing_field_is_refused_by_name(message: ControlMessage) -> None:
    known = fields(message)
    for name in set(known) - {"type"}:
        assert f"`{name}`" in refusal(message, {key: value for key, value in known.items() if key != name})


@pytest.mark.parametrize("name", ["limits", "prefill"])
def test_a_missing_field_inside_another_is_refused_by_name_and_place(name: str) -> None:
    message = ANNOUNCE if name == "limits" else GENERATE
    inner = fields(message)[name]
    for missing in inner:
        left = {key: value for key, value in inner.items() if key != missing}
        said = refusal(message, fields(message) | {name: left})
        assert f"`{missing}`" in said
        assert f"`$.{name}`" in said


@each_message
def test_a_value_of_another_type_is_refused_by_name_however_deep_it_lies(message: ControlMessage) -> None:
    for leaf in leaves(fields(message)):
        assert f"`{leaf.path}`" in refusal(message, leaf.replaced(fields(message), [{"of": "another type"}]))


@pytest.mark.parametrize("name", ["role", "tier", "reason"])
def test_a_word_that_is_none_of_a_closed_set_is_refused_by_name(name: str) -> None:
    for message in (ANNOUNCE, GENERATE, RESERVE, FINISHED):
        if name in fields(message):
            for wrong in ("", "surprise", "PREFILLER"):
                assert f"`$.{name}`" in refusal(message, fields(message) | {name: wrong})


# ---- limits ----------------------------------------------------------------------------------------------------


@each_message
def test_numbers_that_are_negative_or_huge_or_none_are_refused_by_name(message: ControlMessage) -> None:
    for leaf in leaves(fields(message)):
        wrong: list[float] = []
        if isinstance(leaf.value, bool):
            wrong = [0, 1]
        elif isinstance(leaf.value, int):
            wrong = [-1, 2**63, 0.5, math.nan]
        elif isinstance(leaf.value, float):
            wrong = [math.nan, math.inf, -math.inf, *([] if "gauges" in leaf.path else [-0.5, -1])]
        for value in wrong:
            assert f"`{leaf.path}`" in refusal(message, leaf.replaced(fields(message), value)), f"{leaf}: {value}"


@each_message
def test_seconds_are_taken_up_to_a_million_and_refused_by_name_beyond_it(message: ControlMessage) -> None:
    for leaf in leaves(fields(message)):
        if str(leaf.keys[-1]).endswith("_s"):
            taken(message, leaf.replaced(fields(message), 1e6))
            assert f"`{leaf.path}`" in refusal(message, leaf.replaced(fields(message), 1e6 + 1))


BOUNDS: list[tuple[str, str, float, float]] = [
    ("temperature", "sampling", 100, 100.1),
    ("top_p", "sampling", 1, 1.01),
    ("top_p", "sampling", 5e-324, 0),
    ("top_k", "sampling", 2**31 - 1, 2**31),
    ("choice", "sampling", 2**31 - 1, 2**31),
    ("num_prompt_tokens", "", 1, 0),
    ("max_tokens", "", 1, 0),
]


@pytest.mark.parametrize(("name", "within", "right", "wrong"), BOUNDS)
def test_what_is_asked_for_is_taken_up_to_its_bound_and_refused_by_name_beyond_it(
    name: str, within: str, right: float, wrong: float
) -> None:
    [leaf] = [leaf for leaf in leaves(fields(GENERATE)) if leaf.keys[-1] == name]
    asked = taken(GENERATE, leaf.replaced(fields(GENERATE), right))
    assert getattr(asked.sampling if within else asked, name) == right
    assert f"`{leaf.path}`" in refusal(GENERATE, leaf.replaced(fields(GENERATE), wrong))


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_a_limit_of_nothing_is_refused_by_name(name: str) -> None:
    limits = fields(ANNOUNCE)["limits"] | {name: 0}
    assert f"`$.limits.{name}`" in refusal(ANNOUNCE, fields(ANNOUNCE) | {"limits": limits})


LONGEST: dict[str, dict[str, int]] = {
    "Announce": {"name": 256, "model": 256, "fingerprint": 256, "host": 256, "fabric_address": 512},
    "Drain": {"name": 256},
    "Prefillers": {"fabric_address": 512},
    "Rejected": {"request_id": 256, "field": 256, "text": 1024},
    "Finished": {"request_id": 256, "text": 1024},
    "NeedPrefill": {"request_id": 256, "reason": 1024},
}
"""In characters, or bytes, by kind and field. Where a kind is not named, its texts are a request_id and a lease."""

OF_CLOSED_SETS = {"sender", "uuid", "prefiller", "role", "tier"}


@each_message
def test_a_text_is_taken_up_to_its_length_and_refused_by_name_beyond_it(message: ControlMessage) -> None:
    longest = LONGEST.get(type(message).__name__, {"request_id": 256, "lease": 256})
    for leaf in leaves(fields(message)):
        name = str(leaf.keys[-1])
        if isinstance(leaf.value, str | bytes) and (name in longest or name not in OF_CLOSED_SETS):
            if isinstance(message, Finished) and name == "reason":
                continue  # there it is one of a closed set
            most = longest[name]
            character = b"\xff" if isinstance(leaf.value, bytes) else "\U0001f600"  # four bytes, one character
            taken(message, leaf.replaced(fields(message), character * most))
            assert f"`{leaf.path}`" in refusal(message, leaf.replaced(fields(message), character * (most + 1)))


MOST: list[tuple[ControlMessage, str, int, Any]] = [
    (TOKENS, "token_ids", MAX_PROMPT_TOKENS, 2**31 - 1),
    (GENERATE, "token_ids", MAX_PROMPT_TOKENS, 2**31 - 1),
    (GENERATE, "stop_token_ids", 256, 2**31 - 1),
    (PREFILLERS, "prefillers", 1024, {"uuid": UUID, "fabric_address": b"x" * 512}),
]


@pytest.mark.parametrize(("message", "name", "most", "entry"), MOST)
def test_a_list_is_taken_up_to_its_length_within_what_a_socket_takes_and_refused_by_name_beyond_it(
    message: ControlMessage, name: str, most: int, entry: Any
) -> None:
    longest = taken(message, fields(message) | {name: [entry] * most})
    assert len(encode_control(longest)) < MAX_MESSAGE_BYTES / 2
    assert f"`$.{name}`" in refusal(message, fields(message) | {name: [entry] * (most + 1)})


@pytest.mark.parametrize("name", ["gauges", "counters"])
def test_figures_are_taken_up_to_their_number_and_the_length_of_a_name_and_refused_by_name_beyond_them(
    name: str,
) -> None:
    figures = {f"{i:03}".rjust(256, "\U0001f600"): 1.0 for i in range(256)}
    longest = taken(STATUS, fields(STATUS) | {name: figures})
    assert getattr(longest, name) == figures
    assert len(encode_control(longest)) < MAX_MESSAGE_BYTES / 2
    assert f"`$.{name}`" in refusal(STATUS, fields(STATUS) | {name: figures | {"more": 1.0}})
    assert f"`$.{name}`" in refusal(STATUS, fields(STATUS) | {name: {"x" * 257: 1.0}})


@pytest.mark.parametrize("message", [TOKENS, GENERATE], ids=["Tokens", "Generate"])
def test_no_tokens_at_all_are_refused_by_name(message: ControlMessage) -> None:
    assert "`$.token_ids`" in refusal(message, fields(message) | {"token_ids": []})


@pytest.mark.parametrize("wrong", [-1, 2**31, "1", None, 0.5])
def test_a_wrong_entry_of_a_list_is_refused_by_its_place(wrong: Any) -> None:
    for name in ("token_ids", "stop_token_ids"):
        assert f"`$.{name}[1]`" in refusal(GENERATE, fields(GENERATE) | {name: [1, wrong, 2]})


def test_a_prompt_longer_than_the_tokens_that_come_with_it_is_refused_by_name_here_and_on_the_wire() -> None:
    with pytest.raises(InputError, match="must be at most the 3 token_ids, is 4") as here:
        msgspec.structs.replace(GENERATE, num_prompt_tokens=4)
    assert here.value.field == "num_prompt_tokens"
    assert "num_prompt_tokens: must be at most" in refusal(GENERATE, fields(GENERATE) | {"num_prompt_tokens": 4})


# ---- garbage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["surprise", "gauges", "token_ids", "sender"])
@pytest.mark.parametrize("comes_first", [True, False])  # before the kind, it is skipped unread to find that
def test_a_value_nested_as_deep_as_the_stack_is_a_fault_in_any_field(name: str, comes_first: bool) -> None:
    nested = msgspec.msgpack.encode(name) + b"\x91" * 100_000 + b"\xc0"
    for message in (STATUS, GENERATE):
        known = {key: value for key, value in fields(message).items() if key != name}
        assert len(known) < 15
        head = bytes([0x80 | len(known) + 1])  # a map of one more entry
        rest = b"".join(msgspec.msgpack.encode(part) for pair in known.items() for part in pair)
        with pytest.raises(ProtocolFault):
            decoder_of(message)(head + (nested + rest if comes_first else rest + nested))


@each_message
def test_a_message_cut_short_or_with_more_behind_it_is_a_fault(message: ControlMessage) -> None:
    wire = encode_control(message)
    for broken in (*(wire[:end] for end in range(len(wire))), wire + b"\xc0"):
        with pytest.raises(ProtocolFault):
            decoder_of(message)(broken)


@each_message
def test_a_message_is_plain_msgpack_without_code_or_extension_types(message: ControlMessage) -> None:
    # An extension type would decode to msgspec.Ext, anything else to plain data that encodes to the same bytes.
    assert msgspec.msgpack.encode(fields(message)) == encode_control(message)
    assert not re.search(rb"c(os|posix|builtins)\n|\x80[\x02-\x05]c", encode_control(message))


def decodes_or_is_a_fault(receive: Decode, wire: bytes) -> None:
    try:
        message = receive(wire)
    except ProtocolFault:
        return
    assert receive(encode_control(message)) == message  # type: ignore[arg-type]


from_instances = partial(decodes_or_is_a_fault, decode_from_instance)
from_gateways = partial(decodes_or_is_a_fault, decode_from_gateway)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_a_message_or_a_fault(wire: bytes) -> None:
    from_instances(wire)
    from_gateways(wire)


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=300)
def test_a_message_with_changed_bytes_is_a_message_or_a_fault(message: ControlMessage, data: st.DataObject) -> None:
    wire = bytearray(encode_control(message))
    for _ in range(data.draw(st.integers(1, 3))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    from_instances(bytes(wire))
    from_gateways(bytes(wire))


@given(st.sampled_from(MESSAGES), st.data(), anything)
@settings(max_examples=300)
def test_a_message_with_anything_in_a_place_is_a_message_or_a_fault(
    message: ControlMessage, data: st.DataObject, value: Any
) -> None:
    known = fields(message)
    places = [*leaves(known), None]
    place = data.draw(st.sampled_from(places))
    changed = known | {"surprise": value} if place is None else place.replaced(known, value)
    decodes_or_is_a_fault(decoder_of(message), msgspec.msgpack.encode(changed))
