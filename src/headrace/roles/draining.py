"""How an instance leaves without losing a request: told so by a gateway, it takes nothing new and ends what it has.

Owned by the role's loop; knows no requests: the role says whether it is still needed. Its Goodbye and the end of its
process follow from the end of `wait`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headrace.protocol.control import Drain, Successor

LOOK_EVERY_S = 0.05
LEAST_S = 0.25
"""For what gateways had sent before they heard of it: it is refused, and goes elsewhere, sooner than by our absence."""


@dataclass(frozen=True, slots=True)
class Drained:
    """It is: for good, or to come back as something else."""

    successor: Successor | None


class Draining:
    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._successor: Successor | None = None
        self._is_over = False

    def begin(self, message: Drain) -> None:
        """Idempotent: the first word stands."""
        if not self._asked.is_set():
            self._successor = message.successor
            self._asked.set()

    @property
    def has_begun(self) -> bool:
        return self._asked.is_set()

    @property
    def over(self) -> Drained | None:
        """None until it is."""
        return Drained(self._successor) if self._is_over else None

    async def wait(self, is_needed: Callable[[], bool]) -> None:
        """Until it was told to drain, and is not needed any more."""
        await self._asked.wait()
        await asyncio.sleep(LEAST_S)
        while is_needed():
            await asyncio.sleep(LOOK_EVERY_S)
        self._is_over = True
