"""What clients do: leave, many of them at once, or come, more than can be served."""

import asyncio
import time

from headrace.cli.chaos.scene import Scene

STORM, STAYING_SHARE = 20, 0.1
BURST = 64


async def leave(scene: Scene) -> None:
    scene.struck(time.monotonic(), scene.decoder)
    scene.target.task.cancel()


async def storm(scene: Scene) -> None:
    """Nine of ten leave, whatever came of theirs."""
    for known in scene.load.draw_short(STORM):
        scene.load.start(known)
    await asyncio.sleep(0.3)
    scene.struck(time.monotonic())
    leaving = scene.load.under_way()
    for one in leaving[: round(len(leaving) * (1 - STAYING_SHARE))]:
        one.task.cancel()


async def burst(scene: Scene) -> None:
    scene.struck(time.monotonic())
    for known in scene.load.draw_short(BURST):
        scene.load.start(known)
