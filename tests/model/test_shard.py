"""Which part is whose: all is held, KV heads lie where `Sharding` says, and what has no even parts is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llama_oracle import Oracle

from headrace.errors import InputError
from headrace.kvcache.sharding import Sharding
from headrace.model.families import FAMILIES
from headrace.model.shape import ModelShape
from headrace.model.shard import Shard

MOE = Oracle("Qwen3-MoE: a dense layer among sparse ones").shape  # 4 heads, 2 KV heads, 40 columns, 8 experts


@given(whole=st.integers(1, 100), tp=st.integers(1, 9))
def test_every_row_of_the_head_is_some_ranks_and_all_have_as_many(whole: int, tp: int) -> None:
    size = -(-whole // tp)
    parts = [Shard(tp=tp, rank=rank).part(whole, size) for rank in range(tp)]
    assert all(len(part) == size and part.start >= 0 and part.stop <= whole for part in parts)
    assert set().union(*parts) == set(range(whole))


@given(num_ranks=st.sampled_from([1, 2, 4, 8]), num_kv_heads=st.sampled_from([1, 2, 4, 8]), width=st.integers(1, 5))
def test_a_ranks_rows_of_keys_are_those_of_its_kv_heads(num_ranks: int, num_kv_heads: int, width: int) -> None:
    shape = replace(MOE, num_heads=8, num_kv_heads=num_kv_heads, intermediate_size=8, head_dim=2 * width)
    sharding = Sharding(kv=shape.kv_layout(page_size=1, dtype="bf16"), tp=num_ranks)
    for place in range(num_ranks):
        shard = Shard(tp=num_ranks, rank=place)
        rows = shard.part(num_kv_heads * shape.head_dim, shard.of(shape).num_kv_heads * shape.head_dim)
        heads = sharding.heads_of(place)
        assert rows == range(heads.start * shape.head_dim, heads.stop * shape.head_dim)


def test_the_ranks_of_two_groups_hold_each_expert_once_and_everything_else_once_a_group() -> None:
    whole = FAMILIES[MOE.architecture].tensor_shapes(MOE)
    shards = [Shard(tp=2, dp=2, rank=rank) for rank in range(4)]
    shapes = [FAMILIES[MOE.architecture].tensor_shapes(shard.of(MOE)) for shard in shards]
    for name, size in whole.items():
        held = torch.zeros(size, dtype=torch.int64)
        for shard, own in zip(shards, shapes, strict=True):
            if name in own:
                part = [shard.part(*axis) for axis in zip(size, own[name], strict=True)]
                held[tuple(slice(axis.start, axis.stop) for axis in part)] += 1
        is_cut = "_proj" in name and "experts" not in name
        copies = 1 if "experts" in name else 2 if is_cut else 4
        if name != "lm_head.weight":  # of 211 rows, 106 each: one is everybody's
            assert torch.equal(held, torch.full(size, copies)), name


@pytest.mark.parametrize(
    ("shape", "shard", "message"),
    [
        (replace(MOE, num_heads=6), Shard(tp=4), "tp: must divide the model's 6 attention heads, is 4"),
        (
            replace(MOE, num_heads=12, num_kv_heads=3),
            Shard(tp=2),
            "tp: must divide the model's 3 KV heads or be",
        ),
        (replace(MOE, intermediate_size=41), Shard(tp=2), "tp: must divide the model's 41 .*intermediate_size.*, is 2"),
        (MOE, Shard(tp=4, dp=3), "tp x dp: must divide the model's 8 experts, is 12"),
    ],
    ids=["heads", "KV heads", "MLP", "experts"],
)
def test_what_the_ranks_cannot_share_evenly_is_refused(shape: ModelShape, shard: Shard, message: str) -> None:
    with pytest.raises(InputError, match=message):
        shard.of(shape)


def test_one_rank_has_the_model() -> None:
    assert Shard().of(MOE) is MOE
