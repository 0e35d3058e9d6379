"""Real roles on the test's own loop: tiny model, real fabric, real sockets, and gateways that a test speaks for.

A model waits at its gate before each step, and after a layer's pages may leave, so that a test says how far a step
gets. When a test has ended, nothing may be held anywhere: `World` looks at every instance before it closes it.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from scripted_gateway import ScriptedGateway, until
from tiny_checkpoint import Reference, kv_layout, prompt

from headrace.model.batch import Batch
from headrace.model.interface import AfterLayer, Model, nothing_after
from headrace.protocol.control import Status
from headrace.roles import links
from headrace.roles.decoder import Decoder
from headrace.roles.instance import Instance, open_instance
from headrace.roles.options import InstanceOptions, Transport
from headrace.roles.prefiller import Prefiller
from headrace.roles.reached import transport_of

PAGE, CHUNK, NUM_PAGES = 4, 16, 128


class GatedModel:
    """`hold()` keeps every step from beginning, `hold_after(layer)` in its middle; `fail_next` raises once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._begin, self._middle = threading.Event(), threading.Event()
        self._layer = -1
        self.fail_next = False
        self.num_waiting = 0
        self.open()

    @property
    def shape(self) -> Any:
        return self._model.shape

    def hold(self) -> None:
        self._begin.clear()

    def hold_after(self, layer: int) -> None:
        self._layer = layer
        self._middle.clear()

    def open(self) -> None:
        self._begin.set()
        self._middle.set()

    def forward(
        self, batch: Batch, views: Sequence[torch.Tensor], after_layer: AfterLayer = nothing_after
    ) -> torch.Tensor:
        self._wait(self._begin)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the model is out of order")

        def after(layer: int) -> None:
            after_layer(layer)
            if layer == self._layer:
                self._wait(self._middle)

        return self._model.forward(batch, views, after)

    def _wait(self, gate: threading.Event) -> None:
        if gate.is_set():
            return
        self.num_waiting += 1
        assert gate.wait(15), "nobody opened the gate"
        self.num_waiting -= 1


class Running:
    """One role, and the task that runs it."""

    def __init__(self, instance: Instance, role: Decoder | Prefiller) -> None:
        self.instance = instance
        self.role = role
        self.model = GatedModel(instance.runner._model)
        instance.runner._model = self.model
        self.task = asyncio.create_task(role.run())

    @property
    def uuid(self) -> str:
        return self.instance.identity.uuid

    @property
    def status(self) -> Status:
        return self.role._status()

    def gauge(self, name: str) -> float:
        return self.status.gauges[name]

    def counter(self, name: str) -> float:
        return self.status.counters.get(name, 0)

    @property
    def remote(self) -> Any:
        """A decoder's way to its prefillers."""
        assert isinstance(self.role, Decoder) and self.role._remote is not None
        return self.role._remote

    @property
    def is_idle(self) -> bool:
        gauges = self.status.gauges
        held = ("pages_held", "pages_quarantined", "tickets_open", "pages_held_by_decoders")
        return all(gauges.get(name, 0) == 0 for name in held) and self.status.num_running == 0

    async def idle(self) -> None:
        await until(lambda: self.is_idle, f"nothing is held: {self.status}")
        self.instance.pools[0].check()
        if isinstance(self.role, Decoder):
            self.role._groups.check()
            assert not self.role._served
            if self.role._remote is not None:
                self.role._remote.check()
        else:
            self.role._messenger.check()
            assert not self.role._request_ids and not self.role._queue.num_queued

    async def stop(self) -> None:
        """As a signal does."""
        self.model.open()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class World:
    def __init__(
        self, checkpoint: Path, directory: Path, reference: Reference, transport: Transport = "mapped"
    ) -> None:
        self.reference = reference
        self.checkpoint = checkpoint
        self.transport = transport
        self._directory = directory
        self.exits = AsyncExitStack()
        self.patch = pytest.MonkeyPatch()
        self.running: list[Running] = []
        self.gateway: ScriptedGateway

    async def __aenter__(self) -> Self:
        self.exits.callback(self.patch.undo)
        self.patch.setattr(links, "BEAT_S", 0.05)
        self.gateway = self.open_gateway("control")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self.running:
            one.model.open()
        try:
            if kind is None:
                for one in self.running:
                    if not one.task.done():
                        await one.idle()
            for one in self.running:
                if one.task.done() and not one.task.cancelled():
                    await one.task  # raises why
        finally:
            await self.exits.aclose()

    def open_gateway(self, name: str) -> ScriptedGateway:
        gateway = ScriptedGateway(f"ipc://{self._directory}/{name}")
        self.exits.push_async_callback(gateway.close)
        return gateway

    async def decoder(self, *prefillers: Running, **options: Any) -> Running:
        """It knows the prefillers, and may ask them."""
        decoder = await self._open("decoder", Decoder, **options)
        if prefillers:
            self.gateway.name_prefillers(decoder.uuid, *(prefiller.uuid for prefiller in prefillers))
            await self.met(decoder, *prefillers)
        return decoder

    async def met(self, decoder: Running, *prefillers: Running) -> None:
        remote = decoder.remote
        peers = remote._peers
        await until(lambda: all(one.uuid in remote._peers for one in prefillers), f"they are named: {peers}")
        await until(
            lambda: all(remote._messenger.is_ready(remote._peers[one.uuid]) for one in prefillers), "they are ready"
        )
        reached = {transport_of(remote._fabric.transport(peer)) for peer in remote._peers.values()}
        assert reached == {self.transport}

    async def prefiller(self, **options: Any) -> Running:
        return await self._open("prefiller", Prefiller, **options)

    async def colocated(self, **options: Any) -> Running:
        return await self._open("colocated", Decoder, **options)

    async def _open(
        self,
        role: Any,
        make: Callable[[Instance], Decoder | Prefiller],
        *,
        num_pages: int = NUM_PAGES,
        gateways: Sequence[ScriptedGateway] = (),
        **changes: Any,
    ) -> Running:
        gateways = gateways or (self.gateway,)
        fields = {
            "page_size": PAGE,
            "chunk_tokens": CHUNK,
            "dtype": "fp32",
            "transports": (self.transport,),
            **changes,
        }
        kv = kv_layout(self.checkpoint, page_size=fields["page_size"], dtype=fields["dtype"])
        options = InstanceOptions(
            role=role,
            name=f"{role}-{len(self.running)}",
            gateways=tuple(gateway.endpoint for gateway in gateways),
            model_dir=self.checkpoint,
            model="tiny",
            kv_memory_bytes=num_pages * kv.num_layers * kv.page_bytes,
            **fields,
        )
        instance = self.exits.enter_context(open_instance(options))
        running = Running(instance, make(instance))
        self.exits.push_async_callback(running.stop)
        self.running.append(running)
        for gateway in gateways:
            await until(lambda gateway=gateway: running.uuid in gateway.status, "it has said how it stands")
        return running


def in_world(test: Callable[[World], Awaitable[None]]) -> Callable[[Path, Path, Reference], None]:
    """The test runs on a loop of its own."""

    def run(checkpoint: Path, tmp_path: Path, reference: Reference) -> None:
        asyncio.run(_play(test, World(checkpoint, tmp_path, reference)))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def over_each_transport(
    test: Callable[[World], Awaitable[None]],
) -> Callable[[Path, Path, Reference, Transport], None]:
    """The same for one in which KV travels."""

    def run(checkpoint: Path, tmp_path: Path, reference: Reference, transport: Transport) -> None:
        asyncio.run(_play(test, World(checkpoint, tmp_path, reference, transport)))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def _play(test: Callable[[World], Awaitable[None]], opening: World) -> None:
    async with asyncio.timeout(100), opening as world:
        await test(world)


def split_text_is(reference: Reference, checkpoint: Path, sockets: Path, *, num_tokens: int) -> None:
    """A prompt within a page and one of several, prefilled in one place and decoded in another."""

    @in_world
    async def play(world: World) -> None:
        prefiller = await world.prefiller()
        decoder = await world.decoder(prefiller)
        for length in (5, 40):
            token_ids = prompt(length)
            asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, token_ids, num_tokens)
            assert await asked.text() == world.reference.text(token_ids, num_tokens), f"{length} tokens"
        assert decoder.counter("prefill_tokens_total") == 0

    play(checkpoint, sockets, reference)
