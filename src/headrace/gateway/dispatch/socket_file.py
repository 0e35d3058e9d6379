"""The file of a Unix socket: for one user alone, never another living process's, gone when its owner closes.

Owns no socket: who binds does so inside `private_socket`. A crashed owner's file is replaced.
"""

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headrace.errors import InputError


@dataclass(frozen=True, slots=True)
class SocketFile:
    """As it was bound."""

    path: Path
    inode: int

    @classmethod
    def at(cls, path: Path) -> Self:
        return cls(path, path.lstat().st_ino)

    def remove(self) -> None:
        """Before its socket is closed: as long as that lives nobody else binds there. Not when it is another's."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()


@contextlib.contextmanager
def private_socket(path: Path) -> Iterator[None]:
    """What is bound at `path` inside is for this user alone, and nobody's living socket is displaced.

    Raises InputError. libzmq unlinks whatever lies there before it binds: hence the look at it, and the folder's lock
    between the two.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _require_private(path.parent, os.fstat(folder))
        fcntl.flock(folder, fcntl.LOCK_EX)
        _require_dead(path)
        former = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(former)
    finally:
        os.close(folder)


def _require_private(folder: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise InputError(
            "control",
            f"must lie in a folder of this user with mode 0700, {folder} has mode {mode:04o} and owner {status.st_uid}",
        )


def _require_dead(path: Path) -> None:
    """Raises InputError unless nothing is there, or the socket file of a process that is gone."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise InputError("control", f"must be free for a socket, {path} is a file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody lives there
    raise InputError("control", f"ipc://{path} is in use")
