"""A machine as far as the fabric cares: PCI functions, NUMA nodes, NICs, GPUs. Frozen records; pure.

None means everywhere: not told, or not visible to this process. Nothing is guessed in its place; `not_visible` of the
Topology says in words what is missing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

NicKind = Literal["efa", "verbs", "ethernet"]
Transport = Literal["efa", "verbs", "tcp"]

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class PciPath:
    """The way to a PCI function: its host bridge (`pci0000:44`), the bridges below, itself at last (`0000:4f:00.0`).

    A switch is two levels of bridges: its upstream port, and the downstream port of each device.
    """

    steps: tuple[str, ...]

    @classmethod
    def of(cls, directory: str) -> "PciPath | None":
        """To the last PCI function on the way to a directory of sysfs; None where there is none."""
        steps = [step for step in directory.split("/") if _ADDRESS.fullmatch(step) or _HOST_BRIDGE.fullmatch(step)]
        return cls(tuple(steps)) if steps and _ADDRESS.fullmatch(steps[-1]) else None

    @property
    def address(self) -> str:
        return self.steps[-1]

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Of the address: domain, bus, device, function."""
        return tuple(int(part, 16) for part in self.address.replace(".", ":").split(":"))

    def num_shared(self, other: "PciPath") -> int:
        """Steps that both have in common: 0 for two host bridges, 1 for one, more below a bridge of both."""
        pairs = zip(self.steps, other.steps, strict=False)
        shortest = min(len(self.steps), len(other.steps))
        return next((count for count, (ours, theirs) in enumerate(pairs) if ours != theirs), shortest)

    def num_hops(self, other: "PciPath") -> int:
        """Up to what both have in common, and down again."""
        return len(self.steps) + len(other.steps) - 2 * self.num_shared(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """As negotiated: `gt_per_s` billions of transfers a second on each of `num_lanes`."""

    gt_per_s: float
    num_lanes: int

    @property
    def gbps(self) -> float:
        """Payload and packet headers. Source: PCI Express 1 and 2 send 8 of 10 bits, 3 and later 128 of 130."""
        return self.gt_per_s * self.num_lanes * (0.8 if self.gt_per_s <= 5 else 128 / 130)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFunction:
    """`class_code` is 24 bits: base class, subclass, programming interface."""

    path: PciPath
    class_code: int | None
    vendor_id: int | None
    device_id: int | None
    numa_node: int | None
    driver: str | None
    link: PcieLink | None

    def is_class(self, code: int, *, num_bits: int) -> bool:
        """Whether the first 8 or 16 bits of the class are these."""
        return self.class_code is not None and self.class_code >> (24 - num_bits) == code


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """`distances`: to each node, itself included, as the firmware gives them: 10 is here."""

    number: int
    cpus: tuple[int, ...]
    distances: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """An RDMA device or a network interface. `rate_gbps` only of one that is not down."""

    name: str
    is_up: bool | None
    rate_gbps: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One PCI function with its RDMA device, its interfaces, or both. `function` None: a virtual interface, as
    containers have them, or one of a bus without PCI."""

    kind: NicKind
    function: PciFunction | None
    rdma: Port | None
    interfaces: tuple[Port, ...]

    @property
    def name(self) -> str:
        return (self.rdma or self.interfaces[0]).name

    @property
    def path(self) -> PciPath | None:
        return self.function.path if self.function else None

    @property
    def numa_node(self) -> int | None:
        return self.function.numa_node if self.function else None

    def port(self, transport: Transport) -> Port | None:
        """What this transport would open; None for what it cannot use, or what is down."""
        if transport == "tcp":
            return next((port for port in self.interfaces if port.is_up is not False), None)
        usable = self.rdma is not None and self.kind == transport and self.rdma.is_up is not False
        return self.rdma if usable else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`index` counts in PCI order, as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID, over all that sysfs shows."""

    index: int
    function: PciFunction
    model: str | None

    @property
    def name(self) -> str:
        return f"GPU {self.index}"

    @property
    def path(self) -> PciPath:
        return self.function.path

    @property
    def numa_node(self) -> int | None:
        return self.function.numa_node


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of a NUMA node; None where no nodes are visible, for all of the machine's."""

    numa_node: int | None

    @property
    def name(self) -> str:
        return "memory" if self.numa_node is None else f"node {self.numa_node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`usable_cpus`: those that this process may run on; all that are online where that was not recorded."""

    bridges: tuple[PciFunction, ...]
    numa_nodes: tuple[NumaNode, ...]
    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    usable_cpus: tuple[int, ...]
    not_visible: tuple[str, ...]

    def node(self, number: int | None) -> NumaNode | None:
        return next((node for node in self.numa_nodes if node.number == number), None)
