"""Where the lead of an instance writes what its ranks compute next, and they what they drew.

Owns a mapping of a memfd, which every rank of the instance maps. Nothing here is locked: the lead writes a step only
when all ranks have answered the one before. Made large enough for any step of the instance, so that none is refused
later; only what steps really take becomes resident. Of each data-parallel group a batch, in words of 8 bytes:

    [lengths of the batch's arrays, and of its draws | array after array | draw after draw | room | number, tokens]
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from headrace.engine.requests import SamplingParams
from headrace.engine.step import Draw
from headrace.kvcache.layout import num_pages_for
from headrace.kvcache.mapping import HUGE_PAGE_BYTES, map_shared
from headrace.model.batch import Batch

_ARRAYS = tuple(field.name for field in fields(Batch))
_HEAD = len(_ARRAYS) + 1

_SAMPLING = {"temperature": "f8", "top_k": "i8", "top_p": "f8", "seed": "i8", "choice": "i8"}
_DRAW = np.dtype([*_SAMPLING.items(), ("position", "i8")])
_DRAW_WORDS = _DRAW.itemsize // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Of one step of one group."""

    num_rows: int
    num_tokens: int
    pages_per_row: int

    @classmethod
    def of(cls, *, chunk_tokens: int, max_running: int, max_model_len: int, page_size: int) -> "StepLimits":
        """A row decodes, or has a token of a chunk at least."""
        return cls(
            num_rows=max_running + chunk_tokens,
            num_tokens=max_running + chunk_tokens,
            pages_per_row=num_pages_for(max_model_len, page_size),
        )

    @property
    def num_words(self) -> int:
        of_tokens = 3 * self.num_tokens
        of_rows = 4 * self.num_rows + 2  # two of them begin with a 0
        return _HEAD + of_tokens + of_rows + self.num_rows * (self.pages_per_row + _DRAW_WORDS) + self.num_token_words

    @property
    def num_token_words(self) -> int:
        return 1 + self.num_rows


class StepMemory:
    """`fd` is taken over, None makes one; the other processes' are of the same limits and groups."""

    def __init__(self, limits: StepLimits, num_groups: int, fd: int | None = None) -> None:
        """Raises OSError when the system has no such memory."""
        self._limits = limits
        self.fd = os.memfd_create("headrace-steps", os.MFD_CLOEXEC) if fd is None else fd
        length = -(-8 * limits.num_words * num_groups // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            if fd is None:
                os.ftruncate(self.fd, length)
            words = map_shared(self.fd, length).view(np.int64)
        except OSError:
            os.close(self.fd)
            raise
        groups = words[: limits.num_words * num_groups].reshape(num_groups, limits.num_words)
        self._steps, self._tokens = np.split(groups, [-limits.num_token_words], axis=1)

    def write(self, group: int, batch: Batch, draws: Sequence[Draw]) -> None:
        words = self._steps[group]
        parts = [getattr(batch, name) for name in _ARRAYS] + [_as_words(draws)]
        at = _HEAD
        for place, part in enumerate(parts):
            words[place] = len(part)
            words[at : at + len(part)] = part  # raises where it does not fit
            at += len(part)

    def read(self, group: int) -> tuple[Batch, list[Draw]]:
        """The batch's arrays lie in the memory: they are those of this step until it is answered."""
        words = self._steps[group]
        ends = np.cumsum(words[:_HEAD]) + _HEAD
        parts = np.split(words[: ends[-1]], [_HEAD, *ends[:-1]])[1:]
        return Batch(**dict(zip(_ARRAYS, parts[:-1], strict=True))), _as_draws(parts[-1])

    def write_tokens(self, group: int, tokens: Sequence[int]) -> None:
        """What the group's first rank drew."""
        self._tokens[group, : 1 + len(tokens)] = [len(tokens), *tokens]

    def read_tokens(self, group: int) -> list[int]:
        number = int(self._tokens[group, 0])
        return [int(token) for token in self._tokens[group, 1 : 1 + number]]

    def close(self) -> None:
        """The mapping goes with the last array over it."""
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"StepMemory(groups={len(self._steps)}, {self._limits})"


def _as_words(draws: Sequence[Draw]) -> NDArray[np.int64]:
    rows = [(*(getattr(draw.sampling, name) for name in _SAMPLING), draw.position) for draw in draws]
    return np.array(rows, dtype=_DRAW).view(np.int64)


def _as_draws(words: NDArray[np.int64]) -> list[Draw]:
    draws = []
    for *sampling, position in words.view(_DRAW).tolist():
        params = dict(zip(_SAMPLING, sampling, strict=True))
        draws.append(Draw(sampling=SamplingParams(**params), position=position))
    return draws
