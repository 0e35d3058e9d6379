"""The bare copy loop: exactly the named bytes are copied, by every method that this CPU has, whatever the alignment."""

import numpy as np
import pytest
from limits_memories import LENGTH, filled_memories, half_of_all_pages, placed

from headrace.errors import InputError
from headrace.fabric.limits.loops import CopyLoop, copy_methods
from headrace.fabric.limits.placement import Placement, scattered
from headrace.fabric.limits.rates import copy_rates


@pytest.mark.parametrize("method", copy_methods())
def test_pages_land_at_their_offsets_and_nothing_else_changes(method: str) -> None:
    with filled_memories() as filled:
        for page_bytes in (4096, 12288, 1 << 16):
            placement = half_of_all_pages(page_bytes)
            rates = copy_rates([placement], method=method, memories=filled.memories, repetitions=2)
            filled.assert_carried(placement)
            filled.poison()
            assert (rates.method, rates.page_bytes, rates.num_bytes) == (method, page_bytes, placement.num_bytes)
            assert len(rates.seconds) == len(rates.cpu_seconds) == len(rates.bytes_per_s) == 2
            assert min(rates.seconds) > 0


@pytest.mark.parametrize("method", copy_methods())
def test_odd_lengths_and_odd_places_are_copied_to_the_last_byte(method: str) -> None:
    for page_bytes in (1, 63, 64, 255, 256, 319, 320, 321, 1000, 4097):
        for skew in (0, 1, 63):
            src, dst = [skew, 20_000, LENGTH - page_bytes], [10_000 + skew, 30_001, LENGTH - page_bytes]
            with filled_memories() as filled:
                placement = placed(src, dst, page_bytes)
                copy_rates([placement], method=method, memories=filled.memories, repetitions=1)
                filled.assert_carried(placement)


def test_repetitions_take_the_placements_in_turn() -> None:
    first, second, third = placed([0], [0], 64), placed([64], [64], 64), placed([128], [128], 64)
    with filled_memories() as filled:
        copy_rates([first, second, third], memories=filled.memories, repetitions=1)  # and one to warm up
        filled.assert_carried(placed([0, 64], [0, 64], 64))


def test_the_widest_non_temporal_stores_are_the_first_choice() -> None:
    methods = copy_methods()
    assert methods[-1] == "memcpy" and len(set(methods)) == len(methods)
    assert copy_rates([placed([0], [0], 64)], repetitions=1).method == methods[0]


@pytest.mark.parametrize(
    ("src", "dst", "page_bytes", "field"),
    [
        ([LENGTH - 63], [0], 64, "src_offsets"),
        ([0], [LENGTH - 63], 64, "dst_offsets"),
        ([-1], [0], 64, "src_offsets"),
        ([0], [0], LENGTH + 1, "page_bytes"),
    ],
)
def test_places_beyond_the_memories_are_refused_and_nothing_is_copied(
    src: list[int], dst: list[int], page_bytes: int, field: str
) -> None:
    with filled_memories() as filled:
        with pytest.raises(InputError) as refused:
            copy_rates([placed(src, dst, page_bytes)], memories=filled.memories)
        assert refused.value.field == field
        filled.assert_carried(placed([], [], 64))


def test_an_unknown_method_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match="method: must be one that this CPU has .*memcpy.*, is 'rep'"):
        copy_rates([placed([0], [0], 64)], method="rep")


def test_a_memory_shorter_than_told_is_refused() -> None:
    with filled_memories() as filled, pytest.raises(InputError, match="length"):
        CopyLoop(filled.memories.src_fd, LENGTH + 1, filled.memories.dst_fd, LENGTH)


# ---- placements ------------------------------------------------------------------------------------------------


def test_scattered_placements_come_back_to_a_page_only_after_all_others() -> None:
    placements = scattered(page_bytes=100, num_bytes=1000, region_bytes=3999, seed=1)
    assert [place.num_bytes for place in placements] == [1000, 1000, 1000]
    for side in ("src_offsets", "dst_offsets"):
        offsets = np.concatenate([getattr(place, side) for place in placements])
        assert len(set(offsets)) == len(offsets) == 30
        assert set(offsets) <= set(range(0, 3900, 100))
        assert list(offsets) != sorted(offsets)
    assert list(placements[0].src_offsets) != list(placements[0].dst_offsets)


def test_the_seed_alone_decides_the_order() -> None:
    one, same, other = (scattered(page_bytes=1, num_bytes=50, region_bytes=100, seed=seed)[0] for seed in (1, 1, 2))
    assert list(one.src_offsets) == list(same.src_offsets) != list(other.src_offsets)


@pytest.mark.parametrize(
    ("page_bytes", "num_bytes", "field"), [(0, 10, "page_bytes"), (11, 10, "num_bytes"), (1, 101, "num_bytes")]
)
def test_a_region_without_that_many_pages_is_refused(page_bytes: int, num_bytes: int, field: str) -> None:
    with pytest.raises(InputError) as refused:
        scattered(page_bytes=page_bytes, num_bytes=num_bytes, region_bytes=100, seed=1)
    assert refused.value.field == field


def test_offsets_that_are_none_are_refused() -> None:
    good = np.zeros(3, dtype=np.int64)
    with pytest.raises(InputError, match="src_offsets: must be contiguous"):
        Placement(src_offsets=np.zeros(6, dtype=np.int64)[::2], dst_offsets=good, page_bytes=1)
    with pytest.raises(InputError, match="dst_offsets: must be contiguous.*int32"):
        Placement(src_offsets=good, dst_offsets=np.zeros(3, dtype=np.int32), page_bytes=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="dst_offsets: must be 3"):
        Placement(src_offsets=good, dst_offsets=good[:2], page_bytes=1)


def test_placements_of_different_sizes_are_refused_together() -> None:
    with pytest.raises(InputError, match="placements"):
        copy_rates([placed([0], [0], 64), placed([0], [0], 128)])
    with pytest.raises(InputError, match="placements"):
        copy_rates([])
    with pytest.raises(InputError, match="repetitions"):
        copy_rates([placed([0], [0], 64)], repetitions=0)
