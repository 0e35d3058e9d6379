"""The client's end of a session on another machine: the connection of its engine's side, and one for each bare loop."""

import secrets
import socket
from dataclasses import dataclass

from headrace.fabric.measure.greeting import SESSION_BYTES, Hello, Kind, enter


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where `headrace fabric serve` listens, and what it printed."""

    host: str
    port: int
    token: str


class Session:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._id = secrets.token_bytes(SESSION_BYTES)

    def open_engine(self) -> socket.socket:
        """Once, and first: the session ends with this connection, which is the caller's to close."""
        return self._enter(Kind.ENGINE)

    def open_loop(self) -> socket.socket:
        """For one bare loop, as long as the session lasts. The caller's to close."""
        return self._enter(Kind.LOOP)

    def _enter(self, kind: Kind) -> socket.socket:
        said = Hello(kind=kind, session=self._id)
        return enter(self._place.host, self._place.port, token=self._place.token, said=said)
