"""One request as a decoder serves it: who asked, where its KV comes from, and when what happened. A plain record.

Owned by the decoder role's table, which alone changes it.
"""

import asyncio
from dataclasses import dataclass

from headrace.fabric.interface import Imm
from headrace.protocol.control import FinishReason, Generate, Waterfall
from headrace.roles.links import GatewayUuid

MAX_TICKETS = 3
"""Per request. After so many failed ones it is prefilled here, whatever the gateway offers."""


@dataclass(slots=True, kw_only=True)
class Served:
    """Times are of the loop's monotonic clock; None: it has not come to that."""

    gateway: GatewayUuid
    generate: Generate
    deadline: float
    deadline_timer: asyncio.TimerHandle
    imm: Imm | None = None  # of the open ticket
    prefiller: str = ""  # of that ticket
    num_tickets: int = 0
    is_parked: bool = False  # its ticket failed: it holds nothing until somebody says where it is prefilled
    patience_timer: asyncio.TimerHandle | None = None  # while it is: until it is prefilled here, unasked
    asked_at: float | None = None  # the ticket was opened
    landed_at: float | None = None  # its last byte was here
    started_at: float | None = None  # prefill began here instead
    first_step_at: float | None = None
    first_step_s: float = 0.0
    hit_len: int = 0  # h: what the prefix index had when its pages were taken
    cached_len: int = 0  # known with the first step
    failure: tuple[FinishReason, str] | None = None  # why it ends, where the engine does not know

    @property
    def request_id(self) -> str:
        return self.generate.request_id

    def unpark(self) -> None:
        """It has been decided where it is prefilled."""
        self.is_parked = False
        if self.patience_timer is not None:
            self.patience_timer.cancel()
            self.patience_timer = None

    def cancel_timers(self) -> None:
        self.deadline_timer.cancel()
        self.unpark()

    def waterfall(self) -> Waterfall:
        """What is not known is 0."""
        fetched = self.landed_at is not None and self.asked_at is not None
        if self.first_step_at is None:
            return Waterfall(fetch_s=_between(self.asked_at, self.landed_at))
        if not fetched:
            return Waterfall(
                local_prefill_s=_between(self.started_at, self.first_step_at), first_step_s=self.first_step_s
            )
        return Waterfall(
            fetch_s=_between(self.asked_at, self.landed_at),
            hand_over_s=_between(self.landed_at, self.first_step_at),
            first_step_s=self.first_step_s,
        )


def _between(begin: float | None, end: float | None) -> float:
    return 0.0 if begin is None or end is None else max(0.0, end - begin)
