"""A deployment that could be built: pools of instances that are alike, and what they are connected by. Pure values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.planner.costs.roofline import Sharding
from headrace.planner.scenario import Instance, KvModel, LinkModel, Network, Role, Scenario, StepModel

Objective = Literal["devices", "cost", "power"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Of an instance, on `sharding.num_devices` devices. `num_pages`: of one of its groups."""

    role: Role
    device: str
    sharding: Sharding
    steps: StepModel
    num_pages: int
    page_size: int
    chunk_tokens: int
    max_running: int
    tpot_s: float | None
    price_hour: float
    watts: float
    per_host: int

    @property
    def num_devices(self) -> int:
        return self.sharding.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    kind: Kind
    count: int

    @property
    def num_devices(self) -> int:
        return self.count * self.kind.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all candidates have in common. `same_host`: between devices of a host; None: as between hosts."""

    routed: LinkModel
    same_host: LinkModel | None
    gateway_s: float
    hand_over_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Colocated: one pool; split: prefillers, then decoders. `is_paired`: a prefiller and decoders share hosts as far
    as these go, so that KV stays inside; otherwise each pool has hosts of its own."""

    pools: tuple[Pool, ...]
    kv: KvModel
    around: Surroundings
    is_paired: bool = False

    @property
    def is_split(self) -> bool:
        return len(self.pools) == 2

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def price_hour(self) -> float:
        return sum(pool.num_devices * pool.kind.price_hour for pool in self.pools)

    @property
    def watts(self) -> float:
        return sum(pool.num_devices * pool.kind.watts for pool in self.pools)

    def amount(self, objective: Objective) -> float:
        """What is to be least."""
        return {"devices": float(self.num_devices), "cost": self.price_hour, "power": self.watts}[objective]

    def of_counts(self, counts: Sequence[int]) -> "Candidate":
        pools = tuple(replace(pool, count=count) for pool, count in zip(self.pools, counts, strict=True))
        return replace(self, pools=pools)

    def with_link(self, factor: float) -> "Candidate":
        """Its bandwidth between hosts times that."""
        routed = replace(self.around.routed, bytes_s=self.around.routed.bytes_s * factor)
        return replace(self, around=replace(self.around, routed=routed))

    def scenario(self, *, without: Role | None = None) -> Scenario:
        """`without`: one instance of that role is not there, its groups with it."""
        instances = [one for pool in self.pools for one in _instances(pool, is_paired=self.is_paired)]
        if without is not None:
            gone = next(one.name.split("/")[0] for one in instances if one.role == without)
            instances = [one for one in instances if one.name.split("/")[0] != gone]
        return Scenario(
            instances=instances,
            kv=self.kv,
            network=self._network(),
            gateway_s=self.around.gateway_s,
            hand_over_s=self.around.hand_over_s,
        )

    def transfer_s(self, prompt_tokens: int) -> float:
        """That a prompt's KV keeps the link between a prefiller and its nearest decoder."""
        network, num_pages = self._network(), -(-prompt_tokens // self.pools[0].kind.page_size)
        link = network.same_host if self.is_paired and network.same_host is not None else network.routed
        return link.seconds(num_pages * self.kv.page_bytes, num_pages * self.kv.page_messages)

    def _network(self) -> Network:
        """Each device has NICs of its own; all of an instance's carry a request together, as many as both have."""
        nics = min(pool.kind.num_devices for pool in self.pools)
        host = self.around.same_host
        return Network(
            routed=_of_devices(self.around.routed, nics), same_host=None if host is None else _of_devices(host, nics)
        )

    def __str__(self) -> str:
        return " + ".join(f"{pool.count} {_ROLES[pool.kind.role]} {pool.kind.sharding}" for pool in self.pools)


_ROLES = {"prefiller": "prefillers", "decoder": "decoders", "colocated": "colocated"}


def _instances(pool: Pool, *, is_paired: bool) -> list[Instance]:
    """Each group of a data-parallel instance is an instance of the simulation. Hosts are filled one after the other; in
    pairs the instances of both pools are counted from the same host on."""
    kind = pool.kind
    each_host = max(1, kind.per_host // kind.num_devices // (2 if is_paired else 1))
    return [
        Instance(
            name=f"{kind.role}-{nth}/{group}",
            role=kind.role,
            steps=kind.steps,
            num_pages=kind.num_pages,
            page_size=kind.page_size,
            chunk_tokens=kind.chunk_tokens,
            max_running=kind.max_running,
            tpot_s=kind.tpot_s,
            host=f"host-{nth // each_host}" if is_paired else f"{kind.role}-host-{nth // each_host}",
        )
        for nth in range(pool.count)
        for group in range(kind.sharding.dp)
    ]


def _of_devices(link: LinkModel, num_devices: int) -> LinkModel:
    return replace(link, bytes_s=link.bytes_s * num_devices, message_s=link.message_s / num_devices)
