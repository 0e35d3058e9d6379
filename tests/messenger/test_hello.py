"""What a Hello says, and which differences keep two processes apart."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from kv_world import KV, pool_layout
from puppet import changed

from headrace.errors import HandshakeRefused, InputError
from headrace.kvcache.sharding import Sharding
from headrace.messenger.hello import Identity, check_hello, process_of
from headrace.messenger.process import ProcessName
from headrace.protocol.messages import PROTOCOL_VERSION, FabricRole, Hello, decode, encode


def identity(role: FabricRole, num_pages: int = 8) -> Identity:
    return Identity(
        uuid="0123456789abcdef" * 2,
        role=role,
        fingerprint="model",
        sharding=Sharding(kv=KV),
        pool=pool_layout(num_pages),
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
    assert check_hello(identity(ours), hello_of(identity(theirs, num_pages=21))).pool == pool_layout(21)


@pytest.mark.parametrize("fingerprint", ["x" * 257, "\ud800"])
def test_a_fingerprint_that_does_not_travel_is_refused_where_it_is_given(fingerprint: str) -> None:
    with pytest.raises(InputError, match="fingerprint"):
        replace(identity("decoder"), fingerprint=fingerprint)


DIFFERENCES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "protocol": ({"protocol": 1}, PROTOCOL_VERSION, 1),
    "role": ({"role": "prefiller"}, "decoder", "prefiller"),
    "fingerprint": ({"fingerprint": "another"}, "model", "another"),
    "layout": ({"layout": "NHD"}, "HND-KV", "NHD"),
    "kind": ({"kv_kind": "mla"}, "gqa", "mla"),
    "dtype": ({"kv_dtype": "bf16"}, "fp32", "bf16"),
    "page_size": ({"kv_page_size": 16}, KV.page_size, 16),
    "num_layers": ({"kv_num_layers": 4}, KV.num_layers, 4),
    "num_kv_heads": ({"kv_num_kv_heads": 3}, KV.num_kv_heads, 3),
    "head_dim": ({"kv_head_dim": 5}, KV.head_dim, 5),
}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_each_difference_is_refused_by_name_and_with_both_values(field: str) -> None:
    changes, ours, theirs = DIFFERENCES[field]
    with pytest.raises(HandshakeRefused) as refusal:
        check_hello(identity("prefiller"), changed(hello_of(identity("decoder")), **changes))
    assert (refusal.value.field, refusal.value.ours, refusal.value.theirs) == (field, ours, theirs)


def test_of_several_differences_the_first_that_explains_the_others_is_named() -> None:
    other = changed(hello_of(identity("decoder")), protocol=9, fingerprint="another", kv_head_dim=7)
    with pytest.raises(HandshakeRefused) as refusal:
        check_hello(identity("prefiller"), other)
    assert refusal.value.field == "protocol"


@pytest.mark.parametrize("field", ["num_pages", "num_aux_slots", "aux_slot_bytes"])
def test_the_size_of_a_pool_may_differ(field: str) -> None:
    side = check_hello(identity("prefiller"), changed(hello_of(identity("decoder")), **{f"pool_{field}": 99}))
    assert side.pool == replace(pool_layout(8), **{field: 99})


def test_layers_of_a_draft_model_must_be_there_on_both_sides_and_alike() -> None:
    draft = replace(KV, num_layers=2, num_kv_heads=1)
    sharding = Sharding(kv=KV, further=(draft,))
    pool = sharding.pool(num_pages=8, num_aux_slots=8, aux_slot_bytes=64)
    ours = replace(identity("prefiller"), sharding=sharding, pool=pool)
    hello = hello_of(replace(ours, role="decoder"))
    assert check_hello(ours, hello) == ours.side
    with pytest.raises(HandshakeRefused) as refusal:
        check_hello(identity("prefiller"), hello)
    assert (refusal.value.field, refusal.value.ours, refusal.value.theirs) == ("layers", 1, 2)
    first, second = hello.pool.layers
    longer = changed(hello, pool_layers=(first, msgspec.structs.replace(second, num_layers=3)))
    with pytest.raises(HandshakeRefused, match="num_layers differs: ours 2, theirs 3"):
        check_hello(ours, longer)


def test_instances_of_any_degrees_that_share_the_heads_learn_the_sharding_of_each_other() -> None:
    hello = changed(hello_of(identity("decoder")), pool_tp=4, pool_dp=3)
    side = check_hello(identity("prefiller"), hello)
    assert side.sharding == Sharding(kv=KV, tp=4, dp=3)
    assert (side.pool.num_ranks, side.pool.kv.num_kv_heads) == (12, 1)


def test_a_degree_that_cannot_share_the_heads_is_refused_with_the_reason() -> None:
    with pytest.raises(HandshakeRefused, match="must divide the model's 2 KV heads") as refusal:
        check_hello(identity("prefiller"), changed(hello_of(identity("decoder")), pool_tp=3))
    assert (refusal.value.field, refusal.value.theirs) == ("tp", 3)


def test_a_prefiller_of_several_data_parallel_groups_is_refused() -> None:
    with pytest.raises(HandshakeRefused, match="dp differs: ours 1, theirs 2"):
        check_hello(identity("decoder"), changed(hello_of(identity("prefiller")), pool_dp=2))
    with pytest.raises(InputError, match="dp: must be 1 of a prefiller"):
        replace(identity("prefiller"), sharding=Sharding(kv=KV, dp=2))


def test_a_pool_of_another_sharding_is_refused() -> None:
    with pytest.raises(InputError, match="pool: must be that of its sharding"):
        replace(identity("decoder"), sharding=Sharding(kv=KV, tp=2))


def test_this_process_is_somebody_else_at_every_start() -> None:
    first, second = (
        Identity.of_this_process(role="decoder", fingerprint="model", sharding=Sharding(kv=KV), pool=pool_layout(8))
        for _ in range(2)
    )
    assert first.uuid != second.uuid
    assert first.process == second.process == ProcessName.own()
    assert decode(encode(hello_of(first))) == hello_of(first)
