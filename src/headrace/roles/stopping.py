"""How a role's process ends: SIGINT and SIGTERM cancel its work, which cleans up after itself. Owns the loop."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

Work = Callable[[], Coroutine[Any, Any, None]]


def run_until_stopped(work: Work) -> None:
    """Run `work` on a loop of its own until it ends, fails or is told to stop; being told is no failure."""
    asyncio.run(_stoppable(work))


async def _stoppable(work: Work) -> None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work())
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert stopped or not task.cancelled(), "the work was cancelled by nobody"
