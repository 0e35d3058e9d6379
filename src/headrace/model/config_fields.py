"""Single fields of a config.json, read strictly: a value of the right kind, or InputError that names the field. Pure.

Knows no family: `shape` says which fields there are, and what they mean where they are absent.
"""

import math
from collections.abc import Mapping
from typing import Any

from headrace.errors import InputError

Config = Mapping[str, Any]


def require_known(config: Config, known_values: Mapping[str, tuple[object, ...]]) -> None:
    """Each of these fields is absent, null, or one of its values."""
    for field, known in known_values.items():
        if config.get(field) is not None and config[field] not in known:
            right = " or ".join(["absent", *(f"{value!r}" for value in known)])
            raise InputError(field, f"must be {right} in config.json, the only that is known, is {config[field]!r}")


def count(config: Config, field: str, *, least: int = 1) -> int:
    value = config.get(field)
    if type(value) is not int or value < least:
        raise InputError(field, f"must be a whole number of at least {least} in config.json, {said(value)}")
    return value


def positive(config: Config, field: str) -> float:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(field, f"must be a number above 0 in config.json, {said(value)}")
    return float(value)


def flag(config: Config, field: str) -> bool:
    """False where the configuration says nothing."""
    value = config.get(field)
    if value is not None and type(value) is not bool:
        raise InputError(field, f"must be true or false in config.json, is {value!r}")
    return bool(value)


def token_ids(config: Config, field: str, vocab_size: int) -> tuple[int, ...]:
    """One or a list of them; none where the configuration says nothing."""
    value = config.get(field)
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise InputError(field, f"must be in 0..{vocab_size - 1} in config.json, or a list of such, is {value!r}")
    return ids


def rope_theta(config: Config, top: str, ropes: Mapping[str, object], default: float) -> float:
    """The base of rotary angles: in `top`, or in one of `ropes`, the objects that may say it and by what they are
    called, sometimes in several: then they must agree."""
    found = {top: positive(config, top)} if config.get(top) is not None else {}
    for field, rope in rope_objects(ropes).items():
        if rope.get("rope_theta") is not None:
            found[f"{field}.rope_theta"] = positive(rope, "rope_theta")
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{field} {theta:g}" for field, theta in found.items())
        raise InputError(top, f"must be one number in config.json, is {listed}")
    for field, theta in found.items():
        if theta <= 1:  # no angle would be slower than another
            raise InputError(field, f"must be above 1 in config.json, is {theta:g}")
    return next(iter(found.values()), default)


def rope_objects(ropes: Mapping[str, object]) -> dict[str, Config]:
    """Those that are there."""
    found: dict[str, Config] = {}
    for field, rope in ropes.items():
        if rope is not None and not isinstance(rope, Mapping):
            raise InputError(field, f"must be an object in config.json, is {rope!r}")
        if rope is not None:
            found[field] = rope
    return found


def said(value: object) -> str:
    return "is missing" if value is None else f"is {value!r}"
