"""A dispatcher with scripted instances around it, on sockets in a test's folder; at the end nobody holds anything."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from scripted_instance import MODEL, ScriptedDecoder, ScriptedPrefiller, tokens_after, until

from headrace.gateway.budgets import NO_TIERS, Tiers
from headrace.gateway.dispatch.dispatcher import Dispatcher
from headrace.gateway.generation import Generation, Progress
from headrace.gateway.options import GatewayOptions, Timings
from headrace.protocol.control import Prefillers, Role, Sampling

QUICK = Timings(
    beat_s=0.03,
    silence_s=0.4,
    lease_retry_s=0.01,
    room_retry_s=0.02,
    answer_s=0.3,
    need_prefill_s=0.1,
    comeback_s=0.4,
)

A_PROMPT = tuple(range(40))


def options_in(folder: Path, *, max_queued: int = 256, tiers: Tiers = NO_TIERS) -> GatewayOptions:
    return GatewayOptions(
        control=f"ipc://{folder}/control.sock", tokenizer=folder, model=MODEL, max_queued=max_queued, tiers=tiers
    )


def generation(request_id: str = "request", **changes: object) -> Generation:
    plain = Generation(
        request_id=request_id,
        token_ids=A_PROMPT,
        max_tokens=5,
        sampling=Sampling(),
        stop_token_ids=(),
        tier="interactive",
        deadline_s=10.0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    dispatcher: Dispatcher
    prefillers: Sequence[ScriptedPrefiller]
    decoders: Sequence[ScriptedDecoder]
    instances: AsyncExitStack

    @property
    def prefiller(self) -> ScriptedPrefiller:
        return self.prefillers[0]

    @property
    def decoder(self) -> ScriptedDecoder:
        return self.decoders[0]

    async def add_decoder(self, role: Role = "decoder") -> ScriptedDecoder:
        decoder = ScriptedDecoder(self.dispatcher.endpoint, *self.prefillers, role=role)
        await self.instances.enter_async_context(decoder)
        return decoder

    async def knows(self, num_instances: int) -> None:
        await until(lambda: len(self.dispatcher.alive()) == num_instances, f"{num_instances} instances are alive")


@asynccontextmanager
async def fleet(
    folder: Path,
    *,
    prefillers: int = 1,
    decoders: int = 1,
    role: Role = "decoder",
    timings: Timings = QUICK,
    max_queued: int = 256,
    status_s: float = 0.05,
    tiers: Tiers = NO_TIERS,
) -> AsyncIterator[Fleet]:
    options = options_in(folder, max_queued=max_queued, tiers=tiers)
    async with Dispatcher(options, timings) as dispatcher, AsyncExitStack() as stack:
        prefilling = [ScriptedPrefiller(dispatcher.endpoint, status_s=status_s) for _ in range(prefillers)]
        decoding = [
            ScriptedDecoder(dispatcher.endpoint, *prefilling, role=role, status_s=status_s) for _ in range(decoders)
        ]
        for instance in (*prefilling, *decoding):
            await stack.enter_async_context(instance)
        around = Fleet(dispatcher=dispatcher, prefillers=prefilling, decoders=decoding, instances=stack)
        await around.knows(prefillers + decoders)
        if role == "decoder":
            for decoder in decoding:
                await until(lambda heard=decoder: _knows(heard, prefillers), "decoders know the prefillers")  # type: ignore[misc]
        yield around
        await nothing_is_held(around)


def _knows(decoder: ScriptedDecoder, num_prefillers: int) -> bool:
    told = decoder.all_heard(Prefillers)
    return bool(told) and len(told[-1].prefillers) == num_prefillers


async def nothing_is_held(around: Fleet) -> None:
    statistics = around.dispatcher.statistics()
    assert statistics.num_running == 0 and not any(statistics.num_queued.values())
    exchange = around.dispatcher._exchange
    assert not exchange._attempts and not exchange._placed and not exchange._given
    assert repr(exchange.streams) == "Streams(0 at 0 decoders)"
    for decoder in around.decoders:
        await until(lambda heard=decoder: not heard.running, f"{decoder.announce.name} runs nothing")  # type: ignore[misc]
    for prefiller in around.prefillers:
        await until(lambda asked=prefiller: not asked.open_leases, "all leases are used or returned")  # type: ignore[misc]


async def progress_of(dispatcher: Dispatcher, asked: Generation) -> list[Progress]:
    async with aclosing(dispatcher.generate(asked)) as stream:
        return [progress async for progress in stream]


async def answer_to(dispatcher: Dispatcher, asked: Generation) -> tuple[list[int], Progress]:
    """-> all tokens, and the last Progress."""
    told = await progress_of(dispatcher, asked)
    assert all(progress.finish_reason is None for progress in told[:-1]), "something came after the end"
    return [token for progress in told for token in progress.token_ids], told[-1]


async def is_answered(dispatcher: Dispatcher, asked: Generation) -> None:
    """Whole, in order, nothing twice."""
    tokens, last = await answer_to(dispatcher, asked)
    assert asked.max_tokens is not None
    assert tokens == tokens_after(len(asked.token_ids), asked.max_tokens)
    assert (last.finish_reason, last.num_tokens) == ("length", asked.max_tokens)


def ask(dispatcher: Dispatcher, asked: Generation) -> "asyncio.Task[tuple[list[int], Progress]]":
    return asyncio.create_task(answer_to(dispatcher, asked))
