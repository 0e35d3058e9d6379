"""Ticket slots of a decoder: slot i is imm counter i, aux slot i, and the generation that tells its uses apart.

Owned by the decoder messenger's loop. A slot comes back only when its ticket is closed, with the next generation, so
that an imm which arrives late is surplus and a message about an older use is recognised. Generations start at random:
a restarted decoder does not repeat the imms of its predecessor.
"""

import random
from collections import deque

from headrace.errors import InputError
from headrace.fabric.interface import IMM_SLOT_BITS, Imm

MAX_SLOTS = 1 << IMM_SLOT_BITS
NUM_GENERATIONS = 1 << (32 - IMM_SLOT_BITS)


def slot_of(imm: int) -> int:
    return imm & (MAX_SLOTS - 1)


def generation_of(imm: int) -> int:
    return imm >> IMM_SLOT_BITS


def is_newer(generation: int, than: int) -> bool:
    """Serial-number order: newer by less than half of the circle."""
    return 0 < (generation - than) % NUM_GENERATIONS < NUM_GENERATIONS // 2


class TicketSlots:
    """Free slots in the order of their return, so that a slot rests as long as possible."""

    def __init__(self, num_slots: int, rng: random.Random) -> None:
        if not 1 <= num_slots <= MAX_SLOTS:
            raise InputError("num_slots", f"must be in 1..{MAX_SLOTS}, is {num_slots}")
        self._generations = [rng.randrange(NUM_GENERATIONS) for _ in range(num_slots)]
        self._free = deque(range(num_slots))
        self._taken: set[int] = set()

    def try_take(self) -> tuple[int, Imm] | None:
        """-> (slot, imm), or None when all are in use."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken.add(slot)
        return slot, Imm(self._generations[slot] << IMM_SLOT_BITS | slot)

    def give_back(self, slot: int) -> None:
        assert slot in self._taken, f"slot {slot} is not taken"
        self._taken.remove(slot)
        self._generations[slot] = (self._generations[slot] + 1) % NUM_GENERATIONS
        self._free.append(slot)

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def __repr__(self) -> str:
        return f"TicketSlots(taken={len(self._taken)}, free={len(self._free)})"
