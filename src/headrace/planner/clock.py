"""What happens next: acts by time, and of one time in the order in which they were set. Knows not what they do."""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import TypeVar

Given = TypeVar("Given")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_set = 0

    def at(self, when: float, act: Callable[[Given], None], given: Given) -> None:
        """Now, where that is past by a rounding error."""
        self._num_set += 1
        entry: tuple[float, int, Callable[[], None]] = (max(when, self.now), self._num_set, partial(act, given))
        heappush(self._heap, entry)

    def step(self) -> bool:
        """The next act. -> whether there was one."""
        if not self._heap:
            return False
        self.now, _, act = heappop(self._heap)
        act()
        return True
