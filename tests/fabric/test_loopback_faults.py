"""Each fault of the simulated network does what its name says, and nothing more."""

from dataclasses import replace

import numpy as np
import pytest
from digest_model import slow_digests
from fabric_world import Link, LoopbackWorld, page_writes
from loopback_world import CALM, arrivals, calm_pair, landed, submit, untouched

from headrace.errors import InputError
from headrace.fabric.interface import (
    DigestsReady,
    Imm,
    LastWrite,
    MessageReceived,
    PageReads,
    SendFailed,
    Surplus,
    TransferDone,
)
from headrace.testing import Faults


def result(pair: Link) -> TransferDone:
    (done,) = pair.writer.told(TransferDone)
    return done


def test_a_calm_network_delivers_everything_in_order_and_at_once() -> None:
    world, pair = calm_pair()
    for i in range(10):
        pair.writer.fabric.send(pair.to_reader, b"%d" % i)
    submit(pair, count=10)
    world.settle()
    assert world.network.now == 0.0
    assert pair.reader.messages() == [b"%d" % i for i in range(10)]
    assert landed(pair, end=40960)
    assert (result(pair).num_posted, result(pair).num_failed, result(pair).complete) == (10, 0, True)


def test_the_local_completion_follows_the_landing_on_a_calm_network() -> None:
    world, pair = calm_pair(replace(CALM, delay_s=(0.01, 0.01)))
    submit(pair)
    world.wait_for(lambda: arrivals(pair) == 1)
    assert pair.writer.told(TransferDone) == []
    world.settle()
    assert result(pair).complete


def test_an_early_completion_comes_before_the_bytes_land() -> None:
    world, pair = calm_pair(replace(CALM, early_completion=1.0, late_write=1.0))
    transfer = submit(pair)
    pair.wait_done(transfer)
    assert untouched(pair)
    assert arrivals(pair) == 0
    world.settle()
    assert landed(pair)
    assert arrivals(pair) == 1


def test_a_source_reused_after_its_completion_does_not_change_what_lands() -> None:
    world, pair = calm_pair(replace(CALM, early_completion=1.0, late_write=1.0))
    before = pair.writer.memory.copy()
    pair.wait_done(submit(pair))
    pair.writer.memory[:] = 0
    world.settle()
    np.testing.assert_array_equal(pair.reader.memory[:4096], before[:4096])


def test_a_source_reused_before_its_completion_shows_as_wrong_bytes() -> None:
    world, pair = calm_pair(replace(CALM, delay_s=(0.01, 0.01)))
    before = pair.writer.memory.copy()
    submit(pair)
    assert world.network.step()  # the turn that posts it
    pair.writer.memory[:] = 0
    world.settle()
    assert (pair.reader.memory[:4096] == 0).all()
    assert not (before[:4096] == 0).all()


def test_a_late_completion_comes_after_the_landing_by_the_stated_time() -> None:
    world, pair = calm_pair(replace(CALM, late_completion=1.0, late_s=(5.0, 6.0)))
    transfer = submit(pair)
    world.wait_for(lambda: arrivals(pair) == 1)
    assert world.network.now == 0.0
    pair.wait_done(transfer)
    assert 5.0 <= world.network.now <= 6.0


def test_a_split_write_lands_in_two_parts_and_its_imm_with_the_second() -> None:
    world, pair = calm_pair(replace(CALM, split_write=1.0, delay_s=(0.01, 0.01)), seed=4)
    submit(pair)
    world.wait_for(lambda: not untouched(pair))
    num_landed = int((pair.reader.memory[:4096] == pair.writer.memory[:4096]).sum())
    assert 0 < num_landed < 4096
    assert arrivals(pair) == 0
    assert (pair.reader.memory[4095] != pair.writer.memory[4095]) or (num_landed == 4095)
    world.settle()
    assert landed(pair)
    assert arrivals(pair) == 1


def test_a_late_imm_comes_after_its_bytes() -> None:
    world, pair = calm_pair(replace(CALM, late_imm=1.0, delay_s=(0.01, 0.01)))
    submit(pair)
    world.wait_for(lambda: landed(pair))
    assert arrivals(pair) == 0
    world.settle()
    assert arrivals(pair) == 1


@pytest.mark.parametrize("imm_arrives", [True, False])
def test_the_rest_of_a_half_received_write_misses_the_memory_after_a_revoke(imm_arrives: bool) -> None:
    faults = replace(CALM, split_write=1.0, delay_s=(0.01, 0.01), imm_after_revoke=float(imm_arrives))
    world, pair = calm_pair(faults, seed=4)
    pair.arm(7, 1)
    submit(pair)
    world.wait_for(lambda: not untouched(pair))
    pair.reader.fabric.revoke(pair.to_writer)
    pair.reader.fabric.disarm(Imm(7))
    pair.reader.memory[:] = 0xA5
    world.settle()
    assert untouched(pair)
    assert len(pair.reader.told(Surplus)) == imm_arrives
    assert result(pair).num_posted == 1


@pytest.mark.parametrize("error", [True, False])
def test_a_write_with_a_revoked_key_fails_at_the_writer_or_vanishes(error: bool) -> None:
    world, pair = calm_pair(replace(CALM, error_after_revoke=float(error), imm_after_revoke=1.0))
    pair.reader.fabric.revoke(pair.to_writer)
    submit(pair)
    world.settle()
    assert untouched(pair)
    assert arrivals(pair) == 0
    assert result(pair).num_failed == error
    assert (result(pair).code > 0) == error


def test_a_lost_write_is_reported_as_done() -> None:
    world, pair = calm_pair(replace(CALM, lose_write=1.0))
    submit(pair, count=3)
    world.settle()
    assert (result(pair).num_posted, result(pair).num_failed, result(pair).complete) == (3, 0, True)
    assert untouched(pair)
    assert arrivals(pair) == 0


def test_a_write_lost_with_an_error_ends_its_list() -> None:
    world, pair = calm_pair(replace(CALM, lose_write_with_error=1.0))
    submit(pair, count=100)
    world.settle()
    done = result(pair)
    assert 1 <= done.num_failed == done.num_posted < 100
    assert not done.complete
    assert done.code > 0
    assert done.text
    assert untouched(pair)


def test_a_write_reported_as_failed_may_have_landed() -> None:
    world, pair = calm_pair(replace(CALM, fail_landed_write=1.0))
    submit(pair)
    world.settle()
    assert result(pair).num_failed == 1
    assert landed(pair)
    assert arrivals(pair) == 1


def test_duplicate_completions_are_filtered() -> None:
    world, pair = calm_pair(replace(CALM, duplicate_completion=1.0, late_s=(0.001, 0.01)))
    for imm in range(5):
        submit(pair, imm=imm, count=50)  # later transfers reuse the contexts of earlier ones
        world.network.run(deadline=world.network.now + 0.004)
    world.settle()
    results = pair.writer.told(TransferDone)
    assert [(done.num_posted, done.num_failed, done.code) for done in results] == [(50, 0, 0)] * 5
    assert pair.writer.fabric.statistics().num_writes_completed == 250


def test_a_full_queue_keeps_the_place_of_every_list() -> None:
    world, pair = calm_pair(replace(CALM, full_queue=0.8))
    pair.arm(7, 200)
    submit(pair, count=200)
    world.settle()
    assert pair.reader.reached(7) == [200]
    assert landed(pair, end=200 * 4096)
    assert world.network.now > 0.0


def test_a_queue_full_for_ever_parks_that_peer_until_its_list_is_closed() -> None:
    world, pair = calm_pair(replace(CALM, full_queue=1.0))
    transfer = submit(pair, count=5)
    world.network.run(deadline=30.0)
    assert pair.writer.fabric.statistics().num_writes_posted == 0
    assert pair.writer.fabric.close_transfer(transfer) == 0
    world.network.faults = CALM
    world.settle()
    assert (result(pair).num_posted, result(pair).complete) == (0, False)
    assert arrivals(pair) == 0


def test_a_lost_message_vanishes() -> None:
    world, pair = calm_pair(replace(CALM, lose_message=1.0))
    pair.writer.fabric.send(pair.to_reader, b"lost")
    world.settle()
    assert not pair.reader.events
    assert not pair.writer.events


def test_a_failed_message_is_told_and_may_have_arrived() -> None:
    world, pair = calm_pair(replace(CALM, fail_message=1.0))
    for _ in range(40):
        pair.writer.fabric.send(pair.to_reader, b"perhaps")
    world.settle()
    failures = pair.writer.told(SendFailed)
    assert len(failures) == 40
    assert {failure.peer for failure in failures} == {pair.to_reader}
    assert 5 < len(pair.reader.messages()) < 35


def test_a_duplicated_message_arrives_twice() -> None:
    world, pair = calm_pair(replace(CALM, duplicate_message=1.0))
    pair.writer.fabric.send(pair.to_reader, b"a")
    pair.writer.fabric.send(pair.to_reader, b"b")
    world.settle()
    assert pair.reader.messages() == [b"a", b"a", b"b", b"b"]


@pytest.mark.parametrize("reorder_messages", [True, False])
def test_messages_keep_their_order_unless_it_is_switched_off(reorder_messages: bool) -> None:
    world, pair = calm_pair(replace(CALM, reorder=True, delay_s=(0.0, 1.0), reorder_messages=reorder_messages))
    sent = [b"%d" % i for i in range(20)]
    for message in sent:
        pair.writer.fabric.send(pair.to_reader, message)
    world.settle()
    assert sorted(pair.reader.messages()) == sorted(sent)
    assert (pair.reader.messages() == sent) is not reorder_messages


def first_to_land(seed: int, *, reorder: bool) -> int:
    world, pair = calm_pair(replace(CALM, reorder=reorder), seed=seed)
    submit(pair, count=8)
    world.wait_for(lambda: arrivals(pair) == 1)
    return int(np.argmax(pair.reader.memory[: 8 * 4096 : 4096] == pair.writer.memory[: 8 * 4096 : 4096]))


def test_reordering_lets_writes_overtake_each_other() -> None:
    assert {first_to_land(seed, reorder=False) for seed in range(20)} == {0}
    assert len({first_to_land(seed, reorder=True) for seed in range(20)}) > 2


# ---- corruption


def digests_differ(world: LoopbackWorld, pair: Link, faults: Faults) -> int:
    """Send eight pages with digests under `faults`; -> the number of pages whose digest differs where they landed."""
    world.network.faults = faults
    writes = page_writes(list(range(8)), list(range(8)), layers=(0, 2))
    transfer = pair.open(7, num_pages=8)
    pair.writer.fabric.submit_pages(transfer, writes)
    world.wait_for(lambda: arrivals(pair) == 16)
    world.network.faults = CALM
    last = LastWrite(src_offset=500_000, dst_offset=500_000, length=64, digests_at=0)
    pair.writer.fabric.submit_last(transfer, last)
    pair.wait_done(transfer)
    reads = PageReads(pages=writes.dst, positions=writes.positions, layer_begin=0, layer_end=2, length=1024)
    pair.reader.fabric.submit_digest([reads], 8)
    world.settle()
    (ready,) = pair.reader.told(DigestsReady)
    assert [int(d) for d in ready.digests] == slow_digests(pair.reader.memory, [reads], 8)
    sent = pair.reader.memory[500_000:500_064].copy().view("<u8")
    return int((sent != ready.digests).sum())


def test_without_corruption_the_digests_agree() -> None:
    world, pair = calm_pair()
    assert digests_differ(world, pair, CALM) == 0


def test_a_flipped_bit_is_one_bit_of_each_write_and_changes_its_digest() -> None:
    world, pair = calm_pair()
    assert digests_differ(world, pair, replace(CALM, flip_bit=1.0)) == 8
    flipped = np.unpackbits(pair.reader.memory ^ pair.writer.memory)[: 8 * 65536].reshape(-1, 8 * 1024)
    assert flipped[:8].sum(axis=1).tolist() == [1] * 8


def test_swapped_pages_are_whole_pages_at_each_others_places() -> None:
    world, pair = calm_pair()
    assert digests_differ(world, pair, replace(CALM, swap_pages=1.0)) > 0
    here = {
        pair.writer.memory[at : at + 1024].tobytes() for base in (0, 65536) for at in range(base, base + 8192, 1024)
    }
    there = {
        pair.reader.memory[at : at + 1024].tobytes() for base in (0, 65536) for at in range(base, base + 8192, 1024)
    }
    assert here == there
    assert not landed(pair, end=8192)


def test_skipped_bytes_leave_what_was_there_though_the_imm_arrives() -> None:
    world, pair = calm_pair()
    assert digests_differ(world, pair, replace(CALM, skip_bytes=1.0)) == 8
    assert (pair.reader.memory[:8192] == 0xA5).all()


@pytest.mark.parametrize(
    ("field", "value"), [("lose_write", 1.5), ("reorder", 2), ("delay_s", (1.0, 0.5)), ("late_s", (-1.0, 0.5))]
)
def test_an_impossible_fault_is_refused(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        Faults(**{field: value})  # type: ignore[arg-type]


def test_messages_received_carry_only_their_bytes() -> None:
    world, pair = calm_pair()
    pair.writer.fabric.send(pair.to_reader, b"x")
    world.settle()
    assert pair.reader.events == [MessageReceived(message=b"x")]
