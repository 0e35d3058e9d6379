"""Layout arithmetic by itself; `test_pool` holds it against torch's strides."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.kvcache.layout import AUX_ALIGNMENT, POOL_ALIGNMENT, KVLayout, PoolLayout, num_pages_for


def kv_layouts(page_size: int) -> st.SearchStrategy[KVLayout]:
    return st.builds(
        KVLayout,
        num_layers=st.integers(1, 5),
        num_kv_heads=st.integers(1, 4),
        page_size=st.just(page_size),
        head_dim=st.integers(1, 9),
        dtype=st.sampled_from(["bf16", "fp32"]),
    )


layouts = st.integers(1, 17).flatmap(
    lambda page_size: st.builds(
        PoolLayout,
        kv=kv_layouts(page_size),
        further=st.lists(kv_layouts(page_size), max_size=2).map(tuple),
        num_pages=st.integers(1, 7),
        num_aux_slots=st.integers(1, 4),
        aux_slot_bytes=st.integers(1, 200),
        num_ranks=st.integers(1, 4),
    )
)

SMOLLM2 = KVLayout(num_layers=30, num_kv_heads=3, page_size=16, head_dim=64, dtype="bf16")
POOL = PoolLayout(kv=SMOLLM2, num_pages=100, num_aux_slots=4, aux_slot_bytes=1000)


def test_smollm2_has_pages_of_12_kib_and_the_pool_is_whole_huge_pages() -> None:
    layout = POOL
    assert layout.kv.head_bytes == 2 * 16 * 64 * 2
    assert layout.kv.page_bytes == 12 * 1024
    assert layout.page_offset(2, 5) == (2 * 100 + 5) * 12 * 1024
    assert layout.aux_offset(1) == 30 * 100 * 12 * 1024 + 1024
    assert layout.total_bytes == 18 * POOL_ALIGNMENT  # 36,868,096 bytes are 17.58 of them


def test_a_latent_is_one_head_that_is_stored_once() -> None:
    deepseek_v3 = KVLayout(num_layers=61, num_kv_heads=1, page_size=64, head_dim=512 + 64, dtype="bf16", kind="mla")
    assert deepseek_v3.page_shape == (64, 576)
    assert deepseek_v3.head_bytes == deepseek_v3.page_bytes == 64 * 576 * 2
    assert deepseek_v3.token_bytes == 70_272
    with pytest.raises(InputError, match=r"num_kv_heads: must be 1 of kind mla, is 2"):
        replace(deepseek_v3, num_kv_heads=2)


def test_fp32_doubles_every_page() -> None:
    assert replace(SMOLLM2, dtype="fp32").page_bytes == 2 * SMOLLM2.page_bytes


@given(layout=layouts)
def test_pages_and_aux_slots_tile_the_pool_without_touching_each_other(layout: PoolLayout) -> None:
    spans: list[tuple[int, int]] = []
    for rank in range(layout.num_ranks):
        begin = rank * layout.rank_stride
        assert begin % POOL_ALIGNMENT == 0
        own = [kv for kv in (layout.kv, *layout.further) for _ in range(kv.num_layers)]
        assert len(own) == layout.num_layers
        for layer, kv in enumerate(own):
            for page in range(layout.num_pages):
                assert layout.page_offset(layer, page, rank) == begin
                spans.append((begin, kv.page_bytes))
                begin += kv.page_bytes
    spans += [(layout.aux_offset(slot), layout.aux_slot_bytes) for slot in range(layout.num_aux_slots)]
    ends = [begin + length for begin, length in spans]
    assert all(begin >= end for (begin, _), end in zip(spans[1:], ends, strict=False))
    assert ends[-1] <= layout.total_bytes < ends[-1] + AUX_ALIGNMENT + POOL_ALIGNMENT
    assert layout.total_bytes % POOL_ALIGNMENT == 0
    assert all(layout.aux_offset(slot) % AUX_ALIGNMENT == 0 for slot in range(layout.num_aux_slots))


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_begun_page_is_a_page(num_tokens: int, num_pages: int) -> None:
    assert num_pages_for(num_tokens, 16) == num_pages


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "page_size", "head_dim"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_kv_layout_without_something_in_it_is_refused(field: str, value: int) -> None:
    with pytest.raises(InputError, match=f"{field}: must be at least 1, is {value}"):
        replace(SMOLLM2, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["num_pages", "num_aux_slots", "aux_slot_bytes", "num_ranks"])
def test_a_pool_layout_without_something_in_it_is_refused(field: str) -> None:
    with pytest.raises(InputError, match=f"{field}: must be at least 1, is 0"):
        replace(POOL, **{field: 0})  # type: ignore[arg-type]


def test_groups_of_layers_with_pages_of_other_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="page_size: must be 16 in all groups of layers, is 8"):
        replace(POOL, further=(replace(SMOLLM2, page_size=8),))


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="dtype: must be one of bf16, fp32, is 'fp16'"):
        replace(SMOLLM2, dtype="fp16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "layer", "page"), [("layer", 30, 0), ("layer", -1, 0), ("page", 0, 100), ("page", 0, -1)]
)
def test_a_page_outside_the_pool_has_no_offset(field: str, layer: int, page: int) -> None:
    with pytest.raises(InputError) as refused:
        POOL.page_offset(layer, page)
    assert refused.value.field == field


@pytest.mark.parametrize("slot", [-1, 4])
def test_an_aux_slot_outside_the_pool_has_no_offset(slot: int) -> None:
    with pytest.raises(InputError, match=r"slot: must be in 0\.\.3"):
        POOL.aux_offset(slot)


def test_page_counts_of_nonsense_are_refused() -> None:
    with pytest.raises(InputError, match="num_tokens: must be at least 0"):
        num_pages_for(-1, 16)
    with pytest.raises(InputError, match="page_size: must be at least 1"):
        num_pages_for(1, 0)
