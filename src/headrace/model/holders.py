"""Which processes of this user, on this host, hold the packed weights of one key, and whose turn it is to pack.

Owns a folder of this user's alone; knows nothing of what is held. An entry says where a living process has the memfd
open, and all that it says is in its name, so that none can be half written:

    <namespace>-<digest>.lock                            held (flock) by whoever packs, or looks for a holder; it stays
    <namespace>-<digest>-<pid>-<started>-<fd>.holder     of one holder, from when others may map it to its end

`namespace` is that of the pids, which mean somebody else in another container; `started`, in clock ticks since boot,
tells a process from the next one with its pid. The kernel lets go of the lock when its owner dies; the entries of the
dead are swept by the next who looks. Synchronous, for start-up.
"""

import errno
import fcntl
import logging
import os
import re
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

_FIRST_LINE_S = 2.0
"""Of a wait, in the log; then another after twice as long, and so on."""

_LONGEST_WAIT_S = 60.0

_POLL_S = 0.05

_ENTRY = re.compile(r"(\d+)-([0-9a-f]+)-(\d+)-(\d+)-(\d+)\.holder", flags=re.ASCII)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What one entry says."""

    entry: Path
    digest: str
    pid: int
    started: int
    fd: int

    def is_alive(self) -> bool:
        try:
            state, started = _state_and_start(self.pid)
        except OSError:
            return False
        return started == self.started and state not in "ZX"

    def open(self, name: str) -> int:
        """Its memfd `name`, read-only and close-on-exec, to be closed by the caller. Raises OSError: PermissionError
        where the system keeps processes apart, FileNotFoundError where there is no such memfd (any more)."""
        path = f"/proc/{self.pid}/fd/{self.fd}"
        if not os.readlink(path).startswith(f"/memfd:{name} "):
            raise FileNotFoundError(errno.ENOENT, f"is no memfd {name}", path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be anything by now: do not hang


class Holders:
    """One process's look at the holders of one key, its turn, and its own entry."""

    def __init__(self, directory: Path, digest: str) -> None:
        """Makes the folder where there is none. Raises OSError when it is not for this user alone."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "must be a folder of this user's alone, mode 0700", str(directory))
        self._directory = directory
        self._digest = digest
        self._namespace = os.stat("/proc/self/ns/pid").st_ino
        self._let_go: weakref.finalize[..., Holders] | None = None
        self._remove_entry: weakref.finalize[..., Holders] | None = None

    def wait_turn(self) -> None:
        """Until nobody else packs or looks; then nobody does until `end_turn`. Raises TimeoutError, or OSError."""
        path = self._directory / f"{self._namespace}-{self._digest}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._let_go = weakref.finalize(self, os.close, fd)
        begin, next_line_s = time.monotonic(), _FIRST_LINE_S
        while not _try_lock(fd):
            waited_s = time.monotonic() - begin
            if waited_s >= _LONGEST_WAIT_S:
                self.end_turn()
                raise TimeoutError(errno.ETIMEDOUT, f"still locked after {waited_s:.0f} s", str(path))
            if waited_s >= next_line_s:
                _log.info("waiting for another process that packs the same weights, for %.0f s so far", waited_s)
                next_line_s *= 2
            time.sleep(_POLL_S)

    def end_turn(self) -> None:
        """Idempotent."""
        if self._let_go is not None:
            self._let_go()

    def living(self) -> list[Holder]:
        """Those of the key, the longest at it first. Entries of the dead, of any key, are swept."""
        found = []
        for entry in self._directory.glob(f"{self._namespace}-*.holder"):
            holder = _try_parse(entry)
            if holder is None or not holder.is_alive():
                entry.unlink(missing_ok=True)
            elif holder.digest == self._digest:
                found.append(holder)
        return sorted(found, key=lambda holder: (holder.started, holder.pid, holder.fd))

    def enter(self, fd: int) -> None:
        """From now on others find this process's `fd`, until `leave`. Raises OSError."""
        pid = os.getpid()
        _, started = _state_and_start(pid)
        entry = self._directory / f"{self._namespace}-{self._digest}-{pid}-{started}-{fd}.holder"
        entry.touch(mode=0o600)
        self._remove_entry = weakref.finalize(self, _remove, entry, pid)

    def leave(self) -> None:
        """Before the descriptor is closed. Idempotent."""
        if self._remove_entry is not None:
            self._remove_entry()
        self.end_turn()


def _try_parse(entry: Path) -> Holder | None:
    match = _ENTRY.fullmatch(entry.name)
    if match is None:
        return None
    _, digest, pid, started, fd = match.groups()
    return Holder(entry=entry, digest=digest, pid=int(pid), started=int(started), fd=int(fd))


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(entry: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not its fork, at whose exit the entry is still good
        entry.unlink(missing_ok=True)


def _state_and_start(pid: int) -> tuple[str, int]:
    """A process's state, a letter, and its start in clock ticks since boot. Raises OSError where there is none."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat.rpartition(")")[2].split()  # fields 3 and up; the name before them may hold anything
    return fields[0], int(fields[19])
