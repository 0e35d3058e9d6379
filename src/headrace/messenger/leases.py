"""Leases: how many prompt tokens a prefiller lets gateways queue up at it. Owned by the prefiller messenger's loop.

A lease is a credit for one prompt. What it still holds shrinks as its chunks are computed, and the next request is
granted when the rest fits, so that the prefiller always has the next step's work and seldom more:

    capacity      what may be outstanding: two steps' worth by default
    reserve       one chunk of it, kept for the interactive tier

A prompt longer than the capacity is granted when nothing else of its tier is outstanding: it must run some time. A
lease ends with its last chunk computed, with Refused, Failed, Cancel or its return, or after 2 s without a Prefill.
"""

from dataclasses import dataclass

from headrace.errors import InputError
from headrace.protocol.messages import Tier

UNUSED_LEASE_S = 2.0


@dataclass(slots=True)
class _Lease:
    request_id: str
    tier: Tier
    num_tokens: int  # not yet computed
    unused_until: float | None  # None once its Prefill came


class Leases:
    def __init__(self, *, capacity_tokens: int, reserve_tokens: int) -> None:
        if not 0 <= reserve_tokens < capacity_tokens:
            raise InputError(
                "reserve_tokens", f"must be in 0..{capacity_tokens - 1} (below the capacity), is {reserve_tokens}"
            )
        self._capacity = capacity_tokens
        self._reserve = reserve_tokens
        self._leases: dict[str, _Lease] = {}
        self._outstanding: dict[Tier, int] = {"interactive": 0, "flex": 0}
        self._num_granted = 0

    @property
    def outstanding_tokens(self) -> int:
        return self._outstanding["interactive"] + self._outstanding["flex"]

    def outstanding_of(self, tier: Tier) -> int:
        """Tokens."""
        return self._outstanding[tier]

    def try_grant(self, request_id: str, *, num_tokens: int, tier: Tier, now: float) -> str | None:
        """-> the lease, or None when the request must wait at its gateway. A repeated Reserve gets its old lease,
        unless that was used: then the request comes back for a new ticket, and no ticket is opened on a used lease."""
        for name, lease in self._leases.items():
            if lease.request_id == request_id and lease.unused_until is not None:
                return name
        if not self.fits(num_tokens, tier):
            return None
        self._num_granted += 1
        name = f"{self._num_granted}"
        self._leases[name] = _Lease(request_id, tier, num_tokens, now + UNUSED_LEASE_S)
        self._outstanding[tier] += num_tokens
        return name

    def fits(self, num_tokens: int, tier: Tier) -> bool:
        """Whether a lease of so many tokens would be granted now."""
        everything = self.outstanding_tokens
        if tier == "flex":
            return everything == 0 or everything + num_tokens <= self._capacity - self._reserve
        interactive = self.outstanding_of("interactive")
        return (
            everything + num_tokens <= self._capacity  # there is room for anybody
            or interactive + num_tokens <= self._reserve  # the reserve, which background prompts never use up
            or interactive == 0  # behind background work only: a long prompt of this tier must run some time
        )

    def use(self, lease: str, request_id: str, *, num_tokens: int) -> Tier | None:
        """The request's Prefill came, with num_tokens to compute -> its tier. None when the lease is unknown, ended,
        another's, used before, or smaller than that: more would be queued here than was granted."""
        if not self.is_unused(lease, request_id) or self._leases[lease].num_tokens < num_tokens:
            return None
        self._leases[lease].unused_until = None
        return self._leases[lease].tier

    def is_unused(self, lease: str, request_id: str) -> bool:
        """Whether it is this request's, and no Prefill came yet."""
        entry = self._leases.get(lease)
        return entry is not None and entry.request_id == request_id and entry.unused_until is not None

    def computed(self, lease: str, num_tokens: int) -> None:
        """A chunk of the prompt is done, or need not be computed; the last one ends the lease."""
        entry = self._leases.get(lease)
        if entry is None:
            return
        if num_tokens >= entry.num_tokens:
            self.end(lease)
            return
        entry.num_tokens -= num_tokens
        self._outstanding[entry.tier] -= num_tokens

    def end(self, lease: str) -> None:
        """Idempotent: refused, failed, cancelled, returned by the gateway."""
        entry = self._leases.pop(lease, None)
        if entry is not None:
            self._outstanding[entry.tier] -= entry.num_tokens

    def expire(self, now: float) -> None:
        """Drop leases that no Prefill used in time."""
        for name in [n for n, e in self._leases.items() if e.unused_until is not None and e.unused_until <= now]:
            self.end(name)

    def next_expiry(self) -> float | None:
        return min((e.unused_until for e in self._leases.values() if e.unused_until is not None), default=None)

    def __repr__(self) -> str:
        return f"Leases({len(self._leases)} open, {self.outstanding_tokens} of {self._capacity} tokens)"
