"""What the loop of every role is: the engine's turns, beside whatever else the role runs. Owns no state."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any


async def keep_turning(
    turn: Callable[[], Awaitable[bool]],
    work: asyncio.Event,
    *,
    beside: list[Coroutine[Any, Any, None]],
    until: Awaitable[None],
    leave: Callable[[], Awaitable[None]],
) -> None:
    """Until `until` is over, when nothing is held any more; or until cancelled, then `leave`. `turn` runs one step and
    says whether there was one; where there was none it is called again when `work` is set. An error in it, or in what
    runs beside it, ends everything."""

    async def turns() -> None:
        while True:
            if not await turn():
                work.clear()
                await work.wait()

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in (*beside, turns())]
            await until
            for task in running:
                task.cancel()
    except asyncio.CancelledError:
        await leave()
        raise
