"""Where each transport listens, of the `nodes` that a fabric was given. Pure.

A node is the IP address of a NIC, for tcp and verbs, or a NIC's name, for efa, which has no addresses of its own
(`rdmap16s27`: what `headrace fabric topology` shows). A machine with both is given both:

    ("10.0.0.1", "rdmap16s27", "rdmap32s27")    efa on two NICs; the address is where peers are watched, and tcp's
"""

import ipaddress
from collections.abc import Sequence

from headrace.errors import InputError
from headrace.fabric.interface import MAX_NICS

NEAR = ("mapped", "shm")
"""Transports that reach peers of this host alone, and need no address."""

Place = tuple[str, int]
"""A node and a port; an empty node is the provider's choice, port 0 a fresh one."""


def plan_places(transports: Sequence[str], nodes: Sequence[str], port: int) -> dict[str, list[Place]]:
    """Of the transports that go over NICs. Raises InputError where one is left without a NIC, or a NIC without one."""
    addresses = [node for node in nodes if _is_address(node)]
    names = [node for node in nodes if not _is_address(node)]
    for kind in (addresses, names):
        if len(kind) > MAX_NICS:
            raise InputError("nodes", f"must be at most {MAX_NICS}, are {len(kind)}")
    if names and "efa" not in transports:
        raise InputError("nodes", f"must be IP addresses, has {names[0]!r}: only a NIC of efa goes by its name")
    places: dict[str, list[Place]] = {}
    for transport in transports:
        if transport == "efa":
            places[transport] = [(name, 0) for name in names] or [("", 0)]
        elif transport not in NEAR:
            if names and not addresses:
                raise InputError("nodes", f"must have an IP address for {transport}, has {', '.join(names)}")
            places[transport] = [(address, port) for address in addresses] or [("", port)]
    return places


def plan_watch(transports: Sequence[str], nodes: Sequence[str], port: int) -> str:
    """Where control connections over TCP are heard, "host:port"; empty: nowhere."""
    address = next((node for node in nodes if _is_address(node)), None)
    if address is None or set(transports) <= set(NEAR):
        return ""
    return f"{address}:{port + 1 if port else 0}"


def _is_address(node: str) -> bool:
    try:
        ipaddress.ip_address(node)
    except ValueError:
        return False
    return True
