"""Conformance: digests of sent and received pages are the documented sum, and the aux write carries them last."""

from dataclasses import replace

import numpy as np
import pytest
from digest_model import slow_digests
from fabric_world import LENGTH, Link, page_writes

from headrace.errors import InputError
from headrace.fabric.interface import (
    LAYERS_PER_STEP,
    DigestId,
    Digests,
    DigestsReady,
    LastWrite,
    PageReads,
    PageWrites,
)

AUX = LastWrite(src_offset=700_000, dst_offset=800_000, length=1024, digests_at=40)


def landed(writes: PageWrites) -> PageReads:
    return PageReads(
        pages=writes.dst,
        positions=writes.positions,
        layer_begin=writes.layer_begin,
        layer_end=writes.layer_end,
        length=writes.length,
        route=writes.route,
    )


def sent(writes: PageWrites) -> PageReads:
    return replace(landed(writes), pages=writes.src)


def digests_of(pair: Link, reads: list[PageReads], num_pages: int) -> Digests:
    digest = pair.reader.fabric.submit_digest(reads, num_pages)
    return ready(pair, digest).digests


def ready(pair: Link, digest: DigestId) -> DigestsReady:
    def told() -> list[DigestsReady]:
        return [event for event in pair.reader.told(DigestsReady) if event.digest == digest]

    pair.world.wait_for(lambda: bool(told()))
    assert len(told()) == 1
    return told()[0]


def aux_digests(pair: Link, num_pages: int) -> list[int]:
    at = AUX.dst_offset + AUX.digests_at
    return [int(d) for d in pair.reader.memory[at : at + 8 * num_pages].copy().view("<u8")]


def test_submit_digest_equals_the_reference(pair: Link) -> None:
    memory = pair.reader.memory
    memory[:] = np.random.default_rng(5).integers(0, 256, LENGTH, dtype=np.uint8)
    parts = [
        landed(page_writes([0, 0, 0], [4, 9, 2], layers=(0, 3), length=1024)),
        landed(page_writes([0, 0], [30, 31], layers=(3, 5), positions=[2, 0], length=333, route=1)),
    ]
    digests = digests_of(pair, parts, 4)
    assert digests.dtype == np.uint64
    assert [int(d) for d in digests] == slow_digests(memory, parts, 4)
    assert int(digests[3]) == 0


def test_a_digest_of_more_bytes_than_one_slice_takes_equals_the_reference(pair: Link) -> None:
    pair.reader.memory[:] = np.random.default_rng(6).integers(0, 256, LENGTH, dtype=np.uint8)
    reads = landed(page_writes([0] * 64, list(range(64)), layers=(0, 64), dst=(0, 4096, 8192), length=65536))
    assert [int(d) for d in digests_of(pair, [reads], 64)] == slow_digests(pair.reader.memory, [reads], 64)


def test_the_last_write_carries_the_digests_of_what_was_sent(pair: Link) -> None:
    now = page_writes([3, 8], [10, 11], layers=(0, 4), positions=[0, 1])
    later = page_writes([5, 6, 7], [40, 2, 60], layers=(0, 4), positions=[2, 3, 4], route=3)
    pair.arm(7, 21)
    transfer = pair.open(7, num_pages=5)
    pair.writer.fabric.submit_pages(transfer, now)
    pair.writer.fabric.submit_program(2, [(transfer, later)], [(transfer, 4, AUX)])
    for layer in range(4):
        pair.writer.fabric.raise_layers(2 * LAYERS_PER_STEP + layer + 1)
    pair.wait_reached(7, 21)
    assert pair.wait_done(transfer).complete
    reference = slow_digests(pair.writer.memory, [sent(now), sent(later)], 5)
    assert aux_digests(pair, 5) == reference
    assert [int(d) for d in digests_of(pair, [landed(now), landed(later)], 5)] == reference


def test_the_rest_of_the_last_write_is_the_callers_bytes(pair: Link) -> None:
    before = pair.writer.memory.copy()
    transfer = pair.open(7, num_pages=3)
    pair.writer.fabric.submit_pages(transfer, page_writes([0, 1, 2], [0, 1, 2]))
    pair.writer.fabric.submit_last(transfer, AUX)
    assert pair.wait_done(transfer).num_posted == 4
    pair.world.settle()
    there = pair.reader.memory[AUX.dst_offset : AUX.dst_offset + AUX.length]
    here = before[AUX.src_offset : AUX.src_offset + AUX.length]
    np.testing.assert_array_equal(there[:40], here[:40])
    np.testing.assert_array_equal(there[64:], here[64:])


def test_the_last_write_waits_for_everything_of_its_transfer(pair: Link) -> None:
    """Ended while a gated program of the same transfer still waits."""
    transfer = pair.open(7, num_pages=2)
    pair.writer.fabric.submit_program(1, [(transfer, page_writes([0, 1], [0, 1], layers=(0, 2)))])
    pair.writer.fabric.submit_last(transfer, AUX)
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 1)
    pair.world.wait_for(lambda: pair.reader.fabric.statistics().num_arrivals >= 2)
    pair.world.settle()
    assert pair.reader.fabric.statistics().num_arrivals == 2
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 2)
    assert pair.wait_done(transfer).num_posted == 5


def test_a_closed_list_never_sends_its_last_write(pair: Link) -> None:
    transfer = pair.open(7, num_pages=1)
    pair.writer.fabric.submit_program(1, [(transfer, page_writes([0], [0], layers=(0, 2)))], [(transfer, 2, AUX)])
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 1)
    pair.world.wait_for(lambda: pair.reader.fabric.statistics().num_arrivals == 1)
    assert pair.writer.fabric.close_transfer(transfer) == 1
    pair.writer.fabric.raise_layers(9 * LAYERS_PER_STEP)
    assert not pair.wait_done(transfer).complete
    pair.world.settle()
    assert pair.reader.fabric.statistics().num_arrivals == 1


def test_the_aux_write_is_not_part_of_any_digest(pair: Link) -> None:
    transfer = pair.open(7, num_pages=2)
    pair.writer.fabric.submit_last(transfer, AUX)
    assert pair.wait_done(transfer).num_posted == 1
    pair.world.settle()
    assert aux_digests(pair, 2) == [0, 0]


@pytest.mark.parametrize("changed", ["pages swapped", "one bit", "another route", "layers shifted"])
def test_anything_out_of_place_changes_the_digests(pair: Link, changed: str) -> None:
    memory = pair.reader.memory
    memory[:] = np.random.default_rng(8).integers(0, 256, LENGTH, dtype=np.uint8)
    reads = landed(page_writes([0, 0], [4, 9], layers=(0, 2), dst=(65536, 65536, 1024)))
    before = [int(d) for d in digests_of(pair, [reads], 2)]
    if changed == "pages swapped":
        for layer in (1, 2):
            pages = memory[layer * 65536 :][: 64 * 1024].reshape(64, 1024)
            pages[[4, 9]] = pages[[9, 4]]
    elif changed == "one bit":
        memory[65536 + 4 * 1024 + 1023] ^= 1
        memory[65536 + 9 * 1024] ^= 128
    elif changed == "another route":
        reads = replace(reads, route=1)
    else:  # the same bytes, said to be of the next layers
        reads = replace(reads, layer_begin=1, layer_end=3, pages=replace(reads.pages, offset=0))
    after = [int(d) for d in digests_of(pair, [reads], 2)]
    assert not set(before) & set(after)


def test_wrong_reads_are_refused(pair: Link) -> None:
    fabric = pair.reader.fabric
    reads = landed(page_writes([0], [0]))
    with pytest.raises(InputError, match="pages"):
        fabric.submit_digest([replace(reads, pages=replace(reads.pages, offset=LENGTH))], 1)
    with pytest.raises(InputError, match="positions"):
        fabric.submit_digest([reads], 0)
    transfer = pair.open(7, num_pages=4)
    with pytest.raises(InputError, match="digests_at"):
        pair.writer.fabric.submit_last(transfer, replace(AUX, length=40 + 31))
    with pytest.raises(InputError, match="src_offset"):
        pair.writer.fabric.submit_last(transfer, replace(AUX, src_offset=LENGTH))
