"""What steps cost on this machine, learned from the steps that it has run.

Owns the last steps of each kind, and how wrong it was about the last ones; knows no clock, requests or schedules. The
loop that commits the steps owns it. Decision 0008 says why it is made like this:

    a kind        steps of about the same size in every respect; the last few of each are kept, so that an hour of
                  nothing but decoding does not make it forget what a chunk costs
    a fit         every 32 steps: nonnegative least squares of relative errors; the newest steps count most, and one in
                  which the process did not run counts little: relative to what it took, its error is never above one
    the margin    what three in four of the last steps that are chosen to fill a budget took beyond their prediction
"""

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import product
from math import ceil

import numpy as np
from numpy.typing import NDArray

from headrace.engine.cost import FINEST_STEP_S, StepCost, StepSize
from headrace.errors import InputError

Doubles = NDArray[np.float64]
Kind = tuple[int, ...]

STEPS_PER_KIND = 12
MOST_KINDS = 96
FIRST_FIT, FIT_EVERY = 8, 32
"""In steps. A fit takes about a quarter of a millisecond."""
HALF_LIFE = 64
"""In steps, of the weight that a step has in a fit: a machine that has become slower is believed after seconds."""
OLD_STEPS = 4.0
"""So many of the newest all steps together count at least, however old: they alone know of kinds that come no more."""
ERROR_WINDOW = 256
MARGIN_WINDOW = 32
"""Short: the margin is what notices first that the machine has become slower."""
FEWEST = 10
"""Below this a p90 by nearest rank is the maximum, or one accident."""
MARGIN_SHARE = 0.75
"""Of steps that are to be in time. With a p90 the spikes of a busy machine, which no smaller chunk prevents, cut all
chunks to the least: 16 tokens where 48 fit."""
MOST_MARGIN = 2.0

_NUM_FEATURES = len(StepSize().features)
_SUBSETS: Doubles = np.array(list(product((0.0, 1.0), repeat=_NUM_FEATURES)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostStatistics:
    """Relative errors of the last predictions, each made before its step ran; None before there are some. Long steps
    took longer than they were to: planned so (for their rows alone, or beside the least chunk), or unforeseen."""

    error_p50: float | None
    error_p90: float | None
    num_long_planned: int
    num_long_unforeseen: int


@dataclass(slots=True)
class _Seen:
    """Of one kind: where its steps are kept, and how many there were."""

    first: int
    num_steps: int = 0


@dataclass(slots=True)
class _Kept:
    """All steps that are kept, a row each; `at` is the number of the step, 0 where there is none."""

    features: Doubles = field(default_factory=lambda: np.zeros((MOST_KINDS * STEPS_PER_KIND, _NUM_FEATURES)))
    seconds: Doubles = field(default_factory=lambda: np.ones(MOST_KINDS * STEPS_PER_KIND))
    at: Doubles = field(default_factory=lambda: np.zeros(MOST_KINDS * STEPS_PER_KIND))


class MeasuredCost:
    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, _Seen] = OrderedDict()  # the one seen longest ago first
        self._kept = _Kept()
        self._num_steps = 0
        self._cost: StepCost | None = None
        self._margin = 1.0
        self._errors: deque[float] = deque(maxlen=ERROR_WINDOW)
        self._mixed: deque[tuple[StepSize, float]] = deque(maxlen=MARGIN_WINDOW)  # with rows and chunks
        self._num_long_planned = 0
        self._num_long_unforeseen = 0

    @property
    def cost(self) -> StepCost | None:
        """As of the last fit; None before the first."""
        return self._cost

    @property
    def margin(self) -> float:
        """At least 1: three in four of the last steps with rows and chunks took at most their prediction times this."""
        return self._margin

    def observe(self, size: StepSize, seconds: float, bound_s: float | None = None) -> None:
        """A step is over that was to take at most `bound_s`; None: it had no bound."""
        if self._cost is not None:
            self._errors.append(abs(self._cost.predict(size) / max(seconds, FINEST_STEP_S) - 1))
        if size.rows and size.chunk_tokens:
            self._mixed.append((size, seconds))
            self._margin = self._overrun()
        if bound_s is not None and seconds > bound_s:
            if self._cost is not None and self._cost.predict(size) > bound_s:
                self._num_long_planned += 1
            else:
                self._num_long_unforeseen += 1
        self.learn(size, seconds)

    def learn(self, size: StepSize, seconds: float) -> None:
        """A step took so long that nobody had planned: it says nothing of how good the plans are."""
        if not 0 <= seconds < float("inf"):
            raise InputError("seconds", f"must be at least 0, is {seconds}")
        self._num_steps += 1
        seen = self._seen(tuple(number.bit_length() for number in (size.rows, size.chunk_tokens, size.keys)))
        row = seen.first + seen.num_steps % STEPS_PER_KIND
        seen.num_steps += 1
        self._kept.features[row] = size.features
        self._kept.seconds[row] = max(seconds, FINEST_STEP_S)
        self._kept.at[row] = self._num_steps
        if self._num_steps == FIRST_FIT or self._num_steps % FIT_EVERY == 0:
            self.fit()

    def fit(self) -> None:
        """To what was learned, from at least one step; `learn` calls it now and then."""
        assert self._num_steps, "nothing was learned"
        kept = self._kept
        is_kept = kept.at > 0
        rows = kept.features[is_kept] / kept.seconds[is_kept, None]  # times the coefficients: 1, if they are right
        ages = self._num_steps - kept.at[is_kept]
        by_age = np.exp2(-ages / HALF_LIFE) + OLD_STEPS / len(ages)
        weighted = rows.T * by_age
        coefficients = nonnegative(weighted @ rows, weighted.sum(axis=1))
        step_s, row_s, token_s, key_s, pair_s = coefficients.tolist()
        self._cost = StepCost(step_s=step_s, row_s=row_s, token_s=token_s, key_s=key_s, pair_s=pair_s)
        self._margin = self._overrun()

    def _overrun(self) -> float:
        """How many times its prediction of now MARGIN_SHARE of the last steps with rows and chunks took at most."""
        if self._cost is None:
            return 1.0
        overruns = [seconds / max(self._cost.predict(size), FINEST_STEP_S) for size, seconds in self._mixed]
        return min(MOST_MARGIN, max(1.0, _quantile(overruns, MARGIN_SHARE) or 1.0))

    def _seen(self, kind: Kind) -> _Seen:
        seen = self._kinds.get(kind)
        if seen is None:
            if len(self._kinds) < MOST_KINDS:
                first = len(self._kinds) * STEPS_PER_KIND
            else:
                _, forgotten = self._kinds.popitem(last=False)
                first = forgotten.first
                self._kept.at[first : first + STEPS_PER_KIND] = 0
            seen = self._kinds[kind] = _Seen(first)
        self._kinds.move_to_end(kind)
        return seen

    # ---- state shows itself ------------------------------------------------------------------------------------

    def statistics(self) -> CostStatistics:
        return CostStatistics(
            error_p50=_quantile(self._errors, 0.5),
            error_p90=_quantile(self._errors, 0.9),
            num_long_planned=self._num_long_planned,
            num_long_unforeseen=self._num_long_unforeseen,
        )

    def __repr__(self) -> str:
        return f"MeasuredCost({self._cost}, {self._num_steps} steps of {len(self._kinds)} kinds)"


def nonnegative(products: Doubles, sums: Doubles) -> Doubles:
    """The nonnegative c that minimises c' products c - 2 c' sums. It solves the plain equations of those features of
    which it uses any: five features have but 32 subsets, and all are solved in one call."""
    scale = np.sqrt(np.diag(products))
    scale[scale == 0] = 1.0
    # Features that always come together leave the equations singular: the ridge then shares between them.
    identity = np.eye(len(scale))
    left = products / np.outer(scale, scale) + 1e-9 * identity
    right = sums / scale
    among = _SUBSETS[:, :, None] * _SUBSETS[:, None, :]
    solved = np.linalg.solve(left * among + identity * (1 - _SUBSETS)[:, :, None], (_SUBSETS * right)[:, :, None])
    candidates = solved[:, :, 0]
    losses = np.einsum("si,ij,sj->s", candidates, left, candidates) - 2 * candidates @ right
    losses[(candidates < 0).any(axis=1)] = np.inf
    return np.asarray(candidates[np.argmin(losses)] / scale, dtype=np.float64)


def _quantile(values: Collection[float], share: float) -> float | None:
    """By nearest rank; None for too few."""
    if len(values) < FEWEST:
        return None
    return sorted(values)[ceil(share * len(values)) - 1]
