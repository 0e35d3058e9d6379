"""Medians, their spread, and how sure the median of ratios is. Pure."""

from collections.abc import Sequence

import numpy as np

from headrace.fabric.measure.records import Spread

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 1


def spread(values: Sequence[float]) -> Spread:
    """Of at least one: from the lowest to the highest."""
    return Spread(median=float(np.median(values)), low=min(values), high=max(values))


def median_ratio(values: Sequence[float], references: Sequence[float]) -> Spread:
    """Of pairs measured one after the other, value over reference, with the bootstrap interval (percentiles, 95 %) of
    the median: what is between pairs, a neighbour on the machine above all, falls out of each ratio."""
    ratios = np.array(values, dtype=np.float64) / np.array(references, dtype=np.float64)
    drawn = np.random.default_rng(SEED).integers(len(ratios), size=(NUM_RESAMPLES, len(ratios)))
    rest = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [rest, 100 - rest])
    return Spread(median=float(np.median(ratios)), low=float(low), high=float(high))
