"""Processes of one group, and the guard that leads it. Owns what it starts until that has ended and been reaped.

The guard is a shell that waits for the end of a pipe whose other end only the supervisor holds. However the supervisor
ends, the guard then removes the run directory and kills the group, and so what children have started themselves too:
PR_SET_PDEATHSIG would reach only the children. A terminal's Ctrl-C does not reach the group; the supervisor does.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

HEADRACE = (sys.executable, "-P", "-m", "headrace")
"""-P: a folder named headrace where the person happens to stand is not this package."""

GUARD = 'exec >/dev/null 2>&1; trap "" HUP INT TERM; read -r _; rm -rf -- "$1"; kill -KILL 0'


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What is to run."""

    name: str
    command: tuple[str, ...]


class Running:
    """A process of this one, watched through a pidfd: no signal of ours can reach a stranger that got its number."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        group: int,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        output: int | None = None,
    ) -> None:
        """`group` 0: it leads one of its own. `output`: where it writes both of its streams; None: where we do."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._process = subprocess.Popen(
            command, stdin=stdin, stdout=output, stderr=output, process_group=group, env=environment
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    def send(self, number: signal.Signals) -> None:
        """To the process; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive:
                signal.pidfd_send_signal(self._pidfd, number)

    def send_to_group(self, number: signal.Signals) -> None:
        """To the group that it leads, whose number is taken as long as it has not been reaped."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive:
                os.killpg(self.pid, number)

    async def wait(self) -> int:
        """-> the exit status, or the negative number of the signal that ended it."""
        return await asyncio.shield(self._ended)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(self._process.wait())


@asynccontextmanager
async def guard_of(directory: Path) -> AsyncIterator[Running]:
    """The leader of the group that children are started in. On leaving it is killed, with all that is left of it."""
    heard, held = os.pipe()  # not inherited: nobody but us holds `held`
    try:
        try:
            guard = Running(("/bin/sh", "-c", GUARD, "headrace-guard", str(directory)), group=0, stdin=heard)
        finally:
            os.close(heard)
        try:
            yield guard
        finally:
            guard.send_to_group(signal.SIGKILL)
            await guard.wait()
    finally:
        os.close(held)
