"""Conformance: the layer counter gates programs, steps keep their order, failed and closed lists end where they say."""

import errno

import numpy as np
import pytest
from fabric_world import Link, carry, page_writes, poisoned

from headrace.errors import InputError
from headrace.fabric.interface import LAYERS_PER_STEP, Imm, LastWrite, PageWrites, TransferId

NUM_LAYERS = 4
PAGES = [3, 0, 5]
ALL_LAYERS = page_writes(PAGES, [1, 2, 4], layers=(0, NUM_LAYERS))


def arrivals(pair: Link) -> int:
    return pair.reader.fabric.statistics().num_arrivals


def after(pair: Link, num_arrivals: int) -> None:
    """Exactly `num_arrivals` come, and no more."""
    pair.world.wait_for(lambda: arrivals(pair) >= num_arrivals)
    pair.world.settle()
    assert arrivals(pair) == num_arrivals


def expect_layers(pair: Link, writes: PageWrites, num_layers: int) -> None:
    expected = poisoned(pair.reader)
    if num_layers:
        carry(expected, pair.writer.memory, page_writes(PAGES, [1, 2, 4], layers=(0, num_layers)))
    np.testing.assert_array_equal(pair.reader.memory, expected)


def start(pair: Link, *, step: int = 1, imm: int = 7) -> TransferId:
    pair.arm(imm, ALL_LAYERS.num_writes)
    transfer = pair.open(imm)
    pair.writer.fabric.submit_program(step, [(transfer, ALL_LAYERS)])
    return transfer


def test_a_layer_is_sent_only_after_the_counter_says_it_is_computed(pair: Link) -> None:
    transfer = start(pair)
    after(pair, 0)
    for done in range(1, NUM_LAYERS + 1):
        pair.writer.fabric.raise_layers(1 * LAYERS_PER_STEP + done)
        after(pair, done * len(PAGES))
        expect_layers(pair, ALL_LAYERS, done)
    assert pair.reader.reached(7) == [12]
    pair.writer.fabric.submit_last(transfer)
    assert pair.wait_done(transfer).complete


def test_several_layers_may_be_raised_at_once(pair: Link) -> None:
    start(pair)
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 3)
    after(pair, 9)
    expect_layers(pair, ALL_LAYERS, 3)


def test_a_counter_that_is_lower_than_before_changes_nothing(pair: Link) -> None:
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 2)
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 1)
    start(pair)
    after(pair, 6)


def test_a_counter_beyond_the_step_releases_all_its_layers(pair: Link) -> None:
    start(pair, step=1)
    pair.writer.fabric.raise_layers(2 * LAYERS_PER_STEP)
    after(pair, 12)


def test_a_program_behind_the_counter_is_sent_at_once(pair: Link) -> None:
    pair.writer.fabric.raise_layers(9 * LAYERS_PER_STEP)
    start(pair, step=3)
    after(pair, 12)


def test_layers_begin_where_the_writes_say(pair: Link) -> None:
    writes = page_writes([0], [0], layers=(2, 4))
    transfer = pair.open(7)
    pair.writer.fabric.submit_program(1, [(transfer, writes)])
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 2)
    after(pair, 0)
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 3)
    after(pair, 1)
    expected = poisoned(pair.reader)
    carry(expected, pair.writer.memory, page_writes([0], [0], layers=(2, 3)))
    np.testing.assert_array_equal(pair.reader.memory, expected)


def test_programs_of_several_steps_wait_in_order(pair: Link) -> None:
    transfer = pair.open(7)
    for step in (1, 2, 5):
        writes = page_writes([step], [step], layers=(0, 2))
        pair.writer.fabric.submit_program(step, [(transfer, writes)])
    pair.writer.fabric.raise_layers(1 * LAYERS_PER_STEP + 1)
    after(pair, 1)
    pair.writer.fabric.raise_layers(2 * LAYERS_PER_STEP + 1)  # the rest of step 1 and layer 0 of step 2
    after(pair, 3)
    pair.writer.fabric.raise_layers(3 * LAYERS_PER_STEP)
    after(pair, 4)
    pair.writer.fabric.raise_layers(5 * LAYERS_PER_STEP + 2)
    after(pair, 6)


def test_a_program_serves_several_transfers_layer_by_layer(pair: Link) -> None:
    first, second = pair.open(1), pair.open(2)
    pair.arm(1, 8)
    pair.arm(2, 8)
    pair.writer.fabric.submit_program(
        4,
        [
            (first, page_writes([0, 1], [0, 1], layers=(0, NUM_LAYERS))),
            (second, page_writes([2, 3], [2, 3], layers=(0, NUM_LAYERS))),
        ],
    )
    pair.writer.fabric.raise_layers(4 * LAYERS_PER_STEP + 1)
    after(pair, 4)
    np.testing.assert_array_equal(pair.reader.memory[:4096], pair.writer.memory[:4096])
    pair.writer.fabric.raise_layers(4 * LAYERS_PER_STEP + NUM_LAYERS)
    pair.wait_reached(1, 8)
    pair.wait_reached(2, 8)


def test_writes_without_a_program_do_not_wait_behind_one(pair: Link) -> None:
    start(pair)
    other = pair.open(8)
    pair.writer.fabric.submit_pages(other, page_writes([0], [20]))
    pair.writer.fabric.submit_last(other)
    assert pair.wait_done(other).num_posted == 1
    after(pair, 1)


def test_the_last_write_of_a_program_waits_for_its_layers(pair: Link) -> None:
    transfer = pair.open(7)
    pair.arm(7, 13)
    last = LastWrite(src_offset=500_000, dst_offset=600_000, length=64, digests_at=0)
    pair.writer.fabric.submit_program(1, [(transfer, ALL_LAYERS)], [(transfer, NUM_LAYERS, last)])
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + NUM_LAYERS - 1)
    after(pair, 9)
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + NUM_LAYERS)
    pair.wait_reached(7, 13)
    done = pair.wait_done(transfer)
    assert (done.num_posted, done.complete) == (13, True)


def test_a_last_write_alone_in_a_program_waits_for_the_number_of_layers(pair: Link) -> None:
    """A ticket whose pages were all cached sends nothing but its aux write, still after the step."""
    transfer = pair.open(7)
    last = LastWrite(src_offset=0, dst_offset=4096, length=16, digests_at=0)
    pair.writer.fabric.submit_program(6, [], [(transfer, NUM_LAYERS, last)])
    pair.writer.fabric.raise_layers(6 * LAYERS_PER_STEP + NUM_LAYERS - 1)
    after(pair, 0)
    pair.writer.fabric.raise_layers(6 * LAYERS_PER_STEP + NUM_LAYERS)
    assert pair.wait_done(transfer).num_posted == 1


def test_a_failed_step_says_how_much_was_posted_and_nothing_follows(pair: Link) -> None:
    transfer = start(pair)
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 2)
    after(pair, 6)
    assert pair.writer.fabric.fail_step(1) == {transfer: 6}
    pair.writer.fabric.raise_layers(2 * LAYERS_PER_STEP)
    done = pair.wait_done(transfer)
    assert (done.num_posted, done.num_failed, done.complete, done.code) == (6, 0, False, 0)
    after(pair, 6)
    expect_layers(pair, ALL_LAYERS, 2)


def test_a_step_that_fails_while_it_is_being_posted_says_exactly_what_arrives(pair: Link) -> None:
    transfer = start(pair)
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + NUM_LAYERS)
    num_posted = pair.writer.fabric.fail_step(1)[transfer]
    assert 0 <= num_posted <= 12
    assert pair.wait_done(transfer).num_posted == num_posted
    after(pair, num_posted)


def test_a_failed_step_leaves_the_other_transfers_alone(pair: Link) -> None:
    failed, kept = pair.open(1), pair.open(2)
    pair.arm(2, 2)
    pair.writer.fabric.submit_program(1, [(failed, page_writes([0], [0], layers=(0, 2)))])
    pair.writer.fabric.submit_program(2, [(kept, page_writes([1], [1], layers=(0, 2)))])
    assert pair.writer.fabric.fail_step(1) == {failed: 0}
    pair.writer.fabric.raise_layers(2 * LAYERS_PER_STEP + 2)
    pair.wait_reached(2, 2)
    after(pair, 2)


def test_a_failed_step_closes_the_whole_list_of_its_transfers(pair: Link) -> None:
    """Chunks of earlier and later steps that still wait are dropped with it."""
    transfer = pair.open(1)
    for step in (1, 2, 3):
        pair.writer.fabric.submit_program(step, [(transfer, page_writes([step], [step], layers=(0, 2)))])
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 1)
    after(pair, 1)
    assert pair.writer.fabric.fail_step(2) == {transfer: 1}
    pair.writer.fabric.raise_layers(4 * LAYERS_PER_STEP)
    after(pair, 1)


def test_a_step_may_fail_after_all_of_it_was_posted(pair: Link) -> None:
    transfer = start(pair)
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + NUM_LAYERS)
    after(pair, 12)
    assert pair.writer.fabric.fail_step(1) == {transfer: 12}
    done = pair.wait_done(transfer)
    assert (done.num_posted, done.complete) == (12, False)


def test_a_step_without_a_program_fails_without_a_word(pair: Link) -> None:
    assert pair.writer.fabric.fail_step(17) == {}


def test_steps_must_rise_and_layers_fit_in_a_step(pair: Link) -> None:
    transfer = start(pair, step=5)
    with pytest.raises(InputError, match="step"):
        pair.writer.fabric.submit_program(5, [(transfer, ALL_LAYERS)])
    with pytest.raises(InputError, match="step"):
        pair.writer.fabric.submit_program(4, [(transfer, ALL_LAYERS)])
    too_many = page_writes([0], [0], layers=(0, LAYERS_PER_STEP + 1), src=(0, 0, 1024), dst=(0, 0, 1024))
    with pytest.raises(InputError, match="layer"):
        pair.writer.fabric.submit_program(6, [(transfer, too_many)])
    pair.writer.fabric.submit_program(6, [(transfer, ALL_LAYERS)])  # what was refused took no step number


def test_a_refused_program_adds_none_of_its_writes(pair: Link) -> None:
    transfer = pair.open(7)
    with pytest.raises(InputError, match="transfer"):
        pair.writer.fabric.submit_program(1, [(transfer, ALL_LAYERS), (TransferId(9999), ALL_LAYERS)])
    pair.writer.fabric.raise_layers(2 * LAYERS_PER_STEP)
    pair.writer.fabric.submit_last(transfer)
    assert pair.wait_done(transfer).num_posted == 0
    after(pair, 0)


def test_close_transfer_drops_what_was_not_posted(pair: Link) -> None:
    transfer = start(pair)
    pair.writer.fabric.raise_layers(LAYERS_PER_STEP + 1)
    after(pair, 3)
    assert pair.writer.fabric.close_transfer(transfer) == 3
    pair.writer.fabric.raise_layers(2 * LAYERS_PER_STEP)
    done = pair.wait_done(transfer)
    assert (done.num_posted, done.num_failed, done.complete) == (3, 0, False)
    after(pair, 3)


def test_close_transfer_in_full_flight_says_exactly_what_arrives(pair: Link) -> None:
    transfer = pair.open(7)
    writes = page_writes(list(range(256)), list(range(256)), layers=(0, 4), src=(0, 0, 1024), dst=(0, 0, 1024))
    pair.writer.fabric.submit_pages(transfer, writes)
    pair.world.wait_for(lambda: arrivals(pair) >= 1)
    num_posted = pair.writer.fabric.close_transfer(transfer)
    assert 1 <= num_posted <= 1024
    assert pair.writer.fabric.close_transfer(transfer) == num_posted
    done = pair.wait_done(transfer)
    assert done.num_posted == num_posted
    after(pair, num_posted)
    with pytest.raises(InputError, match="transfer"):
        pair.writer.fabric.close_transfer(transfer)


def test_closing_an_ended_list_keeps_its_result(pair: Link) -> None:
    transfer = pair.open(7)
    pair.writer.fabric.submit_write(transfer, src_offset=0, dst_offset=0, length=8)
    pair.writer.fabric.submit_last(transfer)
    after_end = None
    pair.world.wait_for(lambda: arrivals(pair) == 1)
    if pair.writer.done(transfer) is None:  # its result may have been drained already
        after_end = pair.writer.fabric.close_transfer(transfer)
    done = pair.wait_done(transfer)
    assert (done.num_posted, done.complete) == (1, True)
    assert after_end in (None, 1)


def test_a_list_that_is_late_ends_with_what_was_posted_and_takes_nothing_more(pair: Link) -> None:
    late = pair.writer.fabric.open_transfer(pair.to_reader, Imm(7), deadline_s=0.3)
    pair.writer.fabric.submit_write(late, src_offset=0, dst_offset=0, length=4096)
    pair.writer.fabric.submit_program(1, [(late, page_writes([1], [1]))])
    in_time = pair.writer.fabric.open_transfer(pair.to_reader, Imm(8), deadline_s=3600.0)
    pair.writer.fabric.submit_write(in_time, src_offset=0, dst_offset=8192, length=4096)
    pair.world.wait_for(lambda: pair.reader.fabric.statistics().num_arrivals == 2)
    done = pair.wait_done(late)
    assert (done.num_posted, done.num_failed, done.complete) == (1, 0, False)
    assert (done.code, done.text) == (errno.ETIMEDOUT, "its deadline passed")
    with pytest.raises(InputError, match="transfer"):
        pair.writer.fabric.submit_last(late)
    pair.writer.fabric.raise_layers(2 * LAYERS_PER_STEP)
    pair.writer.fabric.submit_last(in_time)
    assert pair.wait_done(in_time).complete
    assert pair.reader.fabric.statistics().num_arrivals == 2


def test_a_deadline_in_the_past_is_refused(pair: Link) -> None:
    for deadline_s in (-0.1, float("nan")):
        with pytest.raises(InputError, match="deadline_s"):
            pair.writer.fabric.open_transfer(pair.to_reader, Imm(7), deadline_s=deadline_s)
