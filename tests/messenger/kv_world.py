"""Prefillers and decoders of a site: real messengers, pages and leases, a pattern for a model.

One thread moves everything: `turn` of a process is what its loop would do. A site is a loopback network with its own
clock, or real endpoints over one transport, all in this process. Free pages are poisoned, and looked at
before they are used again, so a byte that lands late in a page that nobody gave away is found wherever it lands.
"""

import random
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import numpy as np
from pattern_model import POISON, PatternModel, prefix_keys

from headrace.fabric.interface import LAYERS_PER_STEP, Fabric, Imm, PeerId
from headrace.fabric.native import NativeFabric, Transport
from headrace.kvcache.layout import KVLayout, PoolLayout
from headrace.kvcache.memory import PoolMemory
from headrace.kvcache.pages import PagePool
from headrace.kvcache.prefix import PrefixIndex, num_whole_pages, page_hashes
from headrace.kvcache.reservation import Reservation, try_reserve
from headrace.kvcache.sharding import Sharding
from headrace.messenger.aux import aux_bytes, aux_slot_bytes
from headrace.messenger.decoder import DecoderMessenger
from headrace.messenger.entries import DecoderOptions
from headrace.messenger.hello import Identity
from headrace.messenger.jobs import Chunk, PrefillerOptions, Transfer
from headrace.messenger.landings import TicketRequest
from headrace.messenger.outcomes import (
    DecoderOutcome,
    JobDropped,
    PeerReady,
    PeerRefused,
    PrefillJob,
    Ready,
    TicketFailed,
)
from headrace.messenger.prefiller import PrefillerMessenger
from headrace.messenger.process import ProcessName
from headrace.messenger.slots import slot_of
from headrace.protocol.control import Granted, Reserve
from headrace.protocol.messages import FabricRole, Ticket, Tier
from headrace.testing import Faults, LoopbackFabric, LoopbackNetwork, Revocation

KV = KVLayout(num_layers=3, num_kv_heads=2, page_size=4, head_dim=4, dtype="fp32")
MAX_MODEL_LEN = 256


def pool_layout(num_pages: int, *, num_aux_slots: int = 8, kv: KVLayout = KV) -> PoolLayout:
    return PoolLayout(
        kv=kv,
        num_pages=num_pages,
        num_aux_slots=num_aux_slots,
        aux_slot_bytes=aux_slot_bytes(MAX_MODEL_LEN, kv.page_size),
    )


pattern_model = cache(PatternModel)
"""It has no state: one for all processes of a kind, of which random histories start thousands."""


class PoisonedPool(PagePool):
    """Poisons what becomes free, and finds it touched when it is handed out again."""

    def __init__(self, model: PatternModel, memory: np.ndarray) -> None:
        super().__init__(model.layout.num_pages, PrefixIndex())
        self._model, self._memory = model, memory
        model.poison(memory, range(model.layout.num_pages))

    def try_allocate(self, num: int) -> list[int] | None:
        self.look()
        return super().try_allocate(num)

    def release(self, pages: Sequence[int]) -> None:
        before = set(self._free)
        super().release(pages)
        self._model.poison(self._memory, sorted(set(self._free) - before))

    def readmit(self, pages: Sequence[int]) -> None:
        super().readmit(pages)
        self._model.poison(self._memory, pages)

    def look(self) -> None:
        touched = self._model.touched(self._memory, self._free)
        assert not touched, f"bytes landed in free pages {touched}"


class Site(Protocol):
    """Where endpoints are made, what time it is, and how things come to rest."""

    rng: random.Random

    @property
    def now(self) -> float: ...

    def endpoint(self, layout: PoolLayout) -> tuple[Fabric, np.ndarray]:
        """A fabric and its memory, `[total_bytes] uint8`."""
        ...

    def nudge(self) -> None:
        """Let something happen, if anything can."""
        ...

    def settle(self, *processes: "PrefillerProcess | DecoderProcess") -> None:
        """Turn the processes until nothing moves any more, without waiting for timers."""
        ...

    def wait_for(self, holds: Callable[[], bool], *processes: "PrefillerProcess | DecoderProcess") -> None:
        """Settle until it holds; fails when it never does."""
        ...


class LoopbackSite:
    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        revocation: Revocation = "at once",
        *,
        silence_s: float | None = None,
    ) -> None:
        self.network = LoopbackNetwork(seed=seed, faults=faults, revocation=revocation, silence_s=silence_s)
        self.rng = self.network.rng

    @property
    def now(self) -> float:
        return self.network.now

    def endpoint(self, layout: PoolLayout) -> tuple[LoopbackFabric, np.ndarray]:
        memory = np.zeros(layout.total_bytes, dtype=np.uint8)
        return LoopbackFabric(self.network, memory), memory

    def nudge(self) -> None:
        self.network.step()

    def settle(self, *processes: "PrefillerProcess | DecoderProcess") -> None:
        while True:
            for process in processes:
                process.turn()
            if not self.network.step():
                due = self.network.next_due()
                if due is None:
                    break
                self.network.advance(max(0.0, due - self.network.now))
        for process in processes:
            process.turn()

    def wait_for(self, holds: Callable[[], bool], *processes: "PrefillerProcess | DecoderProcess") -> None:
        self.settle(*processes)
        assert holds(), f"never: {processes}"


NATIVE_TRANSPORTS: tuple[Transport, ...] = ("tcp", "mapped")


class NativeSite:
    """Endpoints of this process over the real fabric and one of its transports, on the real clock."""

    DEADLINE_S = 20.0
    QUIET_S = 0.02

    def __init__(self, transport: Transport = "tcp") -> None:
        self.transport = transport
        self.rng: random.Random = random.SystemRandom()  # uuids: a process started twice is two
        self._fabrics: list[NativeFabric] = []
        self.memories: dict[bytes, PoolMemory] = {}

    @property
    def now(self) -> float:
        return time.monotonic()

    def endpoint(self, layout: PoolLayout) -> tuple[Fabric, np.ndarray]:
        memory = PoolMemory(layout.total_bytes)
        fabric = NativeFabric(memory.fd, memory.length, transports=(self.transport,))
        self._fabrics.append(fabric)
        self.memories[fabric.address] = memory
        return fabric, memory.bytes

    def nudge(self) -> None:
        time.sleep(0)  # the owner threads need no push, only the interpreter's leave

    def settle(self, *processes: "PrefillerProcess | DecoderProcess") -> None:
        while self._turn_once(*processes):
            pass

    def wait_for(self, holds: Callable[[], bool], *processes: "PrefillerProcess | DecoderProcess") -> None:
        deadline = self.now + self.DEADLINE_S
        while not holds():
            self._turn_once(*processes)
            assert self.now < deadline, f"never: {processes}"

    def _turn_once(self, *processes: "PrefillerProcess | DecoderProcess") -> bool:
        """Whether the fabrics told anything within QUIET_S."""
        fds = [process.fabric.event_fd for process in processes if process.runs]
        told = bool(select.select(fds, [], [], self.QUIET_S)[0])
        for process in processes:
            process.turn()
        return told

    def close(self) -> None:
        for fabric in self._fabrics:
            fabric.close()


class Process:
    """What both roles have: one memory, one fabric, a model and a pool for each data-parallel group. `model` and `pool`
    are those of the first."""

    def __init__(
        self,
        site: Site,
        layout: PoolLayout,
        *,
        role: FabricRole,
        fingerprint: str = "model",
        sharding: Sharding | None = None,
    ) -> None:
        self.site = site
        sharding = sharding or Sharding(kv=layout.kv)
        self.models = [pattern_model(layout, sharding, group) for group in range(sharding.dp)]
        self.model = self.models[0]
        self.fabric, self.memory = site.endpoint(layout)
        self.memory[:] = POISON  # aux slots, and what is between and behind the ranks
        self.pools = [PoisonedPool(model, self.memory) for model in self.models]
        self.pool = self.pools[0]
        self.dead = False
        self.hung = False
        self.identity = Identity(
            uuid=f"{site.rng.getrandbits(128):032x}",
            role=role,
            fingerprint=fingerprint,
            sharding=sharding,
            pool=layout,
            process=ProcessName(host="loopback", pid=1 + site.rng.getrandbits(20), started=0),
        )

    @property
    def runs(self) -> bool:
        return not (self.dead or self.hung)


@dataclass(slots=True)
class _Prompt:
    job: PrefillJob
    computed: int
    keys: np.ndarray


class PrefillerProcess(Process):
    def __init__(
        self,
        site: Site,
        layout: PoolLayout,
        *,
        options: PrefillerOptions = PrefillerOptions(lease_tokens=64, reserve_tokens=16),
        transfer: Transfer = "layers",
        chunk_tokens: int = 8,
        fingerprint: str = "model",
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(site, layout, role="prefiller", fingerprint=fingerprint, sharding=sharding)
        self.messenger = PrefillerMessenger(
            fabric=self.fabric,
            identity=self.identity,
            pages=self.pool,
            memory=self.memory,
            options=replace(options, transfer=transfer),
        )
        self.chunk_tokens = chunk_tokens
        self.prompts: dict[Ticket, _Prompt] = {}
        self.decoders: dict[str, PeerId] = {}
        self.refused: list[PeerRefused] = []
        self.step = 0
        self.running: tuple[list[tuple[_Prompt, Chunk]], int] | None = None  # (chunks, layers done)

    def turn(self) -> None:
        if not self.runs:
            return
        self.messenger.handle(self.fabric.drain_events(), self.site.now)
        self.messenger.advance(self.site.now)
        for outcome in self.messenger.drain_outcomes():
            match outcome:
                case PrefillJob():
                    keys = prefix_keys(outcome.token_ids)
                    self.prompts[outcome.ticket] = _Prompt(outcome, outcome.cached_len, keys)
                case JobDropped():
                    self.prompts.pop(outcome.ticket, None)
                case PeerReady():
                    self.decoders[outcome.uuid] = outcome.peer
                case PeerRefused():
                    self.refused.append(outcome)

    def begin_step(self) -> bool:
        """Plan the next step: the oldest prompts, up to chunk_tokens in all."""
        assert self.running is None
        room, chunks = self.chunk_tokens, []
        for prompt in self.prompts.values():
            end = min(prompt.computed + room, len(prompt.job.token_ids) - 1)
            if end > prompt.computed:
                chunks.append((prompt, Chunk(ticket=prompt.job.ticket, begin=prompt.computed, end=end)))
                room -= end - prompt.computed
        if not chunks:
            return False
        self.step += 1
        self.messenger.begin_step(self.step, [chunk for _, chunk in chunks])
        self.running = (chunks, 0)
        return True

    def compute_layer(self) -> bool:
        """One layer of the running step; False when there is none left."""
        assert self.running is not None
        chunks, layer = self.running
        if layer == self.model.layout.num_layers:
            return False
        for prompt, chunk in chunks:
            keys = prompt.keys[chunk.begin : chunk.end]
            self.model.compute_layer(self.memory, layer, keys, prompt.job.pages, chunk.begin)
        self.running = (chunks, layer + 1)
        self.fabric.raise_layers(self.step * LAYERS_PER_STEP + layer + 1)
        return True

    def end_step(self, *, fail: bool = False) -> None:
        assert self.running is not None
        chunks, _ = self.running
        self.running = None
        if fail:
            self.messenger.fail_step(self.step, "the step failed", self.site.now)
        else:
            for prompt, chunk in chunks:
                prompt.computed = chunk.end
                if chunk.end == len(prompt.job.token_ids) - 1:
                    self.prompts.pop(prompt.job.ticket, None)
            self.messenger.commit_step(self.step, self.site.now)
        self.turn()

    def lease(self, request_id: str, num_tokens: int, tier: Tier = "interactive") -> str | None:
        reserve = Reserve(
            sender=self.identity.uuid, request_id=request_id, num_tokens=num_tokens, tier=tier, remaining_s=30.0
        )
        answer = self.messenger.reserve(reserve, self.site.now)
        return answer.lease if isinstance(answer, Granted) else None


@dataclass(slots=True, kw_only=True)
class Request:
    """A request as its decoder's role keeps it."""

    request_id: str
    token_ids: tuple[int, ...]
    group: int
    reservation: Reservation
    imm: Imm | None = None
    answers: list[Ready | TicketFailed] = field(default_factory=list)


class DecoderProcess(Process):
    def __init__(
        self,
        site: Site,
        layout: PoolLayout,
        *,
        options: DecoderOptions = DecoderOptions(),
        fingerprint: str = "model",
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(site, layout, role="decoder", fingerprint=fingerprint, sharding=sharding)
        self.messenger = DecoderMessenger(
            fabric=self.fabric,
            identity=self.identity,
            pools=self.pools,
            memory=self.memory,
            rng=random.Random(site.rng.getrandbits(64)),
            options=options,
        )
        self.salt = fingerprint.encode()
        self.requests: dict[str, Request] = {}
        self.by_imm: dict[Imm, Request] = {}
        self.outcomes: list[DecoderOutcome] = []

    def reserve(self, request_id: str, token_ids: tuple[int, ...], group: int = 0) -> Request | None:
        size = self.model.layout.kv.page_size
        hashes = page_hashes(token_ids[: len(token_ids) - 1], size, self.salt)
        reservation = try_reserve(self.pools[group], hashes, len(token_ids), 2, size)
        if reservation is None:
            return None
        request = Request(request_id=request_id, token_ids=token_ids, group=group, reservation=reservation)
        self.requests[request_id] = request
        return request

    def needs_prefill(self, request: Request) -> bool:
        return request.reservation.cached_len < len(request.token_ids) - 1

    def open(self, request: Request, prefiller: PeerId, lease: str, *, remaining_s: float = 30.0) -> Imm | None:
        size = self.model.layout.kv.page_size
        num_prefilled = len(request.token_ids) - 1
        first, end = request.reservation.num_hit_pages, -(-num_prefilled // size)
        request.imm = self.messenger.try_open_ticket(
            TicketRequest(
                request_id=request.request_id,
                prefiller=prefiller,
                lease=lease,
                token_ids=request.token_ids,
                cached_len=request.reservation.cached_len,
                group=request.group,
                pages=request.reservation.pages[first:end],
                hashes=tuple(page_hashes(request.token_ids[:num_prefilled], size, self.salt)),
                remaining_s=remaining_s,
            ),
            self.site.now,
        )
        if request.imm is not None:
            self.by_imm[request.imm] = request
        return request.imm

    def turn(self) -> list[Request]:
        """-> the requests that have their answer now."""
        if not self.runs:
            return []
        self.messenger.handle(self.fabric.drain_events(), self.site.now)
        self.messenger.advance(self.site.now)
        answered = []
        for outcome in self.messenger.drain_outcomes():
            self.outcomes.append(outcome)
            if isinstance(outcome, Ready | TicketFailed):
                request = self.by_imm[outcome.imm]
                request.answers.append(outcome)
                assert len(request.answers) == 1, f"answered twice: {request.answers}"
                answered.append(request)
        return answered

    @staticmethod
    def keys(request: Request) -> np.ndarray:
        return prefix_keys(request.token_ids[:-1])

    def wrong_bytes(self, request: Request) -> list[str]:
        """Where the KV of [0, n-1) is not this prompt's."""
        model = self.models[request.group]
        return model.differences(self.memory, self.keys(request), request.reservation.pages, 0)

    def finish(self, request: Request) -> None:
        """Give back what the request holds: everything, or all but its ticket's pages when that failed."""
        del self.requests[request.request_id]
        table = request.reservation.pages
        if request.answers and isinstance(request.answers[0], TicketFailed):
            size = self.model.layout.kv.page_size
            first, end = request.reservation.num_hit_pages, -(-(len(request.token_ids) - 1) // size)
            table = (*table[:first], *table[end:])
        self.pools[request.group].release(table)

    def written_elsewhere(self, request: Request, before: np.ndarray) -> int:
        """Bytes that changed since `before` and are neither in the ticket's pages nor in its aux write."""
        layout, size = self.model.layout, self.model.layout.kv.page_size
        assert request.imm is not None
        first, end = request.reservation.num_hit_pages, -(-(len(request.token_ids) - 1) // size)
        changed = before != self.memory
        for pages in self.models[request.group].views(changed):
            pages[list(request.reservation.pages[first:end])] = False
        aux = layout.aux_offset(slot_of(request.imm))
        changed[aux : aux + aux_bytes(end - first)] = False
        return int(changed.sum())

    def finish_when_answered(self, request: Request) -> None:
        self.site.wait_for(lambda: bool(request.answers), self)
        self.finish(request)

    def index_is_sane(self, request: Request) -> bool:
        whole = num_whole_pages(len(request.token_ids), self.model.layout.kv.page_size)
        return all(page not in self.pools[request.group].prefix for page in request.reservation.pages[whole:])


def pair(
    site: Site,
    *,
    num_pages: int = 64,
    transfer: Transfer = "layers",
    decoder_options: DecoderOptions = DecoderOptions(),
) -> tuple[PrefillerProcess, DecoderProcess, PeerId]:
    """One of each, greeted."""
    prefiller = PrefillerProcess(site, pool_layout(num_pages), transfer=transfer)
    decoder = DecoderProcess(site, pool_layout(num_pages + 3), options=decoder_options)
    return prefiller, decoder, greet(decoder, prefiller)


def greet(decoder: DecoderProcess, prefiller: PrefillerProcess) -> PeerId:
    peer = decoder.messenger.greet(prefiller.fabric.address, decoder.site.now)
    decoder.site.wait_for(lambda: decoder.messenger.is_ready(peer), prefiller, decoder)
    return peer


def run_prompts(prefiller: PrefillerProcess, *others: DecoderProcess) -> None:
    """Compute everything that is queued, delivering all the while."""
    prefiller.site.settle(prefiller, *others)
    while prefiller.begin_step():
        while prefiller.compute_layer():
            prefiller.site.nudge()
        prefiller.end_step()
        prefiller.site.settle(prefiller, *others)
