"""One message after another on a stream: each behind its length, never longer than agreed, read by a deadline."""

import socket
import struct
import time

HEAD = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20


def write_frame(stream: socket.socket, body: bytes, *, timeout_s: float | None = None) -> None:
    """Raises OSError; TimeoutError is one."""
    stream.settimeout(timeout_s)
    stream.sendall(HEAD.pack(len(body)) + body)


def read_frame(stream: socket.socket, *, deadline: float | None = None) -> bytes | None:
    """Until `deadline` of the monotonic clock (None: for ever); None when the other side is gone. Raises OSError, and
    ValueError for a length that no message has."""
    head = read_bytes(stream, HEAD.size, deadline=deadline)
    if head is None:
        return None
    (length,) = HEAD.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes; {MAX_FRAME_BYTES} at most")
    return read_bytes(stream, length, deadline=deadline)


def read_bytes(stream: socket.socket, length: int, *, deadline: float | None = None) -> bytes | None:
    """All of them, or None when the other side is gone. Memory is taken as bytes come, not as they are announced."""
    parts = bytearray()
    while len(parts) < length:
        stream.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        part = stream.recv(min(length - len(parts), 1 << 16))
        if not part:
            return None
        parts += part
    return bytes(parts)
