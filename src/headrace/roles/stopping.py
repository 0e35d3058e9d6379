"""How a role's process ends: by SIGINT or SIGTERM, whenever they come; being told so is no failure. Owns both signals.
What it cannot do without (a rank of its own) may end it in the same way, and that is one.

while it loads     the main thread is interrupted where it is, and what it holds is given back
while it runs      its work is cancelled, and cleans up after itself
while it ends      heard already
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

LAST_WORDS_S = 0.05
"""For the fabric's last messages to leave, before its endpoint is closed: they are posted within a millisecond."""

Work = Callable[[], Coroutine[Any, Any, None]]


class _Told(BaseException):
    """To stop, while no loop was there to hear it."""


class Stoppable:
    """Runs the process's work on a loop of its own."""

    def __init__(self) -> None:
        self._is_told = False
        self._is_over = False
        self._cancel: Callable[[], object] | None = None
        self._failure: BaseException | None = None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """The signals' handler."""
        if self._is_told or self._is_over:
            return
        self._is_told = True
        if self._cancel is None:
            raise _Told
        self._cancel()

    def fail(self, failure: Exception) -> None:
        """End it as a signal does; `failure` is raised when everything has been given back. Nothing where it has been
        told to end. From any thread."""
        if self._is_told or self._is_over:
            return
        self._failure = self._failure or failure
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def run(self, work: Work) -> None:
        """Until it ends, fails or is told to stop. An error in a timer or another callback of the loop fails it too."""
        if not self._is_told:  # in a destructor, say, whose exceptions nobody sees
            asyncio.run(self._run(work))

    async def _run(self, work: Work) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work())
        # Not the loop's own handler of signals: with the loop it ends, and the next signal kills what still cleans up.
        self._cancel = partial(loop.call_soon_threadsafe, task.cancel)

        def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            loop.default_exception_handler(context)
            self._failure = self._failure or context.get("exception")
            if self._failure is not None:
                task.cancel()

        loop.set_exception_handler(on_error)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            self._is_over = True
        self.raise_failure()
        assert self._is_told or not task.cancelled(), "the work was cancelled by nobody"


@contextmanager
def stoppable() -> Iterator[Stoppable]:
    """Around everything that the process does, on its main thread."""
    one = Stoppable()
    former = {number: signal.signal(number, one.stop) for number in STOP_SIGNALS}
    try:
        with contextlib.suppress(_Told):
            yield one
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    one.raise_failure()


@contextmanager
def signals_held() -> Iterator[None]:
    """What is started meanwhile never hears them; we do, afterwards, when everything started is known. On the main
    thread. A mask is not enough for us: another thread takes the signal, and Python runs the handler on this one."""
    heard: list[int] = []
    handlers = {number: signal.signal(number, lambda number, frame: heard.append(number)) for number in STOP_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if heard:
        signal.raise_signal(heard[0])
