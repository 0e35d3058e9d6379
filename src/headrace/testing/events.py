"""What a loopback endpoint has told and nobody has drained yet, with the eventfd that says so.

Owns the events and the fd; it does not know what they mean. Runs on the thread that steps the network.
"""

import os

from headrace.fabric.interface import Event


class EventQueue:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._fd: int | None = None

    def __len__(self) -> int:
        return len(self._events)

    @property
    def fd(self) -> int:
        """An eventfd, made at the first look: most endpoints of a history are drained without one."""
        if self._fd is None:
            self._fd = os.eventfd(int(bool(self._events)), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._fd

    def tell(self, event: Event) -> None:
        if self._fd is not None and not self._events:
            os.eventfd_write(self._fd, 1)
        self._events.append(event)

    def drain(self) -> list[Event]:
        if not self._events:
            return []
        events, self._events = self._events, []
        if self._fd is not None:
            os.eventfd_read(self._fd)
        return events

    def close(self) -> None:
        """What was not drained never is."""
        self._events.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
