"""How rotary angles are scaled beyond the context that a model was trained for, as config.json says it. Pure.

Owns the ways that are known, and why others are refused: `rotary` computes with them, `shape` says which configuration
may have them. A way must turn a position the same however long the text becomes, for a page is computed once.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.errors import InputError
from headrace.model.config_fields import Config, count, flag, positive, rope_objects


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All angles are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """By how many times they go round in `original_len` tokens: angles with up to `low_turns` are divided by `factor`,
    those with `high_turns` and more stay, and between them it is a blend."""

    factor: float
    low_turns: float
    high_turns: float
    original_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """The same idea with a blend by dimension, between those that go round `slow_turns` and `fast_turns` times, whole
    dimensions where it is `truncated`; and cos and sin are multiplied by `attention_factor`. `scores_factor` multiplies
    products of queries and keys, also those of parts that do not turn."""

    factor: float
    slow_turns: float
    fast_turns: float
    original_len: int
    truncated: bool
    attention_factor: float
    scores_factor: float = 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def rope_scaling(
    config: Config, ropes: Mapping[str, object], *, known: tuple[str, ...], mscales: bool = False
) -> RopeScaling | None:
    """What these objects of `config` say, which must agree; `known` are the types that the family may have, `mscales`:
    its yarn may have DeepSeek's two factors."""
    ways = {**_WAYS, "yarn": _YARN_WITH_MSCALES} if mscales else _WAYS
    allowed = {kind: ways[kind] for kind in known}
    found = {field: _scaling(field, rope, config, allowed) for field, rope in rope_objects(ropes).items()}
    if len(set(found.values())) > 1:
        raise InputError("rope_scaling", f"must be the same in {' and '.join(found)} of config.json, differs")
    return next(iter(found.values()), None)


def _scaling(field: str, rope: Config, config: Config, known: Mapping[str, "_Way"]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in _BY_LENGTH:
        reason = "its angles change with the length of the text, and a page's keys are computed once"
        raise InputError(field, f"must have a rope_type of {', '.join(known)}, not {kind!r}: {reason}")
    if kind not in tuple(known):  # any value may stand there, a list too
        listed = " or ".join(f"{name!r}" for name in known)
        raise InputError(field, f"must have rope_type {listed}, the only known, is {rope!r}")
    way = known[kind]
    surplus = set(rope) - way.fields - {"rope_type", "type", "rope_theta"}
    if surplus:
        right = ", ".join(sorted(way.fields)) or "no factors"
        raise InputError(field, f"must have {right} with rope_type {kind!r}, has {', '.join(sorted(surplus))}")
    given = {name: value for name, value in rope.items() if value is not None}
    filled = {_LENGTH: config.get("max_position_embeddings"), **way.defaults, **given}
    return way.read({f"{field}.{name}": value for name, value in filled.items()}, field)


def _linear(rope: Config, at: str) -> LinearScaling:
    return LinearScaling(factor=positive(rope, f"{at}.factor"))


def _llama3(rope: Config, at: str) -> Llama3Scaling:
    low, high = positive(rope, f"{at}.low_freq_factor"), positive(rope, f"{at}.high_freq_factor")
    if low >= high:
        raise InputError(f"{at}.high_freq_factor", f"must be above low_freq_factor ({low:g}), is {high:g}")
    return Llama3Scaling(
        factor=positive(rope, f"{at}.factor"),
        low_turns=low,
        high_turns=high,
        original_len=count(rope, f"{at}.{_LENGTH}"),
    )


def _yarn(rope: Config, at: str) -> YarnScaling:
    factor, told = positive(rope, f"{at}.factor"), f"{at}.attention_factor"
    turned, all_dims = _mscales(rope, at, factor)
    return YarnScaling(
        factor=factor,
        slow_turns=positive(rope, f"{at}.beta_slow"),
        fast_turns=positive(rope, f"{at}.beta_fast"),
        original_len=count(rope, f"{at}.{_LENGTH}"),
        truncated=flag(rope, f"{at}.truncate"),
        attention_factor=positive(rope, told) if told in rope else turned / all_dims,
        scores_factor=all_dims**2,
    )


def _mscales(rope: Config, at: str, factor: float) -> tuple[float, float]:
    """What queries and keys, both of them, are multiplied by: their dimensions that turn, and all of theirs.
    Source: YaRN (arXiv 2309.00071), section 3.4; the two parts are DeepSeek-V2's (modeling_deepseek.py)."""
    names = (f"{at}.mscale", f"{at}.mscale_all_dim")
    if any(name in rope for name in names):  # where only one is, implementations differ
        turned, all_dims = (_mscale(factor, positive(rope, name)) for name in names)
        return turned, all_dims
    return _mscale(factor, 1.0), 1.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """`fields`: that it may have beside type and base; `defaults`: of those that may be absent; `read`: of all of them
    by their full names, and the name of the object."""

    fields: frozenset[str]
    defaults: Mapping[str, object]
    read: Callable[[Config, str], RopeScaling | None]


_LENGTH = "original_max_position_embeddings"
_YARN_DEFAULTS = {"beta_slow": 1, "beta_fast": 32, "truncate": True}

_WAYS: Mapping[str, _Way] = {
    "default": _Way(fields=frozenset(), defaults={}, read=lambda rope, at: None),
    "linear": _Way(fields=frozenset({"factor"}), defaults={}, read=_linear),
    "llama3": _Way(
        fields=frozenset({"factor", "low_freq_factor", "high_freq_factor", _LENGTH}), defaults={}, read=_llama3
    ),
    "yarn": _Way(
        fields=frozenset({"factor", "attention_factor", _LENGTH, *_YARN_DEFAULTS}), defaults=_YARN_DEFAULTS, read=_yarn
    ),
}

_YARN_WITH_MSCALES = replace(_WAYS["yarn"], fields=_WAYS["yarn"].fields | {"mscale", "mscale_all_dim"})

_BY_LENGTH = ("dynamic", "longrope", "su")

ROPE_TYPES = tuple(_WAYS)
