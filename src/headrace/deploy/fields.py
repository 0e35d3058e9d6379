"""The values of a TOML table, read strictly: each of the right kind and within its bounds, or InputError that names the
key with its path. Pure. Knows no keys: `file` does.

A reader asks for the keys that it knows, one by one; `finish` refuses what it was not asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.deploy.sizes import WANTED, parsed_size
from headrace.errors import InputError


class Fields:
    """Of one table. `path` is its own key, empty for the whole file."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._known: list[str] = []

    def table(self, key: str) -> "Fields":
        value = self._take(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "a table", value)
        return Fields(value, self.name(key))

    def optional_table(self, key: str) -> "Fields":
        """One that is missing is empty."""
        return self.table(key) if key in self._values else Fields(self._take(key) or {}, self.name(key))

    def tables(self) -> Iterator[tuple[str, "Fields"]]:
        """All that is here, each a table under a name that the file chose."""
        for key in self._values:
            yield key, self.table(key)

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(key, "a text", value)
        return value

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if key in self._values else self._take(key)

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self._take(key, default)
        if value not in choices:
            raise self._wrong(key, " or ".join(choices), value)
        return str(value)

    def choices(self, key: str, choices: Sequence[str]) -> tuple[str, ...]:
        """At least one of them, none twice."""
        value = self._take(key)
        if not isinstance(value, list) or not value or len(set(map(str, value))) < len(value):
            raise self._wrong(key, f"a list of some of {', '.join(choices)}", value)
        for each in value:
            if each not in choices:
                raise self._wrong(key, f"a list of some of {', '.join(choices)}", each)
        return tuple(value)

    def whole(self, key: str, *, most: int, least: int = 1, default: int | None = None) -> int:
        number = self.optional_whole(key, most=most, least=least, default=default)
        if number is None:
            raise self._wrong(key, f"a whole number from {least} to {most}", None)
        return number

    def optional_whole(self, key: str, *, most: int, least: int = 1, default: int | None = None) -> int | None:
        value = self._take(key, default)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self._wrong(key, f"a whole number from {least} to {most}", value)
        return value

    def number(self, key: str, *, most: float, default: float | None = None) -> float:
        """Above 0."""
        number = self.optional_number(key, most=most, default=default)
        if number is None:
            raise self._wrong(key, f"a number above 0, at most {most:,}", None)
        return number

    def optional_number(self, key: str, *, most: float, default: float | None = None) -> float | None:
        value = self._take(key, default)
        if value is not None and (type(value) not in (int, float) or not 0 < value <= most):
            raise self._wrong(key, f"a number above 0, at most {most:,}", value)
        return value if value is None else float(value)

    def size(self, key: str) -> int:
        """In bytes."""
        num_bytes = self.optional_size(key)
        if num_bytes is None:
            raise self._wrong(key, WANTED, None)
        return num_bytes

    def optional_size(self, key: str) -> int | None:
        value = self._take(key)
        if value is None:
            return None
        num_bytes = parsed_size(str(value)) if type(value) in (int, str) else None
        if num_bytes is None:
            raise self._wrong(key, WANTED, value)
        return num_bytes

    def finish(self) -> None:
        for key in self._values:
            if key not in self._known:
                raise InputError(self.name(key), f"must not be there, known are {', '.join(self._known)}")

    def name(self, key: str) -> str:
        """With its path."""
        return f"{self._path}.{key}" if self._path else key

    def _take(self, key: str, default: object = None) -> Any:  # noqa: ANN401 (any value of TOML)
        self._known.append(key)
        return self._values.get(key, default)

    def _wrong(self, key: str, right: str, value: object) -> InputError:
        return InputError(self.name(key), f"must be {right}, {'is missing' if value is None else f'is {value!r}'}")
