"""Conformance: every arrival is counted once and told as the counter's state demands, none is lost silently."""

import pytest
from fabric_world import Link

from headrace.errors import InputError
from headrace.fabric.interface import IMM_SLOT_BITS, Imm, Reached, Surplus

SLOTS = 1 << IMM_SLOT_BITS


def send_imms(pair: Link, imm: int, count: int) -> None:
    """`count` writes that carry `imm`, all of them completed at the writer."""
    transfer = pair.open(imm)
    for i in range(count):
        pair.writer.fabric.submit_write(transfer, src_offset=0, dst_offset=8 * i, length=8)
    pair.writer.fabric.submit_last(transfer)
    assert pair.wait_done(transfer).num_posted == count


def test_reached_is_told_once_at_the_expected_arrival(pair: Link) -> None:
    pair.arm(5, 3)
    send_imms(pair, 5, 2)
    pair.world.settle()
    assert pair.reader.reached(5) == []
    send_imms(pair, 5, 1)
    pair.wait_reached(5, 3)
    pair.world.settle()
    assert pair.reader.reached(5) == [3]
    assert pair.reader.surplus(5) == []


def test_reached_carries_the_time_of_the_last_arrival(pair: Link) -> None:
    pair.arm(5, 1)
    send_imms(pair, 5, 1)
    pair.wait_reached(5, 1)
    pair.arm(6, 1)
    send_imms(pair, 6, 1)
    pair.wait_reached(6, 1)
    first, second = pair.reader.told(Reached)
    assert 0 <= first.at_ns <= second.at_ns


def test_reached_after_a_retarget_carries_the_time_of_the_retarget(pair: Link) -> None:
    pair.arm(5, 1)
    send_imms(pair, 5, 1)
    pair.wait_reached(5, 1)
    pair.world.pause(200)
    pair.reader.fabric.retarget(Imm(5), 1)
    pair.world.wait_for(lambda: len(pair.reader.told(Reached)) == 2)
    first, second = pair.reader.told(Reached)
    assert first.at_ns < second.at_ns


def test_an_arrival_on_an_unarmed_imm_is_surplus(pair: Link) -> None:
    send_imms(pair, 77, 2)
    pair.wait_surplus(77, 2)
    assert pair.reader.surplus(77) == [Surplus(imm=Imm(77), arrivals=1, armed=False)] * 2
    pair.arm(77, 1)
    pair.world.settle()
    assert pair.reader.reached(77) == []


def test_arrivals_beyond_the_target_are_surplus_of_an_armed_counter(pair: Link) -> None:
    pair.arm(5, 2)
    send_imms(pair, 5, 4)
    pair.wait_surplus(5, 2)
    assert pair.reader.reached(5) == [2]
    assert [(told.arrivals, told.armed) for told in pair.reader.surplus(5)] == [(3, True), (4, True)]


def test_retarget_to_what_has_arrived_tells_at_once(pair: Link) -> None:
    pair.arm(5, 10)
    send_imms(pair, 5, 3)
    pair.world.wait_for(lambda: pair.reader.fabric.statistics().num_arrivals == 3)
    pair.world.settle()
    assert pair.reader.reached(5) == []
    pair.reader.fabric.retarget(Imm(5), 3)
    pair.wait_reached(5, 3)
    pair.world.settle()
    assert pair.reader.reached(5) == [3]


def test_retarget_to_more_tells_when_they_have_arrived(pair: Link) -> None:
    pair.arm(5, 10)
    send_imms(pair, 5, 2)
    pair.reader.fabric.retarget(Imm(5), 4)
    pair.world.settle()
    assert pair.reader.reached(5) == []
    send_imms(pair, 5, 2)
    pair.wait_reached(5, 4)


def test_retarget_to_nothing_tells_when_nothing_came(pair: Link) -> None:
    pair.arm(5, 10)
    pair.reader.fabric.retarget(Imm(5), 0)
    pair.wait_reached(5, 0)
    assert pair.reader.reached(5) == [0]


def test_retarget_below_what_has_arrived_is_surplus(pair: Link) -> None:
    pair.arm(5, 10)
    send_imms(pair, 5, 3)
    pair.world.wait_for(lambda: pair.reader.fabric.statistics().num_arrivals == 3)
    pair.world.settle()
    pair.reader.fabric.retarget(Imm(5), 2)
    pair.wait_surplus(5, 1)
    pair.world.settle()
    assert pair.reader.surplus(5) == [Surplus(imm=Imm(5), arrivals=3, armed=True)]
    assert pair.reader.reached(5) == []


def test_a_counter_that_was_reached_may_be_retargeted_and_tells_again(pair: Link) -> None:
    pair.arm(5, 1)
    send_imms(pair, 5, 1)
    pair.wait_reached(5, 1)
    pair.reader.fabric.retarget(Imm(5), 2)
    send_imms(pair, 5, 1)
    pair.wait_reached(5, 2)
    assert pair.reader.reached(5) == [1, 2]


def test_a_disarmed_counter_is_forgotten(pair: Link) -> None:
    pair.arm(5, 2)
    send_imms(pair, 5, 1)
    pair.world.settle()
    pair.reader.fabric.disarm(Imm(5))
    pair.reader.fabric.disarm(Imm(5))
    send_imms(pair, 5, 1)
    pair.wait_surplus(5, 1)
    assert pair.reader.surplus(5) == [Surplus(imm=Imm(5), arrivals=1, armed=False)]
    assert pair.reader.reached(5) == []
    assert pair.reader.fabric.statistics().num_counters_now == 0


def test_a_late_arrival_of_an_older_generation_does_not_move_the_slots_counter(pair: Link) -> None:
    older, newer = 1 * SLOTS + 9, 2 * SLOTS + 9
    pair.arm(older, 2)
    pair.reader.fabric.disarm(Imm(older))
    pair.arm(newer, 1)
    send_imms(pair, older, 1)
    pair.wait_surplus(older, 1)
    assert pair.reader.reached(newer) == []
    send_imms(pair, newer, 1)
    pair.wait_reached(newer, 1)
    pair.reader.fabric.disarm(Imm(older))  # must not touch the newer use of the slot
    send_imms(pair, newer, 1)
    pair.wait_surplus(newer, 1)
    assert pair.reader.surplus(newer)[0].armed


@pytest.mark.parametrize("imm", [0, 1, 4095, 4096, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_every_imm_of_32_bits_arrives_as_itself(pair: Link, imm: int) -> None:
    pair.arm(imm, 1)
    send_imms(pair, imm, 1)
    pair.wait_reached(imm, 1)
    assert pair.reader.told(Surplus) == []


def test_wrong_counter_arguments_are_refused(pair: Link) -> None:
    fabric = pair.reader.fabric
    fabric.arm(Imm(5), 1)
    with pytest.raises(InputError, match="imm"):
        fabric.arm(Imm(5), 1)
    with pytest.raises(InputError, match="imm"):
        fabric.arm(Imm(SLOTS + 5), 1)  # the slot is armed, with another generation
    with pytest.raises(InputError, match="expected"):
        fabric.arm(Imm(6), 0)
    with pytest.raises(InputError, match="imm"):
        fabric.retarget(Imm(6), 1)
    with pytest.raises(InputError, match="imm"):
        fabric.retarget(Imm(SLOTS + 5), 1)
    with pytest.raises(InputError, match="expected"):
        fabric.retarget(Imm(5), -1)
    with pytest.raises(InputError, match="imm"):
        fabric.arm(Imm(1 << 32), 1)
    with pytest.raises(InputError, match="imm"):
        pair.open(-1)
