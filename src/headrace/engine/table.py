"""Who is in the engine, in which state: the request table, and the snapshots that are planned from.

Owns the entries, and the lent pages of requests that ended while they were fetched; changes neither states nor pages:
`Engine` does, on whose loop it lives.
"""

from collections.abc import Iterable
from itertools import chain

from headrace.engine.entries import HOLDING, Entry, State
from headrace.engine.holdings import Holdings
from headrace.engine.requests import EngineOptions
from headrace.engine.schedule import Entering, Snapshot


class RequestTable:
    def __init__(self, holdings: Holdings, options: EngineOptions) -> None:
        self._holdings = holdings
        self._options = options
        self._entries: dict[str, Entry] = {}
        self._lent: dict[str, tuple[int, ...]] = {}

    def add(self, entry: Entry) -> None:
        assert entry.request.request_id not in self, f"{entry.request.request_id!r} is here already"
        self._entries[entry.request.request_id] = entry

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.request.request_id]

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def require(self, request_id: str, state: State) -> Entry:
        """Which call fits which state is for the caller to know."""
        entry = self._entries.get(request_id)
        assert entry is not None and entry.state is state, f"{request_id!r} is not {state.value}: {entry}"
        return entry

    def keep_lent(self, request_id: str, pages: tuple[int, ...]) -> None:
        """The request has ended, its ticket has not."""
        self._lent[request_id] = pages

    def pop_lent(self, request_id: str) -> tuple[int, ...] | None:
        """The ticket of a request that has ended is over; None where there is none."""
        return self._lent.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries or request_id in self._lent

    # ---- by state ----------------------------------------------------------------------------------------------

    def of(self, *states: State) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.state in states]

    def num(self, *states: State) -> int:
        return sum(entry.state in states for entry in self._entries.values())

    def first_waiting(self) -> Entry | None:
        return min(self.of(State.WAITING), key=lambda entry: entry.rank, default=None)

    def snapshot(self, first_in_line: Entry | None = None) -> Snapshot[Entry]:
        samples = self._options.sample_from_prefill
        others = [entry for entry in self.of(*HOLDING) if entry.state is not State.DECODING]
        return Snapshot(
            decoding=[entry.as_decoding() for entry in self.of(State.DECODING)],
            prefilling=[entry.as_prefilling(samples=samples) for entry in self.of(State.PREFILLING)],
            other_tables=[self._holdings.own_pages(entry) for entry in others],
            other_keys=sum(len(entry.token_ids) for entry in others),
            first_in_line=None if first_in_line is None else self._entering(first_in_line),
            num_available=self._holdings.num_available,
            page_size=self._options.page_size,
        )

    def _entering(self, entry: Entry) -> Entering[Entry]:
        num_pages = self._holdings.num_missing(entry, self._own_pages())
        return Entering(key=entry, num_pages=num_pages, num_keys=len(entry.token_ids))

    # ---- state shows itself ------------------------------------------------------------------------------------

    def check(self, in_step: Iterable[Entry]) -> None:
        """Assert that states and pages agree, and that what the pool says is held is what is in the table."""
        running = set(in_step)
        for entry in self._entries.values():
            assert entry.in_step == (entry in running), f"{entry} and the running step disagree"
            assert bool(entry.pages) == (entry.state in HOLDING or entry.in_step), f"pages of {entry}"
            if entry.state is State.DECODING:
                assert entry.computed == entry.num_before_decode, f"{entry} decodes too early"
        lent = chain(*self._lent.values(), *(entry.pages for entry in self.of(State.FETCHING)))
        self._holdings.check(self._own_pages(), set(lent))

    def _own_pages(self) -> set[int]:
        return set(chain.from_iterable(self._holdings.own_pages(entry) for entry in self._entries.values()))

    def __repr__(self) -> str:
        states = [f"{state.value}={num}" for state in State if (num := self.num(state))]
        return ", ".join(states) or "empty"
