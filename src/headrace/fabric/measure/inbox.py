"""The events of one fabric for whoever waits for one of them: a thread that blocks, or a coroutine. What went wrong is
raised. Used by one thread at a time."""

import asyncio
import errno
import select
import time
from collections import deque
from collections.abc import Callable

from headrace.errors import FabricError
from headrace.fabric.interface import Event, Imm, MessageReceived, PeerLost, Reached, SendFailed, TransferDone
from headrace.fabric.native import NativeFabric

WAIT_S = 60.0


class Inbox:
    def __init__(self, fabric: NativeFabric) -> None:
        self._fabric = fabric
        self._ready = select.poll()
        self._ready.register(fabric.event_fd, select.POLLIN)
        self._kept: deque[Event] = deque(maxlen=64)  # more than the other side can cause: strangers may send messages

    def drain(self) -> list[Event]:
        events = self._fabric.drain_events()
        for event in events:
            _raise_failure(event)
        return [event for event in events if isinstance(event, Reached | MessageReceived)]

    def wait(self, wanted: Callable[[Event], bool]) -> Event:
        deadline = time.monotonic() + WAIT_S
        while True:
            for event in self._kept:
                if wanted(event):
                    self._kept.remove(event)
                    return event
            rest_ms = (deadline - time.monotonic()) * 1e3
            if rest_ms <= 0 or not self._ready.poll(rest_ms):
                raise silent()
            self._kept += self.drain()

    def wait_reached(self, imm: Imm) -> int:
        """-> when its counter reached the target, by the monotonic clock."""
        event = self.wait(lambda event: isinstance(event, Reached) and event.imm == imm)
        assert isinstance(event, Reached)
        return event.at_ns


class Arrivals:
    """When the counter of one imm reached its target, for a coroutine that waits for it."""

    def __init__(self, inbox: Inbox, imm: Imm) -> None:
        self._inbox = inbox
        self._imm = imm
        self._come: asyncio.Future[int] | None = None

    def expect(self) -> "asyncio.Future[int]":
        self._come = asyncio.get_running_loop().create_future()
        return self._come

    def on_events(self) -> None:
        try:
            events = self._inbox.drain()
        except FabricError as error:
            self.fail(error)
            return
        for event in events:
            if isinstance(event, Reached) and event.imm == self._imm and self._come is not None:
                self._come.set_result(event.at_ns)

    def fail(self, error: FabricError) -> None:
        if self._come is not None and not self._come.done():
            self._come.set_exception(error)


def silent() -> FabricError:
    return FabricError("measure", errno.ETIMEDOUT, f"the other side was silent for {WAIT_S:g} s")


def _raise_failure(event: Event) -> None:
    match event:
        case TransferDone(code=code, text=text) if code:
            raise FabricError("measure: transfer", code, text)
        case SendFailed(code=code, text=text):
            raise FabricError("measure: message", code, text)
        case PeerLost(code=code, text=text):
            raise FabricError("measure: other side", code, text)
