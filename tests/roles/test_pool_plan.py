from dataclasses import replace
from pathlib import Path

import pytest
from tiny_checkpoint import CONFIG, LONGEST

from headrace.errors import InputError
from headrace.messenger.aux import aux_slot_bytes
from headrace.model.shape import ModelShape
from headrace.roles.options import InstanceOptions
from headrace.roles.pool_plan import plan_pool

SHAPE = ModelShape.from_config(CONFIG)
OPTIONS = InstanceOptions(
    role="decoder", name="d", gateways=("ipc://x",), model_dir=Path("x"), model="x", page_size=8, max_running=3
)
PAGE_BYTES = SHAPE.num_layers * SHAPE.kv_layout(8, "bf16").page_bytes


def test_the_pool_has_as_many_pages_as_the_memory_holds() -> None:
    layout, max_model_len = plan_pool(SHAPE, replace(OPTIONS, kv_memory_bytes=101 * PAGE_BYTES - 1))
    assert layout.num_pages == 100
    assert layout.pages_bytes == 100 * PAGE_BYTES
    assert max_model_len == LONGEST


def test_the_longest_request_is_what_model_pool_and_option_allow() -> None:
    for num_pages, asked, longest in ((100, 200, 200), (100, LONGEST, LONGEST), (10, 200, 80), (10, None, 80)):
        options = replace(OPTIONS, kv_memory_bytes=num_pages * PAGE_BYTES, max_model_len=asked)
        assert plan_pool(SHAPE, options)[1] == longest


def test_there_are_two_aux_slots_for_each_request_each_for_the_longest() -> None:
    layout, max_model_len = plan_pool(SHAPE, OPTIONS)
    assert layout.num_aux_slots == 6
    assert layout.aux_slot_bytes == aux_slot_bytes(max_model_len, 8)


def test_what_the_model_was_not_trained_for_is_refused() -> None:
    with pytest.raises(InputError, match=f"max_model_len: must be at most {LONGEST}.*is {LONGEST + 1}"):
        plan_pool(SHAPE, replace(OPTIONS, max_model_len=LONGEST + 1))


def test_memory_for_less_than_two_pages_is_refused_saying_how_much_two_take() -> None:
    assert plan_pool(SHAPE, replace(OPTIONS, kv_memory_bytes=2 * PAGE_BYTES))[0].num_pages == 2
    with pytest.raises(InputError, match=f"kv_memory: .*{2 * PAGE_BYTES:,} bytes.*is {2 * PAGE_BYTES - 1:,}"):
        plan_pool(SHAPE, replace(OPTIONS, kv_memory_bytes=2 * PAGE_BYTES - 1))


def test_all_ranks_share_the_memory_each_with_its_heads_and_its_groups_pages() -> None:
    """Of two KV heads: over two ranks one each, over two groups both."""
    for tp, dp, num_pages in ((2, 1, 100), (1, 2, 50), (2, 2, 50), (4, 1, 50)):
        options = replace(OPTIONS, kv_memory_bytes=100 * PAGE_BYTES, tp=tp, dp=dp)
        layout, _ = plan_pool(SHAPE, options)
        assert (layout.num_ranks, layout.num_pages) == (tp * dp, num_pages), (tp, dp)
        assert layout.kv.num_kv_heads == max(1, 2 // tp)
        assert layout.num_aux_slots == 6 * dp


def test_a_request_fits_into_one_group() -> None:
    options = replace(OPTIONS, kv_memory_bytes=20 * PAGE_BYTES)
    assert plan_pool(SHAPE, options)[1] == 20 * 8
    assert plan_pool(SHAPE, replace(options, dp=2))[1] == 10 * 8


def test_two_pages_on_each_rank_are_what_it_takes() -> None:
    with pytest.raises(InputError, match=f"kv_memory: .*2 pages .* on each of 2 ranks, {4 * PAGE_BYTES:,} bytes"):
        plan_pool(SHAPE, replace(OPTIONS, kv_memory_bytes=4 * PAGE_BYTES - 1, dp=2))


def test_a_prefiller_has_one_group() -> None:
    with pytest.raises(InputError, match="^dp: must be 1 for a prefiller, .*is 2$"):
        replace(OPTIONS, role="prefiller", dp=2)


def test_ranks_that_cannot_share_the_model_are_refused_though_they_could_share_its_kv() -> None:
    with pytest.raises(InputError, match="^tp: must divide the model's 4 attention heads, is 8$"):
        plan_pool(SHAPE, replace(OPTIONS, tp=8))
