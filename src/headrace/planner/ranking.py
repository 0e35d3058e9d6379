"""Which decoders `gateway.route` could choose, kept in order from one request to the next.

Few of a hundred decoders change between two requests, so each tier's are kept sorted, and only those that have changed,
or whose Status is due, are looked at again. Owns that order; knows nothing of prices but what is better.
"""

from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush

from headrace.engine.requests import Tier
from headrace.planner.clock import Clock
from headrace.planner.decoding import STATUS_S, Decoder, Stands

Kind = int
"""The same of instances that differ only in how they stand."""

Ranked = list[tuple[Stands, int]]
"""With their numbers."""


class Ranking:
    """For the requests of one tier. `changed` is to be told of every change, by a decoder's number."""

    def __init__(self, decoders: Sequence[Decoder], kinds: Sequence[Kind], tier: Tier, clock: Clock) -> None:
        self._decoders = decoders
        self._kinds = kinds
        self._tier = tier
        self._clock = clock
        self._ranked: dict[Kind, Ranked] = {kind: [] for kind in kinds}
        self._changed = set(range(len(decoders)))
        self._told: list[tuple[float, int]] = []  # when, a heap
        self._told_at: dict[int, float] = {}

    def changed(self, nth: int) -> None:
        self._changed.add(nth)

    def undominated(
        self, num_pages: int, *, full: Collection[int], num_missing: Callable[[Decoder], int] | None
    ) -> list[int]:
        """Of those that have so many pages and a row, but for the `full` ones: without those of which another is no
        worse in anything. `num_missing`: of this prompt, less its length; None: the same everywhere."""
        self._look_again()
        found = []
        for ranked in self._ranked.values():
            able = ranked
            if num_missing is not None:
                able = [
                    (stands._replace(num_missing=num_missing(self._decoders[nth])), nth)
                    for stands, nth in ranked
                    if -stands.num_full >= num_pages
                ]
                able.sort()
            if able:
                most = self._decoders[able[0][1]].spec.max_running
                found += _undominated(able, num_pages, most, full)
        return found

    def _look_again(self) -> None:
        now = self._clock.now
        while self._told and now - self._told[0][0] >= STATUS_S:
            self._changed.add(heappop(self._told)[1])
        if not self._changed:
            return
        changed, self._changed = self._changed, set()
        for kind, ranked in self._ranked.items():
            self._ranked[kind] = [one for one in ranked if one[1] not in changed]
        for nth in sorted(changed):
            decoder = self._decoders[nth]
            if not decoder.is_down:
                self._ranked[self._kinds[nth]].append((decoder.stands(self._tier), nth))
                if self._told_at.get(nth) != decoder.told.at:
                    self._told_at[nth] = decoder.told.at
                    heappush(self._told, (decoder.told.at, nth))
        self._changed -= changed  # a Status that was due is a change, and was seen
        for ranked in self._ranked.values():
            ranked.sort()


def _undominated(ranked: Ranked, num_pages: int, max_running: int, full: Collection[int]) -> list[int]:
    found: list[Stands] = []
    chosen = []
    for stands, nth in ranked:
        num_running, num_before, num_missing, slowness, step_s, num_full = stands
        if num_running >= max_running:
            break
        if -num_full < num_pages or nth in full:
            continue
        for other in found:  # each of them runs no more
            if (
                other.num_before <= num_before
                and other.num_missing <= num_missing
                and other.slowness <= slowness
                and other.step_s <= step_s
            ):
                break
        else:
            found.append(stands)
            chosen.append(nth)
    return chosen
