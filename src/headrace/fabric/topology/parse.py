"""A snapshot of sysfs as a Topology. Pure, and never fails: a text that makes no sense counts as not told.

Source of names and texts: Documentation/ABI of Linux, sysfs-bus-pci and sysfs-devices-node.
"""

import re
from collections.abc import Mapping

from headrace.fabric.topology.cpus import parse_cpus
from headrace.fabric.topology.machine import Gpu, NumaNode, PcieLink, PciFunction, PciPath, Topology
from headrace.fabric.topology.models import is_gpu, model_name
from headrace.fabric.topology.nics import find_nics
from headrace.fabric.topology.numbers import first_number, hexadecimal
from headrace.fabric.topology.snapshot import Snapshot
from headrace.fabric.topology.unseen import not_visible

_NODE = re.compile(r"devices/system/node/node([0-9]{1,5})")


def parse_topology(snapshot: Snapshot) -> Topology:
    nodes = _numa_nodes(snapshot)
    functions = _functions(snapshot, only_node=nodes[0].number if len(nodes) == 1 else None)
    nics = find_nics(snapshot, functions)
    gpus = tuple(
        Gpu(index=index, function=function, model=model_name(function))
        for index, function in enumerate(filter(is_gpu, functions.values()))
    )
    online = parse_cpus(snapshot.tree.get("devices/system/cpu", {}).get("online", ""))
    return Topology(
        bridges=tuple(one for one in functions.values() if one.is_class(0x0604, num_bits=16)),
        numa_nodes=nodes,
        nics=nics,
        gpus=gpus,
        usable_cpus=snapshot.cpus_allowed or online or tuple(sorted({cpu for node in nodes for cpu in node.cpus})),
        not_visible=tuple(not_visible(snapshot, nodes=nodes, functions=functions, nics=nics, gpus=gpus)),
    )


def _numa_nodes(snapshot: Snapshot) -> tuple[NumaNode, ...]:
    found = {int(match[1]): texts for path, texts in snapshot.tree.items() if (match := _NODE.fullmatch(path))}
    return tuple(
        NumaNode(
            number=number,
            cpus=parse_cpus(found[number].get("cpulist", "")) or (),
            distances=_distances(found[number].get("distance", ""), sorted(found)),
        )
        for number in sorted(found)
    )


def _distances(text: str, nodes: list[int]) -> dict[int, int]:
    """One for each node that is online, in order; without one of the nodes, nobody knows which is whose."""
    words = text.split()
    whole = len(words) == len(nodes) and all(word.isdecimal() and len(word) < 6 for word in words)
    return dict(zip(nodes, map(int, words), strict=True)) if whole else {}


def _functions(snapshot: Snapshot, *, only_node: int | None) -> dict[str, PciFunction]:
    """By address, in PCI order. `only_node` is that of all, where the firmware of a machine with one left it out."""
    texts_of: dict[PciPath, Mapping[str, str]] = {}
    for directory, texts in snapshot.tree.items():
        path = PciPath.of(directory)
        if path is not None:
            texts_of.setdefault(path, {})  # a NIC's interface is visible, and the function behind it is not
            if directory.endswith(path.address):
                texts_of[path] = texts
    paths = sorted(texts_of, key=lambda path: path.sort_key)
    return {path.address: _function(path, texts_of[path], only_node) for path in paths}


def _function(path: PciPath, texts: Mapping[str, str], only_node: int | None) -> PciFunction:
    numa_node = first_number(texts.get("numa_node"))
    speed, width = first_number(texts.get("current_link_speed")), first_number(texts.get("current_link_width"))
    return PciFunction(
        path=path,
        class_code=hexadecimal(texts.get("class")),
        vendor_id=hexadecimal(texts.get("vendor")),
        device_id=hexadecimal(texts.get("device")),
        numa_node=only_node if numa_node is None else int(numa_node),
        driver=texts.get("driver"),
        link=PcieLink(gt_per_s=speed, num_lanes=int(width)) if speed and width else None,
    )
