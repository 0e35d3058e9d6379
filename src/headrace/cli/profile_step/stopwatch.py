"""Stopwatches around public calls of other rooms, for as long as a profile runs.

Owns nothing for longer than a `with`. The rooms know nothing of being watched, so what is measured is what runs: no
seam in them is there for the profile alone.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

Note = Callable[[int, int, Any], None]
"""Told (began_ns, ended_ns, what the call returned), by `time.monotonic_ns`, on the thread that called."""

_CACHE_BYTES = 8 << 20
"""More than a core has to itself."""


@contextmanager
def watched(owner: object, name: str, note: Note) -> Iterator[None]:
    """`owner` is a class or a module, `name` a function in it. A call that raises is not noted."""
    inner = getattr(owner, name)

    @wraps(inner)
    def call(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 (whatever the function takes and returns)
        began_ns = time.monotonic_ns()
        returned = inner(*arguments, **named)
        note(began_ns, time.monotonic_ns(), returned)
        return returned

    with replaced(owner, name, call):
        yield


@contextmanager
def replaced(owner: object, name: str, other: object) -> Iterator[None]:
    inner = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, inner)


def cost_ns(num_calls: int = 100) -> float:
    """What a watched call costs more than the call alone, with caches that others have used since the last one, as the
    kernels of a step do: some three times as much as in a loop that does nothing else."""

    class Watched:
        def nothing(self) -> None: ...

    swept = np.ones(_CACHE_BYTES, dtype=np.uint8)

    def cost() -> float:
        return statistics.median(_call_ns(Watched().nothing, swept) for _ in range(num_calls))

    alone_ns = cost()
    with watched(Watched, "nothing", lambda began_ns, ended_ns, returned: None):
        return max(0.0, cost() - alone_ns)


def _call_ns(call: Callable[[], None], swept: NDArray[np.uint8]) -> int:
    swept.max()
    began_ns = time.monotonic_ns()
    call()
    return time.monotonic_ns() - began_ns
