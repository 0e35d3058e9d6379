"""A prefiller or a decoder on one of two hosts, made of what the messenger's own tests have (tests/messenger must be
importable); asked by lines of JSON (see `line_process`): messenger_on_host.py prefiller|decoder ADDRESS
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import prefiller_process
import torch
from host_endpoint import open_fabric
from kv_world import DecoderProcess, NativeSite, Request
from line_process import serve
from tiny_llama import LLAMA_KV, TinyLlama

from headrace.fabric.interface import Fabric, PeerId
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pool import layer_views
from headrace.messenger.outcomes import Ready

CHUNK = 16
PAGES = 200


def prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(512), k=num_tokens))


class HostSite(NativeSite):
    """Endpoints that other hosts reach."""

    def __init__(self, address: str) -> None:
        super().__init__("tcp")
        self._address = address

    def endpoint(self, layout: PoolLayout) -> tuple[Fabric, np.ndarray]:
        memory = PoolMemory(layout.total_bytes)
        fabric = open_fabric(memory.fd, memory.length, self._address)
        self.memories[fabric.address] = memory
        return fabric, memory.bytes


class HostDecoder:
    """One decoder and the prefiller that it meets; each method is one question. While nothing is asked it is not
    turned: `wait` gives it time."""

    def __init__(self, address: str) -> None:
        torch.set_num_threads(1)
        layout = prefiller_process.llama_layout(PAGES)
        self._site = HostSite(address)
        self._decoder = DecoderProcess(self._site, layout, fingerprint=prefiller_process.FINGERPRINT)
        self._model = TinyLlama()
        self._requests: dict[str, Request] = {}
        self._prefiller = PeerId(0)

    def meet(self, prefiller: str) -> None:
        messenger = self._decoder.messenger
        self._prefiller = messenger.greet(bytes.fromhex(prefiller), time.monotonic())
        self._site.wait_for(lambda: messenger.is_ready(self._prefiller), self._decoder)

    def wait_ready(self, seconds: float) -> bool:
        return self._until(lambda: self._decoder.messenger.is_ready(self._prefiller), seconds)

    def open(self, request_id: str, num_tokens: int, lease: str) -> None:
        """A ticket for a prompt that follows from the request's name."""
        request = self._decoder.reserve(request_id, prompt(num_tokens, hash_of(request_id)))
        assert request is not None, f"{self._decoder.pool!r}"
        assert self._decoder.open(request, self._prefiller, lease, remaining_s=60.0) is not None
        self._requests[request_id] = request

    def has_begun(self, request_id: str, seconds: float = 20.0) -> bool:
        """Whether, in that time, some of its bytes landed."""
        pages = self._decoder.model.pages(self._decoder.memory)
        table = list(self._requests[request_id].reservation.pages)
        return self._until(lambda: bool((pages[:, table] != 0xEE).any()), seconds)

    def cancel(self, request_id: str) -> None:
        imm = self._requests[request_id].imm
        assert imm is not None
        self._decoder.messenger.cancel(imm, time.monotonic())

    def answer_of(self, request_id: str, seconds: float = 30.0) -> dict[str, Any] | None:
        request = self._requests[request_id]
        if not self._until(lambda: bool(request.answers), seconds):
            return None
        [answer] = request.answers
        return {"kind": "ready" if isinstance(answer, Ready) else "failed", **asdict(answer)}

    def largest_difference(self, request_id: str) -> float:
        """Between the KV of [0, n - 1) that came and that of one forward pass with nobody else's help."""
        request = self._requests[request_id]
        n, size = len(request.token_ids) - 1, LLAMA_KV.page_size
        num_pages = -(-n // size)
        shape = (num_pages, LLAMA_KV.num_kv_heads, 2, size, LLAMA_KV.head_dim)
        alone = [torch.zeros(shape) for _ in range(LLAMA_KV.num_layers)]
        self._model.forward(request.token_ids[:n], 0, range(num_pages), alone)
        memory = self._site.memories[self._decoder.fabric.address]
        came = layer_views(memory, self._decoder.model.layout)
        table = list(request.reservation.pages[:num_pages])
        in_order = [  # [n, kv heads, 2, head_dim]
            [layer.permute(0, 3, 1, 2, 4).flatten(0, 1)[:n] for layer in (came_layer[table], alone_layer)]
            for came_layer, alone_layer in zip(came, alone, strict=True)
        ]
        return max(float((ours - theirs).abs().max()) for ours, theirs in in_order)

    def finish(self, request_id: str) -> None:
        self._decoder.finish(self._requests.pop(request_id))

    def settled(self, seconds: float = 10.0) -> dict[str, Any]:
        """Once no ticket is open, or that time is over: pages and tickets, and that free pages are as they were."""
        self._until(lambda: self._decoder.messenger.statistics().num_open == 0, seconds)
        self._decoder.pool.look()
        self._decoder.messenger.check()
        return {**asdict(self._decoder.messenger.statistics()), **asdict(self._decoder.pool.statistics())}

    def wait(self, seconds: float) -> None:
        self._until(lambda: False, seconds)

    def _until(self, holds: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        self._site.wait_for(lambda: holds() or time.monotonic() > end, self._decoder)
        return holds()


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little")


def serve_prefiller(address: str) -> None:
    # The process of the messenger's tests, with its fabric on this host's address.
    prefiller_process.NativeFabric = lambda fd, length, **_: open_fabric(fd, length, address)  # type: ignore
    asyncio.run(prefiller_process._Prefiller(num_pages=PAGES, chunk_tokens=CHUNK, transfer="layers").run())


if __name__ == "__main__":
    _, _role, _address = sys.argv
    if _role == "prefiller":
        serve_prefiller(_address)
    else:
        _decoder = HostDecoder(_address)
        serve(_decoder, {})
