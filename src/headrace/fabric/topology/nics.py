"""The NICs in a snapshot: PCI functions that have an RDMA device or a network interface. Pure.

Virtual interfaces count only where no real one is visible, and only those that lead out of a container (veth, macvlan:
their `iflink` is the index of another); RDMA devices in software (rxe, siw) never do. Source of names and texts:
Documentation/ABI of Linux, sysfs-class-net and sysfs-class-infiniband.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.fabric.topology.machine import Nic, NicKind, PciFunction, PciPath, Port
from headrace.fabric.topology.models import AMAZON
from headrace.fabric.topology.numbers import first_number
from headrace.fabric.topology.snapshot import Snapshot

_LOOPBACK = 772
"""ARPHRD_LOOPBACK of linux/if_arp.h."""

_IS_UP: Mapping[str, bool | None] = {"up": True, "unknown": None, "": None}
"""By operstate; everything else is down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interface:
    port: Port
    path: PciPath | None
    is_virtual: bool
    leads_out: bool


def find_nics(snapshot: Snapshot, functions: Mapping[str, PciFunction]) -> tuple[Nic, ...]:
    """In PCI order, then those behind no PCI function. `functions` are by address, in order."""
    interfaces, rdma = sorted(_interfaces(snapshot), key=lambda one: one.port.name), dict(_rdma_devices(snapshot))
    nics = []
    for address, function in functions.items():
        ours = tuple(one.port for one in interfaces if one.path and one.path.address == address)
        device = rdma.get(address)
        if device or ours:
            nics.append(Nic(kind=_kind(function, device), function=function, rdma=device, interfaces=ours))
    real = [one for one in interfaces if not one.is_virtual]
    others = [one.port for one in real or interfaces if one.path is None and (real or one.leads_out)]
    return (*nics, *(Nic(kind="ethernet", function=None, rdma=None, interfaces=(port,)) for port in others))


def _kind(function: PciFunction, rdma: Port | None) -> NicKind:
    if rdma is None:
        return "ethernet"
    return "efa" if function.driver == "efa" or function.vendor_id == AMAZON else "verbs"


def _rdma_devices(snapshot: Snapshot) -> Iterator[tuple[str, Port]]:
    """With the address of their function. Of several ports the fastest that is up: a domain uses one."""
    for directory in snapshot.tree:
        parent, is_rdma, name = directory.rpartition("/infiniband/")
        path = PciPath.of(parent)
        if path is None or not is_rdma or "/" in name:
            continue
        below = f"{directory}/ports/"
        ports = [_rdma_port(name, texts) for path, texts in snapshot.tree.items() if path.startswith(below)]
        ports.sort(key=lambda port: (port.is_up is True, port.is_up is None, port.rate_gbps or 0))
        yield path.address, ports[-1] if ports else Port(name=name, is_up=None, rate_gbps=None)


def _rdma_port(name: str, texts: Mapping[str, str]) -> Port:
    """Source: drivers/infiniband/core/sysfs.c: `4: ACTIVE`; the rate of a port that is down means nothing."""
    state = texts.get("state", "")
    is_up = state.startswith("4") if state else None
    return Port(name=name, is_up=is_up, rate_gbps=None if is_up is False else first_number(texts.get("rate")) or None)


def _interfaces(snapshot: Snapshot) -> Iterator[_Interface]:
    for directory, texts in snapshot.tree.items():
        parent, is_interface, name = directory.rpartition("/net/")
        if not is_interface or "/" in name or first_number(texts.get("type")) == _LOOPBACK:
            continue
        is_up = _IS_UP.get(texts.get("operstate", ""), False)
        mbps = None if is_up is False else first_number(texts.get("speed"))
        yield _Interface(
            port=Port(name=name, is_up=is_up, rate_gbps=mbps / 1000 if mbps else None),
            path=PciPath.of(parent),
            is_virtual=parent.startswith("devices/virtual"),
            leads_out=texts.get("iflink", "") != texts.get("ifindex", ""),
        )
