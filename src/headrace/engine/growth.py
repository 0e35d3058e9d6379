"""How long outputs usually get, by tier: what a new request reserves room for beyond its prompt (PROTOCOL, "Growth").

Owns the lengths of the last requests that ended; knows neither pages nor clocks. The engine's loop owns it.
"""

from collections import deque

from headrace.engine.requests import TIERS, Tier
from headrace.errors import InputError
from headrace.kvcache.reservation import growth_tokens

WINDOW = 256
"""Ended requests of a tier that count: enough for a steady p90, few enough to follow a change of traffic in minutes."""

FEWEST = 10
"""Below this a p90 by nearest rank is the maximum, or one accident."""


class OutputLengths:
    def __init__(self, window: int = WINDOW) -> None:
        if window < FEWEST:
            raise InputError("window", f"must be at least {FEWEST}, is {window}")
        self._lengths: dict[Tier, deque[int]] = {tier: deque(maxlen=window) for tier in TIERS}
        self._p90: dict[Tier, int | None] = dict.fromkeys(TIERS)

    def add(self, tier: Tier, num_tokens: int) -> None:
        """A request ended after `num_tokens` tokens, at least 1. One that was aborted counts: a stop string ends it so,
        and pages for those tokens it needed."""
        if num_tokens < 1:
            raise InputError("num_tokens", f"must be at least 1, is {num_tokens}")
        lengths = self._lengths[tier]
        lengths.append(num_tokens)
        if len(lengths) >= FEWEST:
            self._p90[tier] = sorted(lengths)[-(-9 * len(lengths) // 10) - 1]

    def p90(self, tier: Tier) -> int | None:
        """The length that nine in ten did not pass, by nearest rank; None before there is one."""
        return self._p90[tier]

    def growth(self, tier: Tier, max_tokens: int) -> int:
        """Tokens to reserve room for, for a request of which at most `max_tokens` are still to come."""
        return growth_tokens(max_tokens, self._p90[tier])

    def __repr__(self) -> str:
        return f"OutputLengths({', '.join(f'{tier}: p90={self._p90[tier]}' for tier in TIERS)})"
