"""Work on a loop of its own that Ctrl-C and SIGTERM end as a cancellation, so that it ends what it has started."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

INTERRUPTED = 130
"""The exit status."""


def run_unless_interrupted(work: Coroutine[Any, Any, Result]) -> Result | None:
    """None: it was interrupted, and is over."""
    return asyncio.run(_unless_signalled(work))


async def _unless_signalled(work: Coroutine[Any, Any, Result]) -> Result | None:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None
