"""What `headrace fabric topology` shows of a topology and its domain groups: tables for people, JSON values. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from headrace.fabric.topology.cpus import cpu_text
from headrace.fabric.topology.groups import DomainGroup, Level
from headrace.fabric.topology.machine import Gpu, Nic, PciFunction, Port, Topology

LEVELS: Mapping[Level, str] = {
    Level.SAME_SWITCH: "same switch",
    Level.SAME_HOST_BRIDGE: "same root",
    Level.SAME_NUMA_NODE: "same node",
    Level.UNKNOWN: "not known",
    Level.OTHER_NUMA_NODE: "other node",
}
"""Of a device and its NICs, on the way between them. Root: a host bridge, one of a CPU's several PCI roots."""

NOT_TOLD = "?"


# ---- tables ----------------------------------------------------------------------------------------------------


def rendered(topology: Topology, groups: Sequence[DomainGroup]) -> Iterator[RenderableType]:
    yield Text("\n".join(_head(topology)))
    if groups:
        yield _title(f"Devices and their NICs, over {groups[0].transport}")
        yield _groups_table(groups)
    else:
        yield _title("No NIC is visible that is up and serves this: no device has a domain group.")
    if topology.nics:
        yield _title("NICs")
        yield _nics_table(topology.nics, groups)
    for title, lines in (("Worth knowing", remarks(topology, groups)), ("Not visible here", topology.not_visible)):
        if lines:
            yield _title(title)
            yield from (_item(line) for line in lines)


def _head(topology: Topology) -> Iterator[str]:
    models = Counter(_gpu_model(gpu) for gpu in topology.gpus)
    yield "GPUs: " + (", ".join(f"{count} {model}" for model, count in models.items()) or "none")
    for node in topology.numa_nodes:
        distances = " ".join(str(steps) for _, steps in sorted(node.distances.items())) or NOT_TOLD
        yield f"NUMA node {node.number}: CPUs {cpu_text(node.cpus) or 'none'}; distances {distances}"
    yield f"CPUs that this process may use: {cpu_text(topology.usable_cpus) or NOT_TOLD}"


def _gpu_model(gpu: Gpu) -> str:
    return gpu.model or _pci_id(gpu.function) or NOT_TOLD


def _pci_id(function: PciFunction) -> str | None:
    if function.vendor_id is None or function.device_id is None:
        return None
    return f"{function.vendor_id:04x}:{function.device_id:04x}"


def _title(text: str) -> RenderableType:
    return Text(f"\n{text}", style="bold")


def _item(line: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_row("-", line)
    return table


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Of 80 columns, with four NICs to a device and names as long as EFA's."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _groups_table(groups: Sequence[DomainGroup]) -> Table:
    table = _table("Device", "PCI", "NUMA", "NICs", "Distance", "Gbit/s", "Owner's CPUs", right=("NUMA", "Gbit/s"))
    for group in groups:
        device = group.device
        address = _address(device.function) if isinstance(device, Gpu) else ""
        ports = " ".join(group.port_names)
        cpus = cpu_text(group.cpus) if group.is_near else f"any: {cpu_text(group.cpus) or NOT_TOLD}"
        table.add_row(
            *(device.name, address, _numa(device.numa_node), ports, LEVELS[group.distance.level]),
            *(_gbps(group.rate_gbps), cpus),
        )
    return table


def _nics_table(nics: Sequence[Nic], groups: Sequence[DomainGroup]) -> Table:
    table = _table("NIC", "PCI", "Kind", "NUMA", "Gbit/s", "PCIe", "Interfaces", "Serves", right=("NUMA", "Gbit/s"))
    for nic in nics:
        rest = nic.interfaces if nic.rdma else nic.interfaces[1:]
        table.add_row(
            *(nic.name, _address(nic.function), nic.kind, _numa(nic.numa_node), _state(nic.rdma or nic.interfaces[0])),
            *(_link(nic), " ".join(_interface(port) for port in rest), ", ".join(_served(nic, groups))),
        )
    return table


def _address(function: PciFunction | None) -> str:
    """Without the domain where it is 0, as lspci shows it."""
    return function.path.address.removeprefix("0000:") if function else ""


def _numa(number: int | None) -> str:
    return NOT_TOLD if number is None else str(number)


def _gbps(rate: float | None) -> str:
    return NOT_TOLD if rate is None else f"{rate:g}"


def _state(port: Port) -> str:
    return "down" if port.is_up is False else _gbps(port.rate_gbps)


def _interface(port: Port) -> str:
    return f"{port.name} (down)" if port.is_up is False else port.name


def _link(nic: Nic) -> str:
    link = nic.function.link if nic.function else None
    return f"{link.gt_per_s:g} GT/s x{link.num_lanes}" if link else NOT_TOLD


def _served(nic: Nic, groups: Sequence[DomainGroup]) -> Iterator[str]:
    devices = [group.device for group in groups if nic in group.nics]
    if gpus := [device.index for device in devices if isinstance(device, Gpu)]:
        yield f"GPU {cpu_text(gpus)}"
    yield from (device.name for device in devices if not isinstance(device, Gpu))


def remarks(topology: Topology, groups: Sequence[DomainGroup]) -> tuple[str, ...]:
    """What slows a group down, in words."""
    lines = []
    for nic in topology.nics:
        port, link = nic.rdma or nic.interfaces[0], nic.function.link if nic.function else None
        if link and port.rate_gbps and link.gbps < port.rate_gbps:
            lines.append(f"{nic.name}: its PCIe link carries {link.gbps:.0f} Gbit/s, less than its port")
        if sum(nic in group.nics for group in groups) > 1:
            lines.append(f"{nic.name}: shared by {', '.join(_served(nic, groups))}, and so are its Gbit/s")
    far = [group.device.name for group in groups if not group.is_near and topology.numa_nodes]
    if far:
        lines.append(f"{', '.join(far)}: no CPU near the NICs is known that this process may use")
    return tuple(lines)


# ---- JSON ------------------------------------------------------------------------------------------------------


def described(topology: Topology, groups: Sequence[DomainGroup]) -> dict[str, object]:
    """Null where something is not told; lists of CPUs as taskset takes them."""
    return {
        "transport": groups[0].transport if groups else None,
        "groups": [_group(group) for group in groups],
        "gpus": [_gpu(gpu) for gpu in topology.gpus],
        "nics": [_nic(nic) for nic in topology.nics],
        "numa_nodes": [
            {"node": node.number, "cpus": cpu_text(node.cpus), "distances": dict(node.distances)}
            for node in topology.numa_nodes
        ],
        "bridges": [_function(bridge) for bridge in topology.bridges],
        "usable_cpus": cpu_text(topology.usable_cpus),
        "remarks": list(remarks(topology, groups)),
        "not_visible": list(topology.not_visible),
    }


def _group(group: DomainGroup) -> dict[str, object]:
    return {
        "device": group.device.name,
        "gpu": group.device.index if isinstance(group.device, Gpu) else None,
        "numa_node": group.device.numa_node,
        "nics": [nic.name for nic in group.nics],
        "ports": list(group.port_names),
        "distance": group.distance.level.name.lower(),
        "steps": group.distance.steps,
        "rate_gbps": group.rate_gbps,
        "cpus": cpu_text(group.cpus),
        "cpus_are_near": group.is_near,
    }


def _gpu(gpu: Gpu) -> dict[str, object]:
    return {"gpu": gpu.index, "model": gpu.model, **_function(gpu.function)}


def _nic(nic: Nic) -> dict[str, object]:
    return {
        "nic": nic.name,
        "kind": nic.kind,
        "rdma": nic.rdma and _port(nic.rdma),
        "interfaces": [_port(port) for port in nic.interfaces],
        **(_function(nic.function) if nic.function else {"pci": None}),
    }


def _port(port: Port) -> dict[str, object]:
    return {"name": port.name, "up": port.is_up, "rate_gbps": port.rate_gbps}


def _function(function: PciFunction) -> dict[str, object]:
    """`pci_path`: from the host bridge down."""
    link = function.link
    return {
        "pci": function.path.address,
        "pci_path": list(function.path.steps),
        "pci_id": _pci_id(function),
        "numa_node": function.numa_node,
        "driver": function.driver,
        "pcie": link and {"gt_per_s": link.gt_per_s, "lanes": link.num_lanes},
    }
