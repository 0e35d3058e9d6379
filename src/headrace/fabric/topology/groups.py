"""Which NICs serve which device: its domain group, and the CPUs on which its owner thread belongs. Pure.

A device is a GPU, or the memory of a NUMA node that has no GPU. Its group is made of the NICs nearest to it, all at the
same distance: one behind the same PCI switch is not mixed with one behind the other socket, whose path would then set
the pace. Nearest of all that are not down:

    same switch < same host bridge < same NUMA node < not known < another NUMA node (by the firmware's distances)

Within a level fewer PCI hops are nearer. Of the nearest only the fastest count, since pages are spread evenly over a
group. These are dealt out among the devices that share them: everybody gets one, the least used first; what nobody has
yet goes round, up to four each. So nobody is without a NIC, or shares one while another as near serves nobody.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from headrace.fabric.topology.machine import Gpu, HostMemory, Nic, Topology, Transport

MOST_NICS = 4
"""Of a group (DESIGN, "Fabric")."""

TRANSPORTS: tuple[Transport, ...] = ("efa", "verbs", "tcp")
"""The best first."""

Device = Gpu | HostMemory


class Level(IntEnum):
    """Of nearness; the lower, the nearer."""

    SAME_SWITCH = 0
    SAME_HOST_BRIDGE = 1
    SAME_NUMA_NODE = 2
    UNKNOWN = 3
    OTHER_NUMA_NODE = 4


@dataclass(frozen=True, slots=True, order=True)
class Distance:
    """`steps` orders within a level: PCI hops, or the firmware's distance between NUMA nodes."""

    level: Level
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainGroup:
    """`cpus` are near the NICs if `is_near`; else none of those may be used, or none is known, and they are all that
    may be used."""

    device: Device
    transport: Transport
    nics: tuple[Nic, ...]
    distance: Distance
    cpus: tuple[int, ...]
    is_near: bool

    @property
    def port_names(self) -> tuple[str, ...]:
        """What is opened: RDMA devices, or interfaces for tcp."""
        ports = [nic.port(self.transport) for nic in self.nics]
        return tuple(port.name for port in ports if port)

    @property
    def rate_gbps(self) -> float | None:
        """Of all its ports together."""
        rates = [port.rate_gbps for nic in self.nics if (port := nic.port(self.transport))]
        return sum(rate for rate in rates if rate) if all(rates) else None


def plan_domain_groups(topology: Topology, transport: Transport | None = None) -> tuple[DomainGroup, ...]:
    """One for each device, GPUs first; none at all where no NIC serves `transport` (None: the best that one does)."""
    chosen = transport or best_transport(topology)
    nics = usable_nics(topology, chosen) if chosen else ()
    if chosen is None or not nics:
        return ()
    load: Counter[int] = Counter()
    groups = []
    kinds: tuple[Sequence[Device], ...] = (topology.gpus, memories(topology))
    for devices in kinds:
        nearest = [_nearest(topology, device, nics, chosen) for device in devices]
        dealt = _deal([choice for _, choice in nearest], load)
        for device, (distance, _), share in zip(devices, nearest, dealt, strict=True):
            near = tuple(nics[index] for index in sorted(share))
            cpus, is_near = _owner_cpus(topology, device, near)
            groups.append(
                DomainGroup(device=device, transport=chosen, nics=near, distance=distance, cpus=cpus, is_near=is_near)
            )
    return tuple(groups)


def best_transport(topology: Topology) -> Transport | None:
    return next((transport for transport in TRANSPORTS if usable_nics(topology, transport)), None)


def usable_nics(topology: Topology, transport: Transport) -> tuple[Nic, ...]:
    """In PCI order, whatever the order in the topology; virtual ones last."""
    usable = [nic for nic in topology.nics if nic.port(transport)]
    return tuple(sorted(usable, key=lambda nic: (nic.path is None, nic.path.sort_key if nic.path else (), nic.name)))


def memories(topology: Topology) -> tuple[HostMemory, ...]:
    """Of the NUMA nodes that have CPUs and no GPU."""
    if not topology.numa_nodes:
        return () if topology.gpus else (HostMemory(numa_node=None),)
    taken = {gpu.numa_node for gpu in topology.gpus}
    free = [node.number for node in topology.numa_nodes if node.cpus and node.number not in taken]
    return tuple(HostMemory(numa_node=number) for number in free)


def distance_between(topology: Topology, device: Device, nic: Nic) -> Distance:
    if isinstance(device, Gpu) and nic.path is not None:
        shared = device.path.num_shared(nic.path)
        if shared > 0:
            level = Level.SAME_SWITCH if shared > 1 else Level.SAME_HOST_BRIDGE
            return Distance(level, device.path.num_hops(nic.path))
    if device.numa_node is None or nic.numa_node is None:
        return Distance(Level.UNKNOWN)
    if device.numa_node == nic.numa_node:
        return Distance(Level.SAME_NUMA_NODE)
    node = topology.node(device.numa_node)
    return Distance(Level.OTHER_NUMA_NODE, node.distances.get(nic.numa_node, 0) if node else 0)


def _nearest(
    topology: Topology, device: Device, nics: Sequence[Nic], transport: Transport
) -> tuple[Distance, list[int]]:
    """How far, and the places in `nics` of the fastest that are no farther."""
    distances = [distance_between(topology, device, nic) for nic in nics]
    best = min(distances)
    rates = {index: _rate(nics[index], transport) for index, far in enumerate(distances) if far == best}
    fastest = max(rates.values())
    return best, [index for index, rate in rates.items() if rate == fastest]


def _rate(nic: Nic, transport: Transport) -> float:
    port = nic.port(transport)
    return (port.rate_gbps or 0.0) if port else 0.0


def _deal(choices: Sequence[Sequence[int]], load: Counter[int]) -> list[list[int]]:
    """A share of NICs for each device, from its choices; `load` counts whom each NIC serves, and goes on counting.

    Who has the fewest choices goes first: by the nature of PCI trees, choices are either nested or apart, and then
    nobody takes the only one of somebody else while having another.
    """
    shares: list[list[int]] = [[] for _ in choices]
    order = sorted(range(len(choices)), key=lambda device: (len(choices[device]), device))
    for turn in range(MOST_NICS):
        for device in order:
            left = [nic for nic in choices[device] if nic not in shares[device] and (turn == 0 or load[nic] == 0)]
            if left:
                nic = min(left, key=lambda nic: (load[nic], nic))
                shares[device].append(nic)
                load[nic] += 1
    return shares


def _owner_cpus(topology: Topology, device: Device, nics: Sequence[Nic]) -> tuple[tuple[int, ...], bool]:
    numbers = {nic.numa_node for nic in nics} - {None} or {device.numa_node}
    nodes = [node for number in numbers if (node := topology.node(number))]
    near = {cpu for node in nodes for cpu in node.cpus}.intersection(topology.usable_cpus)
    return (tuple(sorted(near)), True) if near else (topology.usable_cpus, False)
