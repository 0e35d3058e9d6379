"""The processes of one `serve`: started, looked after, and ended together.

Owns the processes and nothing that they say. Runs on one asyncio loop. The life of a child:

    starting   until `bring_up` returns; a child that ends before that ends everything
    running    started again when it ends, later and later: the others can do without any of them for a while
    succeeded  it has left word before it ended: nobody comes after it (it was drained), or another command at once
    stopping   SIGTERM, five seconds, SIGKILL; a second signal from outside: SIGKILL at once
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.cli.child import Child, Running, guard_of
from headrace.cli.failure import ERROR_FILE
from headrace.cli.successor import SUCCESSOR_FILE, read_word
from headrace.errors import HeadraceError
from headrace.roles.exit_status import described

SAME_EVENT_S = 0.1
"""`timeout` and init systems signal a process and its group: the second within this time is no impatience."""

_log = logging.getLogger(__name__)


class ChildEnded(HeadraceError):
    """A process ended before all were ready, or the guard. `status`: what to end with ourselves."""

    def __init__(self, text: str, *, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A child that ended is started again after `first_delay_s`, the next time after twice that, and so on; one that
    ran for `forgiven_after_s` begins anew."""

    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    forgiven_after_s: float = 60.0
    grace_s: float = 5.0  # from SIGTERM to SIGKILL
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def delay_s(self, num_failures: int) -> float:
        """After that many failures in a row, at least 1."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(num_failures - 1, 30))


class Supervisor:
    """`directory` is where children leave their last words; it is removed if this process is killed."""

    def __init__(self, children: Sequence[Child], directory: Path, timing: Timing | None = None) -> None:
        self._children = children
        self._directory = directory
        self._timing = timing or Timing()
        self._running: dict[Child, Running] = {}
        self._is_up = False
        self._is_stopping = False
        self._signalled_at: float | None = None
        self._end: asyncio.Future[ChildEnded | None]
        self._hurry = asyncio.Event()

    def __repr__(self) -> str:
        state = "stopping" if self._is_stopping else "up" if self._is_up else "starting"
        return f"Supervisor({state}, running={len(self._running)} of {len(self._children)})"

    async def run(self, bring_up: Callable[[], Awaitable[None]]) -> bool:
        """Until a signal. `bring_up` runs beside the children and returns when they are ready.
        -> whether all ended by themselves in time. Raises ChildEnded; whatever happens, no child is left."""
        self._end = asyncio.get_running_loop().create_future()
        with self._signals_heard():
            async with guard_of(self._directory) as guard:
                try:
                    cause, is_clean = await self._run(guard, bring_up)
                finally:
                    await self._kill()
        if cause is not None:
            raise cause
        return is_clean

    async def _run(self, guard: Running, bring_up: Callable[[], Awaitable[None]]) -> tuple[ChildEnded | None, bool]:
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._keep(child, group=guard.pid)) for child in self._children]
            beside.append(tasks.create_task(self._bring_up(bring_up)))
            beside.append(tasks.create_task(self._watch(guard)))
            cause = await self._end
            is_clean = await self._stop()
            for task in beside:
                task.cancel()
        return cause, is_clean

    # ---- children ----------------------------------------------------------------------------------------------

    async def _keep(self, child: Child, *, group: int) -> None:
        """Run it, again and again."""
        num_failures = 0
        while not self._is_stopping:
            self._successor_file(child).unlink(missing_ok=True)
            began = self._timing.clock()
            status = await self._one_life(child, group=group)
            if self._is_stopping:
                return
            word = read_word(self._successor_file(child)) if self._is_up else None
            if word is not None:
                if word.command is None:
                    _log.info("%s has left: it was drained", child.name)
                    return
                _log.info("%s was drained; it goes on as %s", child.name, word.name)
                child, num_failures = replace(child, name=word.name, command=word.command), 0
                continue
            how = self._last_words(child) or f"{child.name} {described(status)}"
            if not self._is_up:
                self._end_with(ChildEnded(how, status=2 if status == 2 else 1))
                return
            ran_long = self._timing.clock() - began >= self._timing.forgiven_after_s
            num_failures = 1 if ran_long else num_failures + 1
            delay_s = self._timing.delay_s(num_failures)
            _log.warning("%s; it starts again in %g s", how, delay_s)
            await self._timing.sleep(delay_s)

    async def _one_life(self, child: Child, *, group: int) -> int:
        self._words_file(child).unlink(missing_ok=True)
        environment = {
            **os.environ,
            ERROR_FILE: str(self._words_file(child)),
            SUCCESSOR_FILE: str(self._successor_file(child)),
        }
        process = Running(child.command, group=group, environment=environment)
        self._running[child] = process
        status = await process.wait()
        del self._running[child]
        return status

    def _words_file(self, child: Child) -> Path:
        return self._directory / f"{child.name}.error"

    def _successor_file(self, child: Child) -> Path:
        return self._directory / f"{child.name}.successor"

    def _last_words(self, child: Child) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return f"{child.name}: {self._words_file(child).read_text()}"
        return None

    # ---- beginning and end -------------------------------------------------------------------------------------

    async def _bring_up(self, bring_up: Callable[[], Awaitable[None]]) -> None:
        await bring_up()
        self._is_up = True

    async def _watch(self, guard: Running) -> None:
        status = await guard.wait()
        self._end_with(ChildEnded(f"the guard of the processes {described(status)}", status=1))

    def _end_with(self, cause: ChildEnded | None) -> None:
        if not self._end.done():
            self._end.set_result(cause)

    @contextmanager
    def _signals_heard(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        heard = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup wants us to outlive the terminal
            heard.append(signal.SIGHUP)
        for number in heard:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        now = self._timing.clock()
        if self._signalled_at is None:
            self._signalled_at = now
            _log.info("stopping; once more kills at once")
            self._end_with(None)
        elif now - self._signalled_at > SAME_EVENT_S:
            self._hurry.set()

    async def _stop(self) -> bool:
        """SIGTERM to all. -> whether they ended in time."""
        self._is_stopping = True
        for process in self._running.values():
            process.send(signal.SIGTERM)
        ended, hurry = asyncio.create_task(self._all_ended()), asyncio.create_task(self._hurry.wait())
        await asyncio.wait((ended, hurry), timeout=self._timing.grace_s, return_when=asyncio.FIRST_COMPLETED)
        late = sorted(child.name for child, process in self._running.items() if process.is_alive)
        for task in (ended, hurry):
            task.cancel()
        if late:
            _log.warning("still running, so killed: %s", ", ".join(late))
        return not late

    async def _kill(self) -> None:
        for process in self._running.values():
            process.send(signal.SIGKILL)
        await self._all_ended()

    async def _all_ended(self) -> None:
        # Awaited here: a gathering that is cancelled with nobody at it writes a traceback.
        await asyncio.gather(*(process.wait() for process in self._running.values()))
