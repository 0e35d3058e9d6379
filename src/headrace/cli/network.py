"""What processes are reachable at: checked before anything slow begins. Owns no socket for longer than a check.

Control and fabric messages carry no proof yet of who sent them. So they stay on this host, behind file permissions,
unless --insecure says that everybody who can reach the address may be trusted.
"""

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import InputError
from headrace.gateway.listening import bind
from headrace.roles.options import MAX_FABRIC_HOSTS

LONGEST_SOCKET_PATH = 107
"""Bytes of a Unix socket's path that the kernel takes."""


def require_free_port(host: str, port: int) -> int:
    """-> the port; for 0, one that is free now. Raises InputError when a server could not listen there."""
    with bind(host, port) as probe:
        free: int = probe.getsockname()[1]
        return free


def require_endpoint(field: str, endpoint: str, *, insecure: bool) -> str:
    """-> the endpoint, where instances and gateways may meet at it."""
    scheme, _, place = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not place:
        raise InputError(field, f"must be ipc://FILE or tcp://HOST:PORT, is {endpoint!r}")
    if scheme == "tcp":
        _require_host_and_port(field, endpoint, place)
    elif not place.startswith("@"):
        require_socket_path(field, Path(place))
        return endpoint
    # Names that begin with @ are no files: everybody on this host may connect.
    if not insecure:
        raise InputError(field, _reachable(endpoint))
    return endpoint


def _require_host_and_port(field: str, endpoint: str, place: str) -> None:
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(field, f"must name host and port as in tcp://10.0.0.1:5555, is {endpoint!r}")


def require_socket_path(field: str, path: Path) -> None:
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise InputError(field, f"a socket's path has at most {LONGEST_SOCKET_PATH} bytes; this one is longer: {path}")
    if not path.parent.is_dir():
        raise InputError(field, f"must be in a folder that exists, is {path}")


def require_fabric_hosts(hosts: Sequence[str], *, insecure: bool) -> tuple[str, ...]:
    """-> the addresses, where the fabric may listen at each of them."""
    if len(hosts) > MAX_FABRIC_HOSTS:
        raise InputError("fabric_host", f"must be at most {MAX_FABRIC_HOSTS}, one for each NIC, are {len(hosts)}")
    if len(set(hosts)) < len(hosts):
        raise InputError("fabric_host", f"must name each address once, are {', '.join(hosts)}")
    for host in hosts:
        _require_fabric_host(host, insecure=insecure)
    return tuple(hosts)


def _require_fabric_host(host: str, *, insecure: bool) -> None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise InputError("fabric_host", f"must be an IP address of this machine, is {host!r}") from error
    if address.is_unspecified:
        raise InputError(
            "fabric_host", f"must be the one address that other instances reach this machine at, is {host}"
        )
    if not address.is_loopback and not insecure:
        raise InputError("fabric_host", _reachable(host))


def _reachable(place: str) -> str:
    return f"{place} can be reached by others, and messages are not authenticated yet: add --insecure"
