"""A message as a receiver without our structs would see it, and what is said when something in it is changed."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from headrace.errors import ProtocolFault

Decode = Callable[[bytes], object]


@dataclass(frozen=True)
class Leaf:
    """A value that holds no others. `path` is how msgspec names the place."""

    keys: tuple[str | int, ...]
    path: str
    value: Any

    def replaced(self, fields: dict[str, Any], value: object) -> dict[str, Any]:
        """`fields` with something else in this place."""
        changed = copy.deepcopy(fields)
        inner: Any = changed
        for key in self.keys[:-1]:
            inner = inner[key]
        inner[self.keys[-1]] = value
        return changed


def fields_of(wire: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(wire)
    return fields


def leaves(value: Any, keys: tuple[str | int, ...] = (), path: str = "$") -> Iterator[Leaf]:
    """Every place of a message but its kind, however deep."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "type":
                of_many = keys and keys[-1] in ("gauges", "counters")  # not of a struct: the key is no field
                yield from leaves(inner, (*keys, key), f"{path}[...]" if of_many else f"{path}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from leaves(inner, (*keys, i), f"{path}[{i}]")
    else:
        yield Leaf(keys, path, value)


def refusal_of(decode: Decode, fields: object) -> str:
    """What `decode` says against it."""
    with pytest.raises(ProtocolFault) as fault:
        decode(msgspec.msgpack.encode(fields))
    return str(fault.value)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
