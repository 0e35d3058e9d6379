"""One line of a trace, and what a reader of them is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from headrace.bench.workload import Arrival
from headrace.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`place`: file and number. Of CSV its fields, of anything else its text."""

    place: str
    text: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    def word(self, name: str) -> str:
        """Raises InputError where it is not there."""
        value = self.fields.get(name)
        if not value:
            raise InputError(self.place, f"must have a {name}")
        return value

    def number(self, name: str) -> float:
        word = self.word(name)
        try:
            value = float(word)
        except ValueError:
            value = float("nan")
        if not isfinite(value):
            raise InputError(self.place, f"must have a number as {name}, has {word[:40]!r}")
        return value

    def count(self, name: str) -> int:
        value = self.number(name)
        if value < 0 or value != int(value):
            raise InputError(self.place, f"must have a number of tokens as {name}, has {value:g}")
        return int(value)


Read = Callable[[Iterator[Line], int, float], Iterator[Arrival | None]]
"""Lines, a seed, and seconds before which nothing is wanted -> arrivals since the first request of the file, in order;
None for a request that cannot be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """`columns`: of CSV, all of which its first line must name; None: the lines are JSON, and `begins_with` says of
    which. `notes`: for the report, of every file."""

    name: str
    read: Read
    columns: Sequence[str] | None = None
    begins_with: str = ""
    block_tokens: int = 512
    notes: Sequence[str] = ()

    def is_for(self, first_line: str) -> bool:
        if self.columns is None:
            return first_line.replace(" ", "").startswith(self.begins_with)
        return set(self.columns) <= set(first_line.lstrip("\ufeff").split(","))

    @property
    def first_line(self) -> str:
        return self.begins_with + ".." if self.columns is None else ",".join(self.columns)


def asked(at_s: float, prompt_tokens: int, max_tokens: int) -> Arrival | None:
    """None of one that has nothing to ask or to answer."""
    if prompt_tokens < 1 or max_tokens < 1:
        return None
    return Arrival(at_s=at_s, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
