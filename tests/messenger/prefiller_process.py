"""A prefiller as a process of its own: TinyLlama behind the real messenger and fabric. `Prefiller` is the test's side.

Its loop owns messenger and pages; a model thread computes the steps and raises the layer counter. Lines of JSON on
stdin ask for what a gateway or a fault injector would ask; each is answered by one line on stdout.
"""

import asyncio
import ctypes
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from tiny_llama import LLAMA_KV, TinyLlama

from headrace.fabric.interface import LAYERS_PER_STEP, PeerId
from headrace.fabric.native import NativeFabric, Transport
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pages import PagePool
from headrace.kvcache.pool import layer_views
from headrace.kvcache.prefix import PrefixIndex
from headrace.kvcache.sharding import Sharding
from headrace.messenger.aux import aux_slot_bytes
from headrace.messenger.hello import Identity
from headrace.messenger.jobs import Chunk, PrefillerOptions, Transfer
from headrace.messenger.outcomes import JobDropped, PeerReady, PrefillerOutcome, PrefillJob
from headrace.messenger.prefiller import PrefillerMessenger
from headrace.messenger.pump import Pump
from headrace.protocol.control import Granted, Reserve
from headrace.protocol.messages import Ticket

FINGERPRINT = "tiny-llama-seed-0"
MAX_MODEL_LEN = 2048
GIL_HELD_S = 0.2


def llama_layout(num_pages: int, num_aux_slots: int = 16) -> PoolLayout:
    return PoolLayout(
        kv=LLAMA_KV,
        num_pages=num_pages,
        num_aux_slots=num_aux_slots,
        aux_slot_bytes=aux_slot_bytes(MAX_MODEL_LEN, LLAMA_KV.page_size),
    )


class _StepFailed(Exception):
    """What an engine's step may end in."""


class _Prefiller:
    """`fail_at_layer`, `hold_gil_at_layer`, `layer_s` (how long a layer takes at least) may be set by the test."""

    def __init__(self, *, num_pages: int, chunk_tokens: int, transfer: Transfer, transport: Transport = "tcp") -> None:
        torch.set_num_threads(1)
        layout = llama_layout(num_pages)
        self._memory = PoolMemory(layout.total_bytes)
        self._views = layer_views(self._memory, layout)
        self._model = TinyLlama()
        self._fabric = NativeFabric(self._memory.fd, self._memory.length, transports=(transport,))
        self._messenger = PrefillerMessenger(
            fabric=self._fabric,
            identity=Identity.of_this_process(
                role="prefiller", fingerprint=FINGERPRINT, sharding=Sharding(kv=layout.kv), pool=layout
            ),
            pages=PagePool(num_pages, PrefixIndex()),
            memory=self._memory.bytes,
            options=PrefillerOptions(lease_tokens=100_000, reserve_tokens=100, transfer=transfer),
        )
        self._pump = Pump(self._messenger, self._fabric, self._on_outcome)
        self._chunk_tokens = chunk_tokens
        self._jobs: dict[Ticket, tuple[PrefillJob, int]] = {}
        self._met: set[PeerId] = set()
        self._step = 0
        self._work = asyncio.Event()
        self._faults: dict[str, float] = {}
        self._raised_ns = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        _say(address=self._fabric.address.hex())
        async with asyncio.TaskGroup() as tasks:
            pump = tasks.create_task(self._pump.run())
            engine = tasks.create_task(self._engine())
            while line := await reader.readline():
                request = json.loads(line)
                _say(**getattr(self, f"do_{request.pop('do')}")(**request))
            pump.cancel()
            engine.cancel()
        self._fabric.close()

    # ---- what the test asks

    def do_lease(self, request_id: str, num_tokens: int) -> dict[str, Any]:
        reserve = Reserve(
            sender="0" * 32, request_id=request_id, num_tokens=num_tokens, tier="interactive", remaining_s=30.0
        )
        answer = self._messenger.reserve(reserve, time.monotonic())
        return {"lease": answer.lease if isinstance(answer, Granted) else None}

    def do_faults(self, **faults: float) -> dict[str, Any]:
        self._faults = faults
        return {}

    def do_raised(self) -> dict[str, Any]:
        """When the counter was raised for the layer after which the GIL was held."""
        return {"raised_ns": self._raised_ns}

    def do_decoders_exited(self) -> dict[str, Any]:
        """All that came so far: their process goes on, with others at addresses that may be the same."""
        for peer in self._met:
            self._messenger.peer_exited(peer, time.monotonic())
        self._met.clear()
        return {}

    def do_statistics(self) -> dict[str, Any]:
        return {**asdict(self._messenger.statistics()), **asdict(self._fabric.statistics()), "steps": self._step}

    # ---- the engine

    def _on_outcome(self, outcome: PrefillerOutcome) -> None:
        match outcome:
            case PrefillJob():
                self._jobs[outcome.ticket] = (outcome, outcome.cached_len)
                self._work.set()
            case JobDropped():
                self._jobs.pop(outcome.ticket, None)
            case PeerReady():
                self._met.add(outcome.peer)

    async def _engine(self) -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "model") as model_thread:
            while True:
                self._pump.turn()
                if not self._jobs:
                    self._work.clear()
                    await self._work.wait()
                    continue
                job, begin = next(iter(self._jobs.values()))
                end = min(begin + self._chunk_tokens, len(job.token_ids) - 1)
                self._step += 1
                self._messenger.begin_step(self._step, [Chunk(ticket=job.ticket, begin=begin, end=end)])
                try:
                    await loop.run_in_executor(model_thread, self._compute, job, begin, end)
                except _StepFailed as failed:
                    self._messenger.fail_step(self._step, str(failed), time.monotonic())
                else:
                    if job.ticket in self._jobs:
                        self._jobs[job.ticket] = (job, end)
                        if end == len(job.token_ids) - 1:
                            del self._jobs[job.ticket]
                    self._messenger.commit_step(self._step, time.monotonic())
                self._pump.poke()

    def _compute(self, job: PrefillJob, begin: int, end: int) -> None:
        """One chunk, on the model thread."""

        def after_attention(layer: int) -> None:
            if layer == self._faults.get("fail_at_layer"):
                raise _StepFailed(f"layer {layer}")
            time.sleep(self._faults.get("layer_s", 0.0))
            raised_ns = time.monotonic_ns()
            self._fabric.raise_layers(self._step * LAYERS_PER_STEP + layer + 1)
            if layer == self._faults.get("hold_gil_at_layer"):
                self._raised_ns = raised_ns
                ctypes.PyDLL(None).usleep(int(GIL_HELD_S * 1e6))

        self._model.forward(job.token_ids[begin:end], begin, job.pages, self._views, after_attention)


def _say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


class Prefiller:
    """Starts the process; kills it on leaving, whatever state it is in by then."""

    def __init__(
        self, transport: Transport, *, num_pages: int = 256, chunk_tokens: int = 16, transfer: Transfer = "layers"
    ) -> None:
        script = str(Path(__file__).resolve())
        self.process = subprocess.Popen(
            [sys.executable, script, transport, str(num_pages), str(chunk_tokens), transfer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = bytes.fromhex(self._read()["address"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def ask(self, do: str, **arguments: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the prefiller ended with {self.process.wait()}"
        return json.loads(line)


if __name__ == "__main__":
    _, way, pages, chunk, when = sys.argv
    made = _Prefiller(
        transport=cast(Transport, way), num_pages=int(pages), chunk_tokens=int(chunk), transfer=cast(Transfer, when)
    )
    asyncio.run(made.run())
