"""What a Hello says, and which differences keep two processes apart."""

from dataclasses import replace
from typing import Any

import pytest
from kv_world import KV, pool_layout
from puppet import changed

from headrace.errors import HandshakeRefused, InputError
from headrace.messenger.hello import Identity, check_hello, process_of
from headrace.messenger.process import ProcessName
from headrace.protocol.messages import PROTOCOL_VERSION, FabricRole, Hello, decode, encode


def identity(role: FabricRole, num_pages: int = 8) -> Identity:
    return Identity(
        uuid="0123456789abcdef" * 2,
        role=role,
        fingerprint="model",
        pool=pool_layout(num_pages),
        num_ranks=1,
        process=ProcessName(host="here", pid=17, started=5),
    )


def hello_of(who: Identity) -> Hello:
    return who.hello(epoch=3, address=b"address", descriptor=b"descriptor")


def test_a_hello_travels_whole_and_names_process_and_epoch() -> None:
    hello = hello_of(identity("decoder"))
    assert decode(encode(hello)) == hello
    assert (hello.epoch, hello.address, hello.descriptor) == (3, b"address", b"descriptor")
    assert process_of(hello) == ProcessName(host="here", pid=17, started=5)


@pytest.mark.parametrize(("ours", "theirs"), [("prefiller", "decoder"), ("decoder", "prefiller")])
def test_equal_peers_learn_the_pool_of_each_other(ours: FabricRole, theirs: FabricRole) -> None:
    assert check_hello(identity(ours), hello_of(identity(theirs, num_pages=21))) == pool_layout(21)


@pytest.mark.parametrize("fingerprint", ["x" * 257, "\ud800"])
def test_a_fingerprint_that_does_not_travel_is_refused_where_it_is_given(fingerprint: str) -> None:
    with pytest.raises(InputError, match="fingerprint"):
        replace(identity("decoder"), fingerprint=fingerprint)


DIFFERENCES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "protocol": ({"protocol": 2}, PROTOCOL_VERSION, 2),
    "role": ({"role": "prefiller"}, "decoder", "prefiller"),
    "fingerprint": ({"fingerprint": "another"}, "model", "another"),
    "layout": ({"layout": "NHD"}, "HND-KV", "NHD"),
    "dtype": ({"pool_dtype": "bf16"}, "fp32", "bf16"),
    "page_size": ({"pool_page_size": 16}, KV.page_size, 16),
    "num_layers": ({"pool_num_layers": 4}, KV.num_layers, 4),
    "num_kv_heads": ({"pool_num_kv_heads": 3}, KV.num_kv_heads, 3),
    "head_dim": ({"pool_head_dim": 5}, KV.head_dim, 5),
    "num_ranks": ({"pool_num_ranks": 2}, 1, 2),
}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_each_difference_is_refused_by_name_and_with_both_values(field: str) -> None:
    changes, ours, theirs = DIFFERENCES[field]
    with pytest.raises(HandshakeRefused) as refusal:
        check_hello(identity("prefiller"), changed(hello_of(identity("decoder")), **changes))
    assert (refusal.value.field, refusal.value.ours, refusal.value.theirs) == (field, ours, theirs)


def test_of_several_differences_the_first_that_explains_the_others_is_named() -> None:
    other = changed(hello_of(identity("decoder")), protocol=9, fingerprint="another", pool_head_dim=7)
    with pytest.raises(HandshakeRefused) as refusal:
        check_hello(identity("prefiller"), other)
    assert refusal.value.field == "protocol"


@pytest.mark.parametrize("field", ["num_pages", "num_aux_slots", "aux_slot_bytes"])
def test_the_size_of_a_pool_may_differ(field: str) -> None:
    pool = check_hello(identity("prefiller"), changed(hello_of(identity("decoder")), **{f"pool_{field}": 99}))
    assert pool == replace(pool_layout(8), **{field: 99})


def test_this_process_is_somebody_else_at_every_start() -> None:
    first, second = (
        Identity.of_this_process(role="decoder", fingerprint="model", pool=pool_layout(8)) for _ in range(2)
    )
    assert first.uuid != second.uuid
    assert first.process == second.process == ProcessName.own()
    assert decode(encode(hello_of(first))) == hello_of(first)
