"""Which token comes next, given the logits: DESIGN 5.7. Pure: the same logits, parameters and position, the same token.

    greedy     argmax(logits); of equal ones the lowest id
    otherwise  argmax(logits / T + Gumbel) over the tokens that the filters leave

which draws each token with its softmax probability. The noise of a token is a function of (seed, choice, position,
token id) alone, by a counter-based generator: nothing is consumed, so a request draws the same whatever else is in
the batch, however its prompt was chunked, and when it is resumed elsewhere. `position` is the absolute position that
the new token takes in the sequence, the prompt's first token being 0.

The filters, in this order, see the temperature-scaled distribution: the `top_k` most probable tokens, and of these the
fewest most probable ones whose mass, among them, reaches `top_p`. Of equally probable ones the lower id stays. Noise
and filters compute in float64, and on the CPU. Without filters most of the time goes into the random bits, 5 ns for
each token: logarithms are taken of the few alone that may win (`_contenders`).
"""

import numpy as np
from numpy.typing import NDArray

from headrace.engine.requests import SamplingParams
from headrace.errors import InputError

Logits = NDArray[np.float32]
_Scaled = NDArray[np.float64]
_Ids = NDArray[np.int64]
_Bits = NDArray[np.uint64]

_ONE = np.float64(1).view(np.uint64)
_FLOORS = (1e-2, 1e-4, 1e-6, -1.0)
"""Above which masses are looked at by top_p: further down where those above do not suffice. The last: all."""
_NEAR = 9.0
"""Below the highest logit / T. The noise is -3.604 at least, so a token further down wins only with more than 5.396."""
_RARE = np.uint64((1 - np.exp(-5.39)) * 2.0**64)
"""Random bits below it make less noise than 5.39: all but one in 220. (It is exp(-exp(-5.39)), and 1 - x < exp(-x).)"""
_BLOCK = 8192
"""Tokens whose random bits are made at a time: half a MB for all would come from memory and go there, beside a model
that leaves nothing in the caches."""


def sample(logits: Logits, params: SamplingParams, position: int) -> int:
    """The next token of `[V] fp32` logits, for this position of the sequence. Raises InputError when they are not
    numbers, or all -inf."""
    if params.temperature == 0:
        token = int(logits.argmax())
        _require_number(float(logits[token]))
        return token
    if params.top_k == 0 and params.top_p == 1:
        return _draw_unfiltered(logits, params, position)
    ids, scores = _perturbed(logits, params, position)
    return int(ids[scores.argmax()])


def top2_margin(logits: Logits, params: SamplingParams, position: int) -> float:
    """By how much the token that `sample` takes is ahead of the next one that the filters leave, in units of the
    logits (greedy: their difference; else temperature times the difference of the perturbed ones); inf for a single
    one. Logits that are off by less than half of it give the same token, unless they let others through the filters."""
    if params.temperature == 0:
        scores, unit = logits.astype(np.float64), 1.0
    else:
        (_, scores), unit = _perturbed(logits, params, position), params.temperature
    if len(scores) < 2:
        return float("inf")
    second, first = np.partition(scores, -2)[-2:]
    _require_number(float(first))
    return float(first - second) * unit


def surviving(logits: Logits, params: SamplingParams) -> NDArray[np.int64]:
    """The ids that the filters leave, ascending; the greedy choice alone at temperature 0."""
    if params.temperature == 0:
        return np.array([sample(logits, params, 0)])
    return _survivors(_scale(logits, params.temperature), params)


def _draw_unfiltered(logits: Logits, params: SamplingParams, position: int) -> int:
    """The same as of all that are `_perturbed`, in half of the time."""
    highest = logits.max()
    _require_number(float(highest))
    ids, bits = _contenders(logits, float(highest) - _NEAR * params.temperature, _random(params, position))
    scores = _gumbel(bits)
    scores += _below_highest(logits[ids], highest, params.temperature)
    return int(ids[scores.argmax()])


def _contenders(logits: Logits, near: float, random: np.random.Philox) -> tuple[_Ids, _Bits]:
    """Those above `near` or with rare noise, ascending, and their random bits: the highest of logits / T + Gumbel is
    among them."""
    edge = np.nextafter(np.float32(near), np.float32(-np.inf))  # below it, however it is rounded
    ids, kept = [], []
    for begin in range(0, len(logits), _BLOCK):
        block = logits[begin : begin + _BLOCK]
        bits = random.random_raw(len(block))
        contends = bits >= _RARE
        contends |= block > edge
        places = np.flatnonzero(contends)
        kept.append(bits[places])
        places += begin
        ids.append(places)
    return np.concatenate(ids), np.concatenate(kept)


def _perturbed(logits: Logits, params: SamplingParams, position: int) -> tuple[_Ids, _Scaled]:
    """The ids that the filters leave, ascending, and their logits / T + Gumbel, the highest logit being 0."""
    scaled = _scale(logits, params.temperature)
    bits = _random(params, position).random_raw(len(scaled))
    ids = _survivors(scaled, params)
    if len(ids) < len(scaled):
        scaled, bits = scaled[ids], bits[ids]
    scores = _gumbel(bits)
    scores += scaled
    return ids, scores


def _scale(logits: Logits, temperature: float) -> _Scaled:
    """`logits` / T with the highest at 0."""
    highest = logits.max()
    _require_number(float(highest))
    return _below_highest(logits, highest, temperature)


def _below_highest(logits: Logits, highest: np.float32, temperature: float) -> _Scaled:
    """(logits - highest) / T: a tiny temperature overflows to -inf, never to two infinite winners."""
    scaled = logits.astype(np.float64)
    scaled -= float(highest)
    with np.errstate(over="ignore"):
        scaled /= temperature
    return scaled


def _random(params: SamplingParams, position: int) -> np.random.Philox:
    """64 bits for each token id, in order. Philox (Salmon et al., 2011), its counter beginning at a place of its own
    for each position."""
    return np.random.Philox(key=params.seed + (params.choice << 64), counter=position << 64)


def _gumbel(bits: _Bits) -> _Scaled:
    """-log(-log(uniform)), in the place of the bits.

    Uniform in (0, 1): 52 bits and a half, so that neither 0 nor 1 comes and the noise is finite (-3.6 to 36.7)."""
    # As mantissas of numbers in [1, 2), a fourth of the time of a conversion; the subtraction is exact.
    bits >>= np.uint64(12)
    bits |= _ONE
    noise = bits.view(np.float64)
    noise -= 1 - 2.0**-53
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def _survivors(scaled: _Scaled, params: SamplingParams) -> _Ids:
    if 0 < params.top_k < len(scaled):
        ids = _top_k(scaled, params.top_k)
        if params.top_p < 1:
            ids = ids[_top_p(np.exp(scaled[ids]), params.top_p)]
    elif params.top_p < 1:
        ids = _top_p(np.exp(scaled), params.top_p)
    else:
        return np.arange(len(scaled))
    return np.sort(ids)


def _top_k(scaled: _Scaled, top_k: int) -> _Ids:
    """Ids of the highest, highest first; of equal ones the lower ids."""
    ids = np.flatnonzero(scaled > -_NEAR)  # mostly enough, and much quicker to part than all
    if len(ids) < top_k:
        ids = np.arange(len(scaled))
    lowest = np.partition(scaled[ids], -top_k)[-top_k]
    return _descending(scaled, ids[scaled[ids] >= lowest])[:top_k]


def _top_p(mass: _Scaled, top_p: float) -> _Ids:
    """Places of the fewest largest masses, of which the largest is 1, that reach `top_p` of the whole; of equal ones
    the first. Only as much is sorted as is needed, of a peaked distribution little: sorting 49,152 takes 7 ms."""
    target = top_p * float(mass.sum())
    for floor in _FLOORS:
        order = _descending(mass, np.flatnonzero(mass > floor))
        reached = mass[order].cumsum()
        if reached[-1] >= target:
            break
    return order[: int(np.searchsorted(reached, target)) + 1]


def _descending(scores: _Scaled, places: _Ids) -> _Ids:
    """`places`, which ascend, by their scores, highest first; of equal ones the first."""
    return places[np.argsort(-scores[places], kind="stable")]


def _require_number(highest: float) -> None:
    if not np.isfinite(highest):
        raise InputError("logits", f"must be numbers below infinity and not all -inf, the highest is {highest}")
