"""Texts of the command line to values. Pure; each parser says what would be right and what it got.

Typer also passes defaults through a parser, so each takes what it returns.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from typer import BadParameter

from headrace.deploy.keys import DIGEST
from headrace.deploy.sizes import MOST_MS, UNITS, WANTED, parsed_size
from headrace.gateway.budgets import TIERS
from headrace.protocol.messages import MAX_NAME, MOST_REMAINING_S, Tier
from headrace.roles.options import Transport

MOST_CPU = 1023  # of what sched_setaffinity takes without ado

_CPUS = re.compile(r"([0-9]{1,4})(?: ?- ?([0-9]{1,4}))?")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


def size_in_bytes(value: object) -> int:
    """`512MiB`, `1.5 GB`, or bytes; at least 1."""
    num_bytes = parsed_size(str(value))
    if num_bytes is None:
        raise BadParameter(f"must be {WANTED}, is {str(value)!r}")
    return num_bytes


def in_units(num_bytes: int) -> str:
    """As size_in_bytes takes it, in the largest unit that it is a whole number of."""
    unit = max((unit for unit, factor in UNITS.items() if num_bytes % factor == 0), key=lambda unit: UNITS[unit])
    return f"{num_bytes // UNITS[unit]}{unit}"


def whole_number(*, least: int, most: int | None = None) -> Callable[[object], int]:
    wanted = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"

    def parse(value: object) -> int:
        text = str(value).strip()
        number = int(text) if _WHOLE.fullmatch(text) else None
        if number is None or number < least or (most is not None and number > most):
            raise BadParameter(f"must be {wanted}, is {text!r}")
        return number

    return parse


def seconds(value: object) -> float:
    """Above 0, and no longer than a deadline can travel."""
    return _duration(value, "seconds", most=MOST_REMAINING_S)


def milliseconds(value: object) -> float:
    """Above 0, and at most ten minutes."""
    return _duration(value, "milliseconds", most=MOST_MS)


def _duration(value: object, unit: str, *, most: float) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number <= most:
        raise BadParameter(f"must be a number of {unit}, at most {most:,.0f}, is {str(value)!r}")
    return number


def one_of(*choices: str) -> Callable[[object], str]:
    """Of at least two."""
    wanted = f"{', '.join(choices[:-1])} or {choices[-1]}"

    def parse(value: object) -> str:
        if value not in choices:
            raise BadParameter(f"must be {wanted}, is {str(value)!r}")
        return str(value)

    return parse


def plain_name(value: object) -> str:
    """What stands in log lines, metric labels and messages."""
    text = str(value)
    if not 0 < len(text) <= MAX_NAME or not text.isprintable() or " " in text:
        raise BadParameter(f"must be 1 to {MAX_NAME} visible characters without spaces, is {text!r}")
    return text


@dataclass(frozen=True, slots=True)
class CpuNumbers:
    """Not a plain tuple, which typer would take for an option of several words."""

    numbers: tuple[int, ...]


def cpu_list(value: object) -> CpuNumbers:
    """`0,2-5`, as taskset writes it: CPU numbers in the order given, none twice."""
    if isinstance(value, CpuNumbers):
        return value
    cpus: list[int] = []
    for part in str(value).split(","):
        match = _CPUS.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last > MOST_CPU:
            raise BadParameter(f"must be CPU numbers such as 0,2-5, is {str(value)!r}")
        cpus += range(first, last + 1)
    if len(set(cpus)) < len(cpus):
        raise BadParameter(f"must name each CPU once, is {str(value)!r}")
    return CpuNumbers(tuple(cpus))


@dataclass(frozen=True, slots=True)
class KeyTier:
    """Of requests with an API key of this sha256."""

    digest: str
    tier: Tier

    def __str__(self) -> str:
        return f"{self.digest}={self.tier}"


def key_tier(value: object) -> KeyTier:
    """`SHA256=TIER`."""
    digest, _, tier = str(value).partition("=")
    if not DIGEST.fullmatch(digest) or tier not in TIERS:
        wanted = f"the sha256 of a key in hex, = and {' or '.join(TIERS)}"
        raise BadParameter(f"must be {wanted}, is {str(value)[:100]!r}")
    return KeyTier(digest, tier)


@dataclass(frozen=True, slots=True)
class TransportNames:
    """Not a plain tuple: see CpuNumbers. None of them: `auto`."""

    names: tuple[Transport, ...]


def transport_list(value: object) -> TransportNames:
    """`auto`, or some of the transports."""
    if isinstance(value, TransportNames):
        return value
    words = [word.strip() for word in str(value).split(",")]
    if words == ["auto"]:
        return TransportNames(())
    known: dict[str, Transport] = {transport: transport for transport in get_args(Transport)}
    if not set(words) <= known.keys():
        raise BadParameter(f"must be auto or a list such as mapped,tcp of {', '.join(known)}, is {str(value)!r}")
    if len(set(words)) < len(words):
        raise BadParameter(f"must name each transport once, is {str(value)!r}")
    return TransportNames(tuple(known[word] for word in words))
