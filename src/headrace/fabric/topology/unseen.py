"""What a snapshot does not show, in words: containers, virtual machines and firmware hide parts. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from headrace.fabric.topology.machine import Gpu, Nic, NumaNode, PciFunction, Port
from headrace.fabric.topology.models import has_rdma
from headrace.fabric.topology.snapshot import Snapshot


def not_visible(
    snapshot: Snapshot,
    *,
    nodes: Sequence[NumaNode],
    functions: Mapping[str, PciFunction],
    nics: Sequence[Nic],
    gpus: Sequence[Gpu],
) -> Iterator[str]:
    """A line for each thing."""
    yield from _listings(snapshot)
    yield from _cpus(snapshot, nodes)
    yield from _functions(functions, nics)
    yield from _ports(nics)
    yield from _places(nodes, nics, gpus)


def _listings(snapshot: Snapshot) -> Iterator[str]:
    if "bus/pci/devices" not in snapshot.tree:
        yield "PCI devices (/sys/bus/pci/devices): GPUs are not known without them"
    if "class/infiniband" not in snapshot.tree:
        yield "RDMA devices (/sys/class/infiniband): no RDMA driver is loaded, or they are hidden from this process"
    if "class/net" not in snapshot.tree:
        yield "network interfaces (/sys/class/net)"


def _cpus(snapshot: Snapshot, nodes: Sequence[NumaNode]) -> Iterator[str]:
    if not nodes:
        yield "NUMA nodes (/sys/devices/system/node)"
    if snapshot.cpus_allowed is None:
        yield "which CPUs a process may use: not recorded, so all that are online count"


def _functions(functions: Mapping[str, PciFunction], nics: Sequence[Nic]) -> Iterator[str]:
    masked = [address for address, function in functions.items() if function.class_code is None]
    if masked:
        yield f"what {_listed(masked)} {_is(masked)}: the class cannot be read"
    seen = {nic.path.address for nic in nics if nic.path and nic.rdma}
    lost = [address for address, function in functions.items() if has_rdma(function) and address not in seen]
    if lost:
        yield f"RDMA devices of {_listed(lost)}, which by their PCI ids have some"


def _ports(nics: Sequence[Nic]) -> Iterator[str]:
    ports = [port for nic in nics for port in (nic.rdma, *nic.interfaces) if port is not None]
    if silent := [port.name for port in ports if _is_silent(port)]:
        yield f"state or rate of {_listed(silent)}"


def _is_silent(port: Port) -> bool:
    return port.is_up is None or (port.is_up and port.rate_gbps is None)


def _places(nodes: Sequence[NumaNode], nics: Sequence[Nic], gpus: Sequence[Gpu]) -> Iterator[str]:
    if nowhere := [nic.name for nic in nics if nic.path is None]:
        yield f"where in the machine {_listed(nowhere)} {_is(nowhere)}: no PCI device stands behind"
    if nodes:
        placed: list[Gpu | Nic] = [*gpus, *(nic for nic in nics if nic.path)]
        if homeless := [device.name for device in placed if device.numa_node is None]:
            yield f"NUMA node of {_listed(homeless)}: the firmware does not tell it"


def _listed(names: Sequence[str]) -> str:
    """All of a few; of many, some and how many more."""
    shown = names if len(names) <= 8 else names[:6]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(shown) < len(names) else "")


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
