"""How long a step takes, told from what is in it. Pure: its coefficients are measured (`measured_cost`) or assumed.

A step reads the weights once. Every decode row adds its share of the products, its logits and its draw, every prompt
token of a chunk its products; rows and chunks read the keys of their request; and each token of a chunk is multiplied
with each key that it sees. So a step is a few numbers, and its time a sum over them:

    step_s + row_s * rows + token_s * chunk tokens + key_s * keys read + pair_s * (token, key) pairs of chunks
"""

from bisect import bisect_right
from dataclasses import astuple, dataclass, replace
from math import isfinite

from headrace.errors import InputError

CHUNK_MULTIPLE = 16
"""Kernels compute a chunk in blocks of so many tokens, or twice as many: a part of a block costs as much as all."""

FINEST_STEP_S = 1e-6
"""Shorter steps are taken for as long as this: a clock may stand still between two readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What is in a step. `keys` are counted once for each row or chunk that reads them, their own included, `pairs`
    once for each token of a chunk that sees them."""

    rows: int = 0
    chunk_tokens: int = 0
    keys: int = 0
    pairs: int = 0

    def with_row(self, num_keys: int) -> "StepSize":
        return replace(self, rows=self.rows + 1, keys=self.keys + num_keys)

    def with_chunk(self, begin: int, end: int) -> "StepSize":
        """Positions [begin, end) of one prompt: the token at position p sees p + 1 keys."""
        pairs = (end - begin) * (begin + end + 1) // 2
        return replace(
            self,
            chunk_tokens=self.chunk_tokens + end - begin,
            keys=self.keys + (end if end > begin else 0),
            pairs=self.pairs + pairs,
        )

    @property
    def features(self) -> tuple[int, int, int, int, int]:
        """One for each coefficient of StepCost, in its order."""
        return 1, self.rows, self.chunk_tokens, self.keys, self.pairs


def chunk_sizes(prompt_tokens: int, chunk_tokens: int) -> list[StepSize]:
    """Of the steps that compute a prompt alone, from its first token on."""
    begins = range(0, prompt_tokens, chunk_tokens)
    return [StepSize().with_chunk(begin, min(prompt_tokens, begin + chunk_tokens)) for begin in begins]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpeed:
    """A prompt of n tokens takes about step_s + n / rate. `rate`: tokens a second in whole chunks, 0 where no chunk is
    within bounds. `step_s`: what a step takes without it, which the shortest prompt has to wait for too.
    `chunk_tokens`: of such a step."""

    step_s: float
    rate: float
    chunk_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds; none is negative, so that more in a step never seems to take less time."""

    step_s: float
    row_s: float
    token_s: float
    key_s: float
    pair_s: float

    def __post_init__(self) -> None:
        for field in ("step_s", "row_s", "token_s", "key_s", "pair_s"):
            value = getattr(self, field)
            if not (isfinite(value) and value >= 0):
                raise InputError(field, f"must be a number of seconds, at least 0, is {value}")

    def predict(self, size: StepSize) -> float:
        """Seconds."""
        return (
            self.step_s
            + self.row_s * size.rows
            + self.token_s * size.chunk_tokens
            + self.key_s * size.keys
            + self.pair_s * size.pairs
        )

    def largest_chunk(self, beside: StepSize, *, begin: int, budget_s: float, most: int) -> int:
        """Tokens, a multiple of CHUNK_MULTIPLE up to `most`: of one prompt from position `begin` on, in a step of at
        most `budget_s` with what is in it already. 0 when nothing fits."""
        sizes = range(CHUNK_MULTIPLE, most + 1, CHUNK_MULTIPLE)
        num_fitting = bisect_right(sizes, budget_s, key=lambda n: self.predict(beside.with_chunk(begin, begin + n)))
        return num_fitting * CHUNK_MULTIPLE

    def prefill_speed(self, beside: StepSize, *, chunk_tokens: int, bound_s: float | None) -> PrefillSpeed:
        """Of one more prompt, in chunks computed with what is in each step already, if each step is to take at most
        `bound_s` (None: no bound)."""
        most = chunk_tokens
        if bound_s is not None and self.predict(beside.with_chunk(0, most)) > bound_s:
            most = self.largest_chunk(beside, begin=0, budget_s=bound_s, most=chunk_tokens)
        rate = most / max(self.predict(beside.with_chunk(0, most)), FINEST_STEP_S)
        return PrefillSpeed(step_s=self.predict(beside), rate=rate, chunk_tokens=most)

    @property
    def knows_chunks(self) -> bool:
        """Whether chunks were among the steps that it was measured from: nothing that is computed costs nothing."""
        return self.token_s > 0 or self.pair_s > 0

    def largest_batch(self, *, keys_each: int, budget_s: float, most: int) -> int:
        """Rows, up to `most`, of a step without chunks that takes at most `budget_s`. 0 when not even one fits."""
        rows = range(1, most + 1)
        return bisect_right(rows, budget_s, key=lambda n: self.predict(StepSize(rows=n, keys=n * keys_each)))

    def __str__(self) -> str:
        return " + ".join(f"{seconds * 1e6:.3g}" for seconds in astuple(self)) + " us (step, row, token, key, pair)"
