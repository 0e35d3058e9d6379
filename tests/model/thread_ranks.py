"""Ranks of one instance as threads of the test: `Ranks` that hand each other tensors at a barrier."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch

from headrace.model.parallel import Parallel

T = TypeVar("T")


class Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=60)
        self.brought: list[Any] = [None] * size


class ThreadRanks:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = len(meeting.brought)
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> None:
        first, *others = self.all_gather(x)
        x.copy_(first)
        for other in others:
            x += other

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._exchanged(x.clone())

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert len(parts) == self.size
        return [brought[self.rank] for brought in self._exchanged([part.clone() for part in parts])]

    def _exchanged(self, mine: Any) -> list[Any]:
        self._meeting.brought[self.rank] = mine
        self._meeting.barrier.wait()
        brought = list(self._meeting.brought)
        self._meeting.barrier.wait()
        return brought


def in_ranks(act: Callable[[Parallel], T], *, dp: int = 1, tp: int = 1) -> list[T]:
    """What `act` came to on each rank. An error of one ends all, and is raised."""
    everyone, groups = Meeting(dp * tp), [Meeting(tp) for _ in range(dp)]

    def acted(rank: int) -> T:
        group = ThreadRanks(groups[rank // tp], rank % tp)
        try:
            return act(Parallel(group=group, everyone=ThreadRanks(everyone, rank)))
        except BaseException:
            for meeting in (everyone, *groups):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(dp * tp) as threads:
        futures = [threads.submit(acted, rank) for rank in range(dp * tp)]
    for error in filter(None, (future.exception() for future in futures)):
        if not isinstance(error, BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
