"""One step as plain rows: what is computed, and what is drawn from it. Owns nothing, loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.cost import StepSize
from headrace.engine.requests import SamplingParams
from headrace.model.batch import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A token is drawn from the row's logits, for this absolute position of the sequence."""

    sampling: SamplingParams
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """`draw` None: only KV is computed. `row.wants_logits` says the same to the model."""

    row: Row
    draw: Draw | None

    def __post_init__(self) -> None:
        assert self.row.wants_logits == (self.draw is not None), "logits are asked for where a token is drawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`number` rises by one from step to step; `began_at` is the `now` that it was begun with."""

    number: int
    began_at: float
    rows: tuple[StepRow, ...]
    size: StepSize

    @property
    def num_draws(self) -> int:
        return sum(row.draw is not None for row in self.rows)


def draws_of(rows: Sequence[StepRow]) -> list[Draw]:
    """In order of rows."""
    return [row.draw for row in rows if row.draw is not None]
