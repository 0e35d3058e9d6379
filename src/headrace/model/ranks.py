"""What the ranks of one instance say to each other while they compute a step. Owns nothing.

Every rank makes the same calls in the same order; a call returns when its own part is done. Called on the model thread.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class Ranks(Protocol):
    """`rank` of `size`. A call raises RuntimeError when another rank is gone: nothing can be computed any more."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> None:
        """The sum of all ranks' `x`, in place, added up in order of rank: bit by bit the same on all of them, and of
        each element whatever stands beside it."""
        ...

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's `x`, all of one shape, by rank."""
        ...

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`parts[r]`, `[n_r, ..]`, goes to rank r -> what each rank had for this one, by rank; n may differ, be 0."""
        ...


class OneRank:
    """An instance that is alone."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(parts)
