"""Ticket slots: an imm is never used twice in a circle of generations, and a slot rests as long as it can."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.messenger.slots import MAX_SLOTS, NUM_GENERATIONS, TicketSlots, generation_of, is_newer, slot_of

GENERATIONS = st.integers(0, NUM_GENERATIONS - 1)


class _FixedGeneration(random.Random):
    def __init__(self, generation: int) -> None:
        super().__init__(0)
        self.generation = generation

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return self.generation


def take(slots: TicketSlots) -> tuple[int, int]:
    taken = slots.try_take()
    assert taken is not None
    return taken


@given(st.integers(1, 5), st.integers(0, 2**32), st.lists(st.integers(0, 9), max_size=60))
@settings(max_examples=50)
def test_no_two_open_tickets_share_an_imm_and_none_comes_back_soon(num_slots: int, seed: int, moves: list[int]) -> None:
    slots, taken, used = TicketSlots(num_slots, random.Random(seed)), dict[int, int](), set[int]()
    for move in moves:
        if move >= 4 and taken:
            slot = sorted(taken)[move % len(taken)]
            del taken[slot]
            slots.give_back(slot)
        elif len(taken) == num_slots:
            assert slots.try_take() is None
        else:
            slot, imm = take(slots)
            assert slot not in taken
            assert (slot_of(imm), 0 <= imm < 2**32, imm in used) == (slot, True, False)
            taken[slot] = imm
            used.add(imm)
        assert slots.num_taken == len(taken)


def test_a_slot_comes_back_with_the_next_generation_and_after_all_others() -> None:
    slots = TicketSlots(3, random.Random(1))
    first = [take(slots) for _ in range(3)]
    assert slots.try_take() is None
    for slot, _ in (first[1], first[0], first[2]):
        slots.give_back(slot)
    again = [take(slots) for _ in range(3)]
    assert [slot for slot, _ in again] == [first[1][0], first[0][0], first[2][0]]
    before = dict(first)
    assert all(generation_of(imm) == (generation_of(before[slot]) + 1) % NUM_GENERATIONS for slot, imm in again)


def test_generations_wrap_and_the_wrapped_one_is_newer() -> None:
    slots = TicketSlots(1, _FixedGeneration(NUM_GENERATIONS - 1))
    slot, last = take(slots)
    slots.give_back(slot)
    _, wrapped = take(slots)
    assert (generation_of(last), generation_of(wrapped)) == (NUM_GENERATIONS - 1, 0)
    assert is_newer(generation_of(wrapped), than=generation_of(last))
    assert not is_newer(generation_of(last), than=generation_of(wrapped))


def test_a_restarted_decoder_begins_with_other_generations() -> None:
    def generations(seed: int) -> list[int]:
        slots = TicketSlots(8, random.Random(seed))
        return [generation_of(take(slots)[1]) for _ in range(8)]

    assert not set(generations(1)) & set(generations(2))


@given(GENERATIONS, st.integers(1, NUM_GENERATIONS // 2 - 1))
def test_newer_is_less_than_half_a_circle_ahead_and_never_both_ways(generation: int, ahead: int) -> None:
    newer = (generation + ahead) % NUM_GENERATIONS
    assert is_newer(newer, than=generation)
    assert not is_newer(generation, than=newer)
    assert not is_newer(generation, than=generation)


@pytest.mark.parametrize("num_slots", [-1, 0, MAX_SLOTS + 1])
def test_a_number_of_slots_that_no_imm_can_name_is_refused(num_slots: int) -> None:
    with pytest.raises(InputError) as refusal:
        TicketSlots(num_slots, random.Random(0))
    assert refusal.value.field == "num_slots"


def test_as_many_slots_as_an_imm_can_name_are_taken() -> None:
    slots = TicketSlots(MAX_SLOTS, random.Random(0))
    assert {slot_of(take(slots)[1]) for _ in range(MAX_SLOTS)} == set(range(MAX_SLOTS))
    assert slots.try_take() is None


def test_a_slot_that_is_not_taken_cannot_come_back() -> None:
    slots = TicketSlots(2, random.Random(0))
    with pytest.raises(AssertionError, match="slot 1 is not taken"):
        slots.give_back(1)
