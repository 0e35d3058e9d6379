"""Stopwatches around public calls of other rooms, for as long as a profile runs.

Owns nothing for longer than a `with`. The rooms know nothing of being watched, so what is measured is what runs: no
seam in them is there for the profile alone.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

Note = Callable[[int, int, Any], None]
"""Told (began_ns, ended_ns, what the call returned), by `time.monotonic_ns`, on the thread that called."""


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


def cost_ns(num_calls: int = 2000) -> float:
    """What one watched call costs more than the call alone."""

    class Watched:
        def nothing(self) -> None: ...

    def calls() -> int:
        one, began_ns = Watched(), time.monotonic_ns()
        for _ in range(num_calls):
            one.nothing()
        return time.monotonic_ns() - began_ns

    alone_ns = min(calls() for _ in range(3))
    with watched(Watched, "nothing", lambda began_ns, ended_ns, returned: None):
        watched_ns = min(calls() for _ in range(3))
    return max(0.0, (watched_ns - alone_ns) / num_calls)
