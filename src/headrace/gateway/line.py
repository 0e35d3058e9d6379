"""The requests that wait for a lease and for pages: a tier's by the deadline of their first token. Owned by the
gateway's loop.

Only the head of each tier tries, so that a full fleet is asked by two requests at a time, and nobody overtakes a large
one in his own tier, but for a request that is due earlier. Those without a deadline come after all others, by arrival.
Interactive requests go before flex ones: while their head lacks room at the decoders, or is to have its first token in
time and lacks a lease, the flex head does not take what becomes free. A request that is resumed stands in front.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headrace.gateway.budgets import TIERS
from headrace.gateway.forecast import Ahead
from headrace.protocol.messages import Tier


@dataclass(order=True, slots=True)
class Turn:
    """One request's place. `due`: when its first token is, of the gateway's clock; -inf of one that is resumed. `wake`
    is called when it may try, or should try again. `lacks_room` is its own to set: background work is not to go first.
    `num_tokens` of its prompt are to be computed."""

    due: float
    arrival: int
    tier: Tier = field(compare=False)
    wake: Callable[[], None] = field(compare=False)
    num_tokens: int = field(default=0, compare=False)
    lacks_room: bool = field(default=False, compare=False)


class Line:
    def __init__(self) -> None:
        self._waiting: dict[Tier, list[Turn]] = {tier: [] for tier in TIERS}

    @contextmanager
    def standing(self, turn: Turn) -> Iterator[None]:
        """In line inside; however it leaves, the next one is woken."""
        waiting = self._waiting[turn.tier]
        turn.lacks_room = False
        insort(waiting, turn)
        try:
            yield
        finally:
            waiting.remove(turn)
            self.wake_heads()

    def may_try(self, turn: Turn) -> bool:
        if self._waiting[turn.tier][0] is not turn:
            return False
        return turn.tier == "interactive" or not self._lacks_room("interactive")

    def ahead_of(self, turn: Turn) -> Ahead:
        """Also of one that does not stand in line yet. Background work is ahead of nobody interactive."""
        before = [other for other in self._waiting[turn.tier] if other < turn]
        if turn.tier == "flex":
            before += self._waiting["interactive"]
        return Ahead(num_requests=len(before), num_tokens=sum(other.num_tokens for other in before))

    def wake_heads(self) -> None:
        """Something has changed that lets them try again."""
        for waiting in self._waiting.values():
            if waiting:
                waiting[0].wake()

    def _lacks_room(self, tier: Tier) -> bool:
        return any(turn.lacks_room for turn in self._waiting[tier][:1])

    def num_waiting(self, tier: Tier) -> int:
        return len(self._waiting[tier])

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    def __repr__(self) -> str:
        return f"Line({', '.join(f'{tier}={len(waiting)}' for tier, waiting in self._waiting.items())})"
