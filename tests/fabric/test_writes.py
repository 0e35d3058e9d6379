"""Conformance: bytes land where they were sent, all of them, nothing beside them, and one imm for each write."""

import errno
from dataclasses import replace

import numpy as np
import pytest
from fabric_world import LENGTH, Link, World, carry, fill, link, page_writes, poisoned

from headrace.errors import InputError
from headrace.fabric.interface import PageWrites, TransferDone


def write(pair: Link, *, src: int, dst: int, length: int, imm: int = 7) -> TransferDone:
    num_writes = pair.writer.fabric.num_cuts(pair.to_reader, length)
    pair.arm(imm, num_writes)
    transfer = pair.open(imm)
    pair.writer.fabric.submit_write(transfer, src_offset=src, dst_offset=dst, length=length)
    pair.writer.fabric.submit_last(transfer)
    pair.wait_reached(imm, num_writes)
    return pair.wait_done(transfer)


@pytest.mark.parametrize(
    ("src", "dst", "length"),
    [
        (0, 0, 4096),
        (12288, 4096, 12288),
        (1, 3, 1),
        (17, 4099, 65537),
        (0, 500, 0),
        (LENGTH - 777, LENGTH - 777, 777),
        (0, LENGTH - 1, 1),
        (0, 0, LENGTH),
    ],
    ids=["one page", "three pages", "one byte", "odd", "nothing", "odd end", "last byte", "everything"],
)
def test_a_write_lands_whole_and_nothing_beside_it_changes(pair: Link, src: int, dst: int, length: int) -> None:
    done = write(pair, src=src, dst=dst, length=length)
    num_writes = pair.writer.fabric.num_cuts(pair.to_reader, length)
    assert (done.num_posted, done.num_failed, done.complete, done.code) == (num_writes, 0, True, 0)
    expected = poisoned(pair.reader)
    expected[dst : dst + length] = pair.writer.memory[src : src + length]
    np.testing.assert_array_equal(pair.reader.memory, expected)


def test_a_write_of_no_bytes_at_the_very_end_still_counts(pair: Link) -> None:
    assert write(pair, src=LENGTH, dst=LENGTH, length=0).complete
    np.testing.assert_array_equal(pair.reader.memory, poisoned(pair.reader))


@pytest.mark.parametrize(
    "writes",
    [
        page_writes([0, 1, 2], [2, 0, 1]),
        page_writes([5, 3], [9, 40], layers=(0, 3)),
        page_writes([7, 0, 4, 2], [1, 3, 5, 6], layers=(2, 5), src=(96, 4096, 512), dst=(33, 70000, 1500), length=511),
        page_writes(list(range(60)), list(reversed(range(60))), layers=(0, 4)),
        page_writes([4, 4], [1, 2], length=1000),
        page_writes([0], [1023], length=1024),
        page_writes([0, 1], [5, 6], length=0),
        page_writes([3, 1], [0, 2], layers=(3, 5), src=(-190_000, 65536, 1024), dst=(-140_000, 50_000, 1500)),
    ],
    ids=[
        *("shuffled", "layers", "odd strides", "many", "one source twice", "last page of the region", "no bytes"),
        "layers behind others that were smaller",
    ],
)
def test_pages_land_at_their_indices_and_the_gaps_stay_untouched(pair: Link, writes: PageWrites) -> None:
    pair.arm(9, writes.num_writes)
    transfer = pair.open(9)
    pair.writer.fabric.submit_pages(transfer, writes)
    pair.writer.fabric.submit_last(transfer)
    pair.wait_reached(9, writes.num_writes)
    done = pair.wait_done(transfer)
    assert (done.num_posted, done.num_failed, done.complete) == (writes.num_writes, 0, True)
    expected = poisoned(pair.reader)
    carry(expected, pair.writer.memory, writes)
    np.testing.assert_array_equal(pair.reader.memory, expected)


def test_more_writes_than_any_window_or_queue_holds_all_land_once(pair: Link) -> None:
    writes = page_writes(
        list(range(1000)),
        [(7 * i) % 1000 for i in range(1000)],
        layers=(0, 4),
        src=(0, 256, 1024),
        dst=(0, 256, 1024),
        length=200,
    )
    pair.arm(3, writes.num_writes)
    transfer = pair.open(3)
    pair.writer.fabric.submit_pages(transfer, writes)
    pair.writer.fabric.submit_last(transfer)
    pair.wait_reached(3, 4000)
    assert pair.wait_done(transfer).num_posted == 4000
    expected = poisoned(pair.reader)
    carry(expected, pair.writer.memory, writes)
    np.testing.assert_array_equal(pair.reader.memory, expected)
    assert pair.writer.fabric.statistics().num_writes_posted == 4000
    assert pair.writer.fabric.statistics().num_bytes_posted == 800_000
    assert pair.reader.fabric.statistics().num_arrivals == 4000


def test_several_transfers_to_one_peer_keep_their_imms_apart(pair: Link) -> None:
    fabric = pair.writer.fabric
    plans = {imm: page_writes(list(range(imm)), [imm * 8 + i for i in range(imm)]) for imm in (1, 2, 3, 8)}
    transfers = {}
    for imm, writes in plans.items():
        pair.arm(imm, writes.num_writes)
        transfers[imm] = pair.open(imm)
    for imm, writes in plans.items():
        fabric.submit_pages(transfers[imm], writes)
        fabric.submit_last(transfers[imm])
    for imm in plans:
        pair.wait_reached(imm, imm)
        assert pair.wait_done(transfers[imm]).num_posted == imm
    pair.world.settle()
    assert all(pair.reader.reached(imm) == [imm] and not pair.reader.surplus(imm) for imm in plans)


def test_two_writers_reach_one_reader_and_one_writer_two_readers(world: World) -> None:
    first, second, third = world.side(), world.side(), world.side()
    links = [link(world, first, third), link(world, second, third), link(world, first, second)]
    fill(first, seed=1)
    fill(second, seed=2)
    before = second.memory.copy()
    for number, each in enumerate(links):
        each.arm(100 + number, 4)
        transfer = each.open(100 + number)
        each.writer.fabric.submit_pages(transfer, page_writes([0, 1, 2, 3], [4 * number + i for i in range(4)]))
        each.writer.fabric.submit_last(transfer)
        each.wait_reached(100 + number, 4)
        assert each.wait_done(transfer).complete
    np.testing.assert_array_equal(third.memory[:4096], first.memory[:4096])
    np.testing.assert_array_equal(third.memory[4096:8192], before[:4096])
    np.testing.assert_array_equal(second.memory[8192:12288], first.memory[:4096])
    before[8192:12288] = first.memory[:4096]
    np.testing.assert_array_equal(second.memory, before)


def test_an_empty_transfer_is_done_with_nothing_posted(pair: Link) -> None:
    transfer = pair.open(1)
    pair.writer.fabric.submit_pages(transfer, page_writes([], [], layers=(0, 5)))
    pair.writer.fabric.submit_last(transfer)
    done = pair.wait_done(transfer)
    assert (done.num_posted, done.num_failed, done.complete, done.code) == (0, 0, True, 0)


@pytest.mark.parametrize(("dst", "length"), [(4096, 1), (4095, 2), (0, 4097), (1 << 40, 8), (-1, 1)])
def test_a_write_beyond_the_descriptor_is_refused_at_the_sender(pair: Link, dst: int, length: int) -> None:
    """The descriptor is made shorter than the region, so that a missing check would show as bytes."""
    pair.writer.fabric.connect(pair.to_reader, replace(pair.descriptor, length=4096))
    transfer = pair.open(2)
    pair.writer.fabric.submit_write(transfer, src_offset=0, dst_offset=dst, length=length)
    done = pair.wait_done(transfer)
    assert (done.num_posted, done.num_failed, done.complete, done.code) == (0, 0, False, errno.EINVAL)
    assert done.text
    pair.world.settle()
    np.testing.assert_array_equal(pair.reader.memory, poisoned(pair.reader))
    assert not pair.reader.events


def test_pages_beyond_the_descriptor_end_the_list_and_the_peer_goes_on(pair: Link) -> None:
    pair.writer.fabric.connect(pair.to_reader, replace(pair.descriptor, length=8 * 1024))
    transfer = pair.open(2)
    pair.writer.fabric.submit_pages(transfer, page_writes([0, 1, 2], [6, 7, 8]))
    done = pair.wait_done(transfer)
    assert (done.complete, done.code, done.num_failed) == (False, errno.EINVAL, 0)
    assert done.num_posted <= 2
    pair.wait_surplus(2, done.num_posted)
    assert (pair.reader.memory[8 * 1024 :] == poisoned(pair.reader)[8 * 1024 :]).all()
    last_page = write(pair, src=0, dst=7 * 1024, length=1024)
    assert last_page.complete


def test_a_source_beyond_our_own_memory_is_our_callers_error(pair: Link) -> None:
    fabric, transfer = pair.writer.fabric, pair.open(2)
    with pytest.raises(InputError, match="src"):
        fabric.submit_write(transfer, src_offset=LENGTH - 1, dst_offset=0, length=2)
    with pytest.raises(InputError, match="src"):
        fabric.submit_write(transfer, src_offset=-1, dst_offset=0, length=1)
    with pytest.raises(InputError, match="src"):
        fabric.submit_pages(transfer, page_writes([0, 1024], [0, 1]))
    with pytest.raises(InputError, match="src"):
        fabric.submit_pages(transfer, page_writes([-1], [0]))
    with pytest.raises(InputError, match="length"):
        fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=-1)
    fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=1)
    fabric.submit_last(transfer)
    assert pair.wait_done(transfer).num_posted == 1


def test_page_lists_of_different_lengths_are_refused(pair: Link) -> None:
    transfer = pair.open(2)
    with pytest.raises(InputError, match="indices"):
        pair.writer.fabric.submit_pages(transfer, page_writes([0, 1], [0], positions=[0, 1]))
    with pytest.raises(InputError, match="positions"):
        pair.writer.fabric.submit_pages(transfer, page_writes([0, 1], [0, 1], positions=[0]))
    with pytest.raises(InputError, match="layer"):
        pair.writer.fabric.submit_pages(transfer, page_writes([0], [0], layers=(2, 1)))


def test_a_position_without_a_digest_is_refused(pair: Link) -> None:
    transfer = pair.open(2, num_pages=2)
    with pytest.raises(InputError, match="positions"):
        pair.writer.fabric.submit_pages(transfer, page_writes([0], [0], positions=[2]))
    with pytest.raises(InputError, match="positions"):
        pair.writer.fabric.submit_pages(transfer, page_writes([0], [0], positions=[-1]))


def test_nothing_is_added_to_an_ended_list(pair: Link) -> None:
    fabric, transfer = pair.writer.fabric, pair.open(2)
    fabric.submit_last(transfer)
    with pytest.raises(InputError, match="transfer"):
        fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=1)
    with pytest.raises(InputError, match="transfer"):
        fabric.submit_last(transfer)


def test_a_list_that_the_fabric_ended_may_be_named_until_its_result_was_drained(pair: Link) -> None:
    """The caller cannot know yet: its program for many tickets must not be refused for this one."""
    fabric, refused, kept = pair.writer.fabric, pair.open(2), pair.open(3)
    fabric.submit_write(refused, src_offset=0, dst_offset=LENGTH, length=1)
    fabric.submit_write(refused, src_offset=0, dst_offset=0, length=1)
    fabric.submit_program(0, [(refused, page_writes([0], [0])), (kept, page_writes([0], [0]))])
    fabric.raise_layers(1)
    fabric.submit_last(refused)
    fabric.submit_last(kept)
    assert pair.wait_done(kept).num_posted == 1
    done = pair.wait_done(refused)
    assert (done.num_posted, done.complete, done.code) == (0, False, errno.EINVAL)
    with pytest.raises(InputError, match="transfer"):
        fabric.submit_write(refused, src_offset=0, dst_offset=0, length=1)
