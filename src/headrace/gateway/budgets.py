"""The two latency budgets of a request, and where they come from: its key, its tier, its headers. Pure; no HTTP.

    tier       what the deployment fixed for its API key; else what its `service_tier` says
    budget     its tier's; each of the two may be overridden by a header

A key that nobody named has the tier that it asks for: who may ask at all is not decided here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from headrace.errors import InputError
from headrace.protocol.messages import Tier

TIERS: tuple[Tier, ...] = ("interactive", "flex")
"""The more urgent first."""

TTFT_HEADER = "x-headrace-ttft-ms"
TPOT_HEADER = "x-headrace-tpot-ms"
MOST_MS = 600_000

_NUMBER = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Seconds; None: no bound. TTFT counts from admission, TPOT is the mean of all tokens after the first."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_BUDGET = Budget()


def budget_of(ttft_ms: float | None, tpot_ms: float | None) -> Budget:
    """As people write it."""
    return Budget(
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which a request is served."""

    tier: Tier
    budget: Budget = NO_BUDGET


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What is promised here. `keys` are sha256 digests of API keys, in hex: the keys themselves are nowhere."""

    budgets: Mapping[Tier, Budget] = field(default_factory=dict)
    keys: Mapping[str, Tier] = field(default_factory=dict)

    def budget_of(self, tier: Tier) -> Budget:
        return self.budgets.get(tier, NO_BUDGET)

    def terms(self, headers: Mapping[str, str], asked: Tier) -> Terms:
        """Of a request with these headers, names in lower case. Raises InputError naming the header."""
        tier = self.tier_of_key(headers.get("authorization", "")) or asked
        budget = self.budget_of(tier)
        ttft_s, tpot_s = _seconds(headers, TTFT_HEADER), _seconds(headers, TPOT_HEADER)
        if ttft_s is not None or tpot_s is not None:
            budget = Budget(ttft_s=ttft_s or budget.ttft_s, tpot_s=tpot_s or budget.tpot_s)
        return Terms(tier=tier, budget=budget)

    def tier_of_key(self, authorization: str) -> Tier | None:
        """None where the deployment says nothing of the key, or there is none."""
        scheme, _, key = authorization.partition(" ")
        if not self.keys or scheme.lower() != "bearer":
            return None
        return self.keys.get(digest_of(key.strip()))


NO_TIERS = Tiers()


def digest_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    milliseconds = float(text) if _NUMBER.fullmatch(text.strip()) else 0.0
    if not 0 < milliseconds <= MOST_MS:
        raise InputError(name, f"must be a number of milliseconds, at most {MOST_MS:,}, is {text[:64]!r}")
    return milliseconds / 1e3
