"""Who holds which heads: against the obvious reading of the module's picture."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.sharding import Sharding


def kv_of(num_kv_heads: int) -> KVLayout:
    return KVLayout(num_layers=3, num_kv_heads=num_kv_heads, page_size=4, head_dim=8, dtype="bf16")


@given(heads=st.integers(1, 12), tp=st.integers(1, 16), dp=st.integers(1, 3))
def test_every_head_is_held_by_as_many_ranks_of_a_group_as_there_are_replicas(heads: int, tp: int, dp: int) -> None:
    if heads % tp and tp % heads:
        with pytest.raises(InputError, match=rf"tp: must divide the model's {heads} KV heads or be a multiple"):
            Sharding(kv=kv_of(heads), tp=tp, dp=dp)
        return
    sharding = Sharding(kv=kv_of(heads), tp=tp, dp=dp)
    held = [sharding.heads_of(place) for place in range(tp)]
    assert all(len(own) == sharding.local.num_kv_heads for own in held)
    assert sorted(head for own in held for head in own) == sorted(list(range(heads)) * sharding.num_replicas)
    sets = [held[start :: sharding.num_replicas] for start in range(sharding.num_replicas)]
    assert all([head for own in each for head in own] == list(range(heads)) for each in sets)
    assert [sharding.rank(group, place) for group in range(dp) for place in range(tp)] == list(
        range(sharding.num_ranks)
    )


def test_a_latent_is_whole_on_every_rank() -> None:
    latent = KVLayout(num_layers=3, num_kv_heads=1, page_size=4, head_dim=9, dtype="bf16", kind="mla")
    sharding = Sharding(kv=latent, tp=8)
    assert sharding.local == latent
    assert sharding.num_replicas == 8


def test_a_draft_model_is_shared_by_the_same_ranks_and_lies_behind_the_target() -> None:
    target, draft = kv_of(4), replace(kv_of(1), num_layers=2, head_dim=5)
    sharding = Sharding(kv=target, further=(draft,), tp=4, dp=2)
    assert [group.kv for group in sharding.groups] == [target, draft]
    assert [group.num_replicas for group in sharding.groups] == [1, 4]
    pool = sharding.pool(num_pages=6, num_aux_slots=2, aux_slot_bytes=100)
    assert (pool.kv, pool.further, pool.num_ranks) == (kv_of(1), (draft,), 8)
    with pytest.raises(InputError, match="tp: must divide the model's 3 KV heads"):
        Sharding(kv=target, further=(kv_of(3),), tp=4)
    with pytest.raises(InputError, match="page_size: must be 4 in all groups of layers, is 8"):
        Sharding(kv=target, further=(replace(draft, page_size=8),))


@pytest.mark.parametrize("field", ["tp", "dp"])
def test_less_than_one_rank_is_refused_by_name(field: str) -> None:
    with pytest.raises(InputError, match=rf"{field}: must be at least 1, is 0"):
        Sharding(kv=kv_of(4), **{field: 0})
