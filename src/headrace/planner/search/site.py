"""What there is to build with: shapes of deployments for a model on devices that are not here. Pure.

A shape is a candidate of one instance a pool; how many of each, `least` finds. Sharding is tried in powers of two, as
far as the model's heads and a host's devices go and the weights fit; batch limits follow from the TPOT budget, the page
size from the link.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from headrace.bench.metrics import Slo, percentile
from headrace.bench.workload import ArrivalList
from headrace.engine.cost import StepSize
from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.kvcache.sharding import Sharding as KvSharding
from headrace.messenger.plan import Side, plan_transfer
from headrace.model.shape import ModelShape
from headrace.model.shard import Shard
from headrace.planner.costs.roofline import Device, RooflineSteps, Sharding
from headrace.planner.costs.work import Work
from headrace.planner.scenario import KvModel, Role, StepModel
from headrace.planner.search.candidate import Candidate, Kind, Pool, Surroundings

USABLE = 0.9
"""Of a device's memory, for weights and KV."""
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
PREFILLER_CHUNKS = (2048, 8192)
PAGE_SIZES = (16, 32, 64, 128)
MESSAGES_SHARE = 0.1
"""Of a transfer's time, what its messages may take beside its bytes."""
MOST_RUNNING = 512
FEWEST_LONGEST = 2
"""Requests of the longest kind that an instance must have room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of a workload, in tokens. `longest`: prompt and output of one request."""

    mean_prompt: float
    mean_output: float
    p90_prompt: float
    longest: int

    @classmethod
    def of(cls, arrivals: ArrivalList) -> "Lengths":
        prompts = [one.prompt_tokens for one in arrivals.arrivals]
        return cls(
            mean_prompt=fmean(prompts),
            mean_output=fmean(one.max_tokens for one in arrivals.arrivals),
            p90_prompt=percentile(prompts, 0.9),
            longest=max(one.prompt_tokens + one.max_tokens for one in arrivals.arrivals),
        )

    @property
    def mean_keys(self) -> float:
        """That a row reads, on average over its life."""
        return self.mean_prompt + self.mean_output / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """`prefill` and `decode` are the devices of the two phases; colocated instances are built of either."""

    shape: ModelShape
    dtype: KVDtype
    prefill: Device
    decode: Device
    around: Surroundings
    lengths: Lengths
    slo: Slo

    @property
    def work(self) -> Work:
        return Work.of(self.shape)

    # ---- shapes ------------------------------------------------------------------------------------------------

    def colocated(self) -> Iterator[Candidate]:
        devices = {device.name: device for device in (self.prefill, self.decode)}
        for device in devices.values():
            for sharding in self._shardings(device, with_groups=True):
                page_size = self._page_size(sharding, sharding)
                for chunk_tokens in CHUNKS:
                    kind = self._kind("colocated", device, sharding, page_size=page_size, chunk_tokens=chunk_tokens)
                    if kind is not None:
                        yield self._candidate((kind,), page_size)

    def split(self) -> Iterator[Candidate]:
        for prefill in self._shardings(self.prefill, with_groups=False):
            for decode in self._shardings(self.decode, with_groups=True):
                page_size = self._page_size(prefill, decode)
                decoder = self._kind("decoder", self.decode, decode, page_size=page_size, chunk_tokens=CHUNKS[0])
                for chunk_tokens in PREFILLER_CHUNKS:
                    prefiller = self._kind(
                        "prefiller", self.prefill, prefill, page_size=page_size, chunk_tokens=chunk_tokens
                    )
                    if prefiller is not None and decoder is not None:
                        yield self._candidate((prefiller, decoder), page_size)

    def _candidate(self, kinds: Sequence[Kind], page_size: int) -> Candidate:
        """In pairs where a host has room for one of each: nothing is lost by it, and KV stays inside."""
        first, last = kinds[0], kinds[-1]
        is_same = len(kinds) == 2 and first.device == last.device
        return Candidate(
            pools=tuple(Pool(kind=kind, count=1) for kind in kinds),
            kv=self.kv(first.sharding, last.sharding, page_size),
            around=self.around,
            is_paired=is_same and 2 * max(first.num_devices, last.num_devices) <= first.per_host,
        )

    # ---- instances ---------------------------------------------------------------------------------------------

    def _shardings(self, device: Device, *, with_groups: bool) -> Iterator[Sharding]:
        for tp in _powers(device.per_host):
            for dp in _powers(device.per_host // tp) if with_groups and self.shape.experts else (1,):
                sharding = Sharding(tp=tp, dp=dp)
                if self._can_be_shared(sharding) and self.num_pages(device, sharding, 16) > 0:
                    yield sharding

    def _can_be_shared(self, sharding: Sharding) -> bool:
        try:
            Shard(tp=sharding.tp, dp=sharding.dp).of(self.shape)
        except InputError:
            return False
        return True

    def _kind(
        self, role: Role, device: Device, sharding: Sharding, *, page_size: int, chunk_tokens: int
    ) -> Kind | None:
        """None where it has no room, or no step is short enough."""
        steps = RooflineSteps(work=self.work, device=device, sharding=sharding)
        num_pages = self.num_pages(device, sharding, page_size)
        if num_pages * page_size < FEWEST_LONGEST * self.lengths.longest:
            return None
        max_running = most_rows(steps, self.lengths, self.slo.tpot_s, most=MOST_RUNNING)
        if not max_running and role != "prefiller":
            return None
        return Kind(
            role=role,
            device=device.name,
            sharding=sharding,
            steps=steps,
            num_pages=num_pages,
            page_size=page_size,
            chunk_tokens=chunk_tokens,
            max_running=max_running or MOST_RUNNING,
            tpot_s=self.slo.tpot_s if role == "decoder" else None,
            price_hour=device.price_hour,
            watts=device.watts,
            per_host=device.per_host,
        )

    def num_pages(self, device: Device, sharding: Sharding, page_size: int) -> int:
        """Of a group, in what the weights leave of each of its devices. Attention and head are on every group, the
        embedding on every rank."""
        work = self.work
        experts, embedding = work.all_expert_bytes, work.embedding_bytes
        held = (work.weight_bytes - experts - embedding) / sharding.tp + experts / sharding.num_devices + embedding
        local = KvSharding(kv=self.shape.kv_layout(page_size, self.dtype), tp=sharding.tp).local
        return max(0, int((device.memory_bytes * USABLE - held) // (local.num_layers * local.page_bytes)))

    # ---- the link ----------------------------------------------------------------------------------------------

    def _page_size(self, prefill: Sharding, decode: Sharding) -> int:
        """The smallest whose messages add little to what its bytes take."""
        link = self.around.routed
        for page_size in PAGE_SIZES:
            kv = self.kv(prefill, decode, page_size)
            if kv.page_messages * link.message_s <= MESSAGES_SHARE * kv.page_bytes / link.bytes_s:
                return page_size
        return PAGE_SIZES[-1]

    def kv(self, prefill: Sharding, decode: Sharding, page_size: int) -> KvModel:
        src, dst = (self._side(sharding, page_size) for sharding in (prefill, decode))
        return KvModel.of(plan_transfer(src, dst, group=0, seed=0))

    def _side(self, sharding: Sharding, page_size: int) -> Side:
        own = KvSharding(kv=self.shape.kv_layout(page_size, self.dtype), tp=sharding.tp, dp=sharding.dp)
        return Side(sharding=own, pool=own.pool(num_pages=2, num_aux_slots=1, aux_slot_bytes=64))


def most_rows(steps: StepModel, lengths: Lengths, tpot_s: float, *, most: int) -> int:
    """That decode together, each with as many keys as is usual, in a step that keeps the budget. 0: not even one."""
    keys = lengths.mean_keys
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if steps.step_s(StepSize(rows=middle, keys=int(middle * keys))) <= tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
