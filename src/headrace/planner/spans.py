"""Steps of one batch, one after the other, in closed form: an arithmetic series. Pure.

Every row reads one key more in each step, so a batch that stays the same takes `slope_s` longer in each than before:

    step i of a span takes first_s + i * slope_s, i = 0, 1, ..      its end: began_at + (i+1) first_s + i(i+1)/2 slope_s

A log holds an instance's spans. Since every row of it has a token in every step, the tokens of a request are the ends
of the steps [first, last) of a log, and nobody keeps them one by one.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.cost import StepSize
from headrace.planner.scenario import StepModel

Doubles = NDArray[np.float64]

ALIKE = 1e-12
"""Relative: steps so near to a line lie on it."""


@dataclass(frozen=True, slots=True)
class Span:
    """`num_steps` of them, from `began_at` on."""

    began_at: float
    first_s: float
    slope_s: float
    num_steps: int

    def end_of(self, num_steps: int) -> float:
        """When so many of them are over."""
        return self.began_at + num_steps * self.first_s + (num_steps * (num_steps - 1) / 2) * self.slope_s

    @property
    def ends_at(self) -> float:
        return self.end_of(self.num_steps)

    def num_begun(self, now: float) -> int:
        """By now, at the least the first: one that ends right now has not made place for the next."""
        return min(self.num_steps, 1 + bisect_left(range(1, self.num_steps + 1), now, key=self.end_of))

    def cut(self, num_steps: int) -> "Span":
        return Span(self.began_at, self.first_s, self.slope_s, num_steps)

    def ends(self) -> Doubles:
        """Of each step."""
        nth = np.arange(1, self.num_steps + 1, dtype=np.float64)
        return self.began_at + nth * self.first_s + (nth * (nth - 1) / 2) * self.slope_s


def plan_span(model: StepModel, size: StepSize, began_at: float, most: int) -> Span:
    """Steps of `size` and, one after the other, of a key more for each row: as many, up to `most`, as are in line."""
    first_s = model.step_s(size)
    while most > 2:
        last_s, middle = _after(model, size, most - 1), (most - 1) // 2
        slope_s = (last_s - first_s) / (most - 1)
        if abs(_after(model, size, middle) - first_s - middle * slope_s) <= ALIKE * last_s:
            return Span(began_at, first_s, slope_s, most)
        most = middle + 1
    slope_s = _after(model, size, 1) - first_s if most == 2 else 0.0
    return Span(began_at, first_s, slope_s, most)


def _after(model: StepModel, size: StepSize, num_steps: int) -> float:
    return model.step_s(StepSize(rows=size.rows, keys=size.keys + num_steps * size.rows))


class Log:
    """Of one instance."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.ended_at = 0.0  # the last step
        self._spans: list[Span] = []
        self._firsts: list[int] = []

    def add(self, span: Span) -> None:
        if span.num_steps:
            self._spans.append(span)
            self._firsts.append(self.num_steps)
            self.num_steps += span.num_steps
            self.ended_at = span.ends_at

    def ends(self, first: int, last: int) -> Doubles:
        """Of the steps [first, last)."""
        found = []
        nth = bisect_right(self._firsts, first) - 1
        while first < last:
            span, begin = self._spans[nth], self._firsts[nth]
            end = min(last, begin + span.num_steps)
            found.append(span.cut(end - begin).ends()[first - begin :])
            first, nth = end, nth + 1
        return np.concatenate(found) if found else np.empty(0)

    def slowest_s(self, first: int, last: int) -> float:
        """The longest time between two ends of the steps [first, last); nan of fewer than two."""
        gaps = np.diff(self.ends(first, last))
        return float(gaps.max()) if gaps.size else float("nan")
