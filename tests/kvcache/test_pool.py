"""The tensors against the layout's arithmetic: the same byte by either way, and no copy anywhere."""

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.errors import Closed, InputError
from headrace.kvcache.layout import KVDtype, KVLayout, PoolLayout
from headrace.kvcache.mapping import HUGE_PAGE_BYTES
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pool import aux_view, layer_views

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def pool_layout(dtype: KVDtype = "bf16", num_pages: int = 7) -> PoolLayout:
    kv = KVLayout(num_layers=3, num_kv_heads=2, page_size=5, head_dim=6, dtype=dtype)  # no two alike
    return PoolLayout(kv=kv, num_pages=num_pages, num_aux_slots=3, aux_slot_bytes=100)


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    memory = PoolMemory(HUGE_PAGE_BYTES)
    yield memory
    memory.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_views_strides_are_the_layouts(memory: PoolMemory, dtype: KVDtype) -> None:
    layout = pool_layout(dtype)
    views = layer_views(memory, layout)
    assert len(views) == 3
    base = memory.bytes.ctypes.data
    for layer, view in enumerate(views):
        assert view.shape == (7, 2, 2, 5, 6)
        assert view.dtype == TORCH_DTYPES[dtype]
        assert view.is_contiguous()
        assert view.stride(0) * view.itemsize == layout.kv.page_bytes
        assert view.stride(1) * view.itemsize == layout.kv.head_bytes
        for page in range(7):
            assert view[page].data_ptr() - base == layout.page_offset(layer, page)


def test_a_byte_written_at_a_pages_offset_is_in_that_page_alone(memory: PoolMemory) -> None:
    layout = pool_layout("fp32")
    views = layer_views(memory, layout)
    begin = layout.page_offset(1, 4)
    memory.bytes[begin : begin + layout.kv.page_bytes] = np.frombuffer(np.float32(2.5).tobytes() * 120, dtype=np.uint8)
    assert bool((views[1][4] == 2.5).all())
    assert sum(int((view != 0).sum()) for view in views) == 120


def test_k_and_v_of_a_head_range_are_one_contiguous_span(memory: PoolMemory) -> None:
    layout = pool_layout()
    page = layer_views(memory, layout)[2][3]
    page[1, 0] = 1.0  # K of head 1
    page[1, 1] = 3.0  # V of head 1; no byte of either is zero
    begin = layout.page_offset(2, 3) + layout.kv.head_bytes
    span = memory.bytes[begin : begin + layout.kv.head_bytes]
    assert span.nonzero()[0].size == memory.bytes.nonzero()[0].size == 120
    halves = torch.frombuffer(span, dtype=torch.bfloat16).view(2, 5, 6)
    assert bool((halves[0] == 1.0).all() and (halves[1] == 3.0).all())


def test_a_tensor_write_is_seen_through_another_mapping(memory: PoolMemory) -> None:
    layout = pool_layout("fp32")
    layer_views(memory, layout)[2][6, 1, 1, 4, 5] = -1.0  # the last element of all pages
    with mmap.mmap(memory.fd, memory.length) as other:
        assert other[layout.pages_bytes - 4 : layout.pages_bytes] == np.float32(-1.0).tobytes()


def test_aux_slots_are_where_the_layout_says_and_apart_from_the_pages(memory: PoolMemory) -> None:
    layout = pool_layout()
    views = layer_views(memory, layout)
    slots = [aux_view(memory, layout, slot) for slot in range(3)]
    for number, slot in enumerate(slots, start=1):
        assert slot.shape == (100,)
        slot[:] = number
    for number, slot in enumerate(slots, start=1):
        assert slot.ctypes.data - memory.bytes.ctypes.data == layout.aux_offset(number - 1)
        assert bool((slot == number).all())
    assert not any(bool(view.any()) for view in views)


def test_a_memory_smaller_than_its_layout_is_refused(memory: PoolMemory) -> None:
    layout = pool_layout(num_pages=10_000)
    with pytest.raises(InputError, match="memory: must have at least"):
        layer_views(memory, layout)
    with pytest.raises(InputError, match="memory: must have at least"):
        aux_view(memory, layout, 0)


def test_an_aux_slot_that_is_not_there_is_refused(memory: PoolMemory) -> None:
    with pytest.raises(InputError, match="slot: must be in"):
        aux_view(memory, pool_layout(), 3)


def test_a_view_stays_valid_after_the_memory_was_closed(memory: PoolMemory) -> None:
    views = layer_views(memory, pool_layout())
    memory.close()
    views[0].fill_(1.0)
    assert bool((views[0] == 1.0).all())
    with pytest.raises(Closed):
        layer_views(memory, pool_layout())


def test_a_rank_has_views_of_its_own_part_alone() -> None:
    kv = KVLayout(num_layers=2, num_kv_heads=1, page_size=5, head_dim=6, dtype="fp32", kind="mla")
    layout = PoolLayout(kv=kv, num_pages=7, num_aux_slots=3, aux_slot_bytes=100, num_ranks=3)
    memory = PoolMemory(layout.total_bytes)
    try:
        for rank in range(3):
            views = layer_views(memory, layout, rank)
            assert all(view.shape == (7, 5, 6) and not view.any() for view in views)
            views[1][4] = rank + 1.0
            assert views[1][4].data_ptr() - memory.bytes.ctypes.data == layout.page_offset(1, 4, rank)
    finally:
        memory.close()
