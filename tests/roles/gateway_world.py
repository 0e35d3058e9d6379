"""A real gateway's dispatch side before real roles, all on the test's loop: what passes between them is all there is.

`World` looks at every instance at the end, this at the gateway.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from role_world import Running, World
from scripted_gateway import until
from tiny_checkpoint import Reference

from headrace.gateway.dispatch import Dispatcher
from headrace.gateway.generation import Generation
from headrace.gateway.options import DEFAULT_TIMINGS, GatewayOptions, Timings
from headrace.protocol.control import Sampling, Status
from headrace.protocol.messages import Uuid


class Gateway:
    """To `World` it is one like the scripted ones."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    @property
    def endpoint(self) -> str:
        return self.dispatcher.endpoint

    @property
    def status(self) -> dict[Uuid, Status]:
        return {one.uuid: one.status for one in self.dispatcher.alive() if one.status is not None}

    async def text(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, *, leaves_after: int | None = None
    ) -> tuple[int, ...]:
        """Who is cancelled, or has so many tokens, has left."""
        asked = Generation(
            request_id=request_id,
            token_ids=tuple(token_ids),
            max_tokens=num_tokens,
            sampling=Sampling(),
            stop_token_ids=(),
            tier="interactive",
            deadline_s=60.0,
        )
        told: list[int] = []
        async with aclosing(self.dispatcher.generate(asked)) as stream:
            async for progress in stream:
                told += progress.token_ids
                if leaves_after is not None and len(told) >= leaves_after:
                    break
        return tuple(told)


class GatewayWorld:
    def __init__(self, world: World, gateway: Gateway) -> None:
        self.world = world
        self.gateway = gateway

    async def prefiller(self, **options: Any) -> Running:
        return await self.world.prefiller(gateways=(self.gateway,), **options)

    async def decoder(self, *prefillers: Running, **options: Any) -> Running:
        decoder = await self.world.decoder(gateways=(self.gateway,), **options)
        await self.world.met(decoder, *prefillers)
        return decoder

    async def all_idle(self, within_s: float) -> None:
        """On both sides, and at the gateway."""

        def is_idle() -> bool:
            statistics = self.gateway.dispatcher.statistics()
            at_gateway = statistics.num_running + sum(statistics.num_queued.values())
            return at_gateway == 0 and all(
                one.is_idle and one.status.num_queued_tokens == 0 for one in self.world.running if not one.task.done()
            )

        await until(is_idle, "nobody holds anything", within_s)


@asynccontextmanager
async def opened(
    checkpoint: Path,
    sockets: Path,
    reference: Reference,
    *,
    max_queued: int = 256,
    timings: Timings = DEFAULT_TIMINGS,
) -> AsyncIterator[GatewayWorld]:
    options = GatewayOptions(
        control=f"ipc://{sockets}/gateway", tokenizer=checkpoint, model="tiny", max_queued=max_queued
    )
    async with (
        asyncio.timeout(100),
        Dispatcher(options, timings) as dispatcher,
        World(checkpoint, sockets, reference) as world,
    ):
        yield GatewayWorld(world, Gateway(dispatcher))
