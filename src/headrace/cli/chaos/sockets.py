"""The TCP connections of another process of this user, taken hold of from outside: cut, darkened, slowed, robbed.

Owns duplicates of descriptors (`pidfd_getfd`), which are closed when it is; what was set on a socket is taken back
first. Nothing of the system is changed but those sockets, so no privilege is needed beyond that of a debugger, and
nobody else on the machine notices.

    cut      both ends hear that the connection is over
    dark     a filter drops every segment that comes in, and TCP sends them again until it is taken off
    slow     the kernel paces what goes out
    rob      while its process is stopped, one whole write is taken out of what has come in: nobody hears of it
"""

import contextlib
import ctypes
import os
import re
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

SYS_PIDFD_GETFD = 438  # the same on every architecture
SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_MAX_PACING_RATE = 26, 27, 47
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0: keep nothing
UNPACED = struct.pack("I", 0xFFFFFFFF)
ESTABLISHED = 1

FRAME_HEAD = struct.Struct("<BBHBBBxQ")
FRAME_VERSION, OP_WRITE = 3, 4
"""How libfabric's tcp provider frames what it sends: version, operation, flags, .., size of its head, size of all."""

MAX_RECEIVE, MOST_WRITE = 1 << 16, 64 << 20
REST_WITHIN_S = 0.5

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_libc = ctypes.CDLL(None, use_errno=True)


def descriptors(pid: int) -> dict[int, str]:
    """What each of its descriptors leads to."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found[int(entry.name)] = os.readlink(entry.path)
    return found


def duplicate(pid: int, fd: int) -> int:
    """-> a descriptor of ours for what that one leads to. Raises OSError."""
    pidfd = os.pidfd_open(pid)
    try:
        taken = int(_libc.syscall(SYS_PIDFD_GETFD, pidfd, fd, 0))
        if taken < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"pidfd_getfd: {os.strerror(number)}")
        return taken
    finally:
        os.close(pidfd)


@contextmanager
def connections_between(here: int, there: int) -> Iterator[list[socket.socket]]:
    """The ends that the process `here` has of its TCP connections to the process `there`."""
    with ExitStack() as exits:
        theirs = {local for local, _ in (_addresses(one) for one in _connections(there, exits))}
        ends = [one for one in _connections(here, exits) if _addresses(one)[1] in theirs]
        yield ends


def _connections(pid: int, exits: ExitStack) -> Iterable[socket.socket]:
    found = []
    for fd, target in descriptors(pid).items():
        if _SOCKET.fullmatch(target):
            with contextlib.suppress(OSError):
                one = exits.enter_context(socket.socket(fileno=duplicate(pid, fd)))
                if one.family in (socket.AF_INET, socket.AF_INET6) and _is_established(one):
                    found.append(one)
    return found


def _is_established(one: socket.socket) -> bool:
    return one.type == socket.SOCK_STREAM and one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED


def _addresses(one: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    """-> (its own, its peer's)."""
    try:
        own, peer = one.getsockname(), one.getpeername()
    except OSError:
        return ("", 0), ("", 0)
    return (own[0], own[1]), (peer[0], peer[1])


def cut(ends: Iterable[socket.socket]) -> int:
    """-> how many."""
    number = 0
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
            number += 1
    return number


@contextmanager
def darkened(ends: Iterable[socket.socket]) -> Iterator[None]:
    """Nothing that is sent to these ends arrives inside."""
    program = ctypes.create_string_buffer(DROP_ALL)
    fprog = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    held = list(ends)
    try:
        for end in held:
            end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, fprog)
        yield
    finally:
        for end in held:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


@contextmanager
def slowed(ends: Iterable[socket.socket], bytes_per_s: int) -> Iterator[None]:
    """No faster than that goes out at these ends inside."""
    held = list(ends)
    try:
        for end in held:
            end.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("I", bytes_per_s))
        yield
    finally:
        for end in held:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, UNPACED)


def try_rob(ends: Iterable[socket.socket]) -> bool:
    """Take the write that came in first at one of these ends, whose process is stopped. False: there is none yet, or
    the rest of it does not come. Blocks for REST_WITHIN_S at most."""
    for end in ends:
        if (size := _write_size(_peeked(end))) is not None:
            return _is_taken(end, size)
    return False


def _is_taken(end: socket.socket, size: int) -> bool:
    """Whether its process reads without waiting is a property of what both have open, so it is left as it is."""
    until = time.monotonic() + REST_WITHIN_S
    while size > 0 and time.monotonic() < until:
        if select.select([end], [], [], REST_WITHIN_S)[0]:
            size -= len(end.recv(min(size, MAX_RECEIVE), socket.MSG_DONTWAIT))
    return size == 0


def _peeked(end: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return end.recv(FRAME_HEAD.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return b""


def _write_size(head: bytes) -> int | None:
    """Of the whole frame. None: at the head of what came in no write begins."""
    if len(head) < FRAME_HEAD.size:
        return None
    version, op, _, _, _, head_size, size = FRAME_HEAD.unpack(head)
    is_write = version == FRAME_VERSION and op == OP_WRITE and FRAME_HEAD.size <= head_size < size <= MOST_WRITE
    return size if is_write else None
