"""Who a process is to others on its host, and a handle that tells when it has exited. Linux; owns no state.

A killed process proves nothing about its writes (PROTOCOL, "Pages at the decoder"), but its exit proves that nobody
reads source pages for it any more, and it is the fastest news of a death: a pidfd becomes readable at once.
"""

import errno
import os
import select
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessName:
    """`host`: boot id and pid namespace, equal where pids mean the same. `started`: clock ticks since boot, which
    tells a process from the next one with its pid."""

    host: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> "ProcessName":
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return cls(host=f"{boot_id}/{namespace}", pid=os.getpid(), started=_start_ticks(os.getpid()))

    def try_open(self) -> int | None:
        """A pidfd, readable once the process has exited. None when it has exited already. The caller closes it.

        Meaningless for a process of another host: compare `host` first.
        """
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
                return None  # nobody, or (the other two, by kernel version) a mere thread of somebody has the pid now
            raise
        try:
            if self._is(pidfd):
                return pidfd
        except BaseException:
            os.close(pidfd)
            raise
        os.close(pidfd)
        return None

    def _is(self, pidfd: int) -> bool:
        """Whether the process behind `pidfd` is the one of this name, and not one that came after it."""
        try:
            return _start_ticks(self.pid) == self.started
        except OSError:
            # Gone, or another user's behind a /proc that hides it: then the pidfd itself says whether it lives.
            return not select.select([pidfd], [], [], 0)[0]


def _start_ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the name before it may hold anything
