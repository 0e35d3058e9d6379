"""By which transports KV may travel: what was asked for, against what is here and what was ruled out. Owns nothing.

The order is always the same, however they were named: mapped, shm, RDMA, tcp. Both sides of a pair then find the same
one without a word about it.
"""

import ipaddress
from collections.abc import Sequence
from typing import cast, get_args

from headrace.cli.network import require_fabric_hosts
from headrace.cli.options import INSTANCE_DEFAULTS
from headrace.cli.values import TransportNames
from headrace.errors import InputError
from headrace.roles.options import NEAR, Transport

HERE: tuple[Transport, ...] = (*NEAR, "tcp")
"""What needs no device, and what stays on it at an address that it keeps to itself."""


def plan_reach(
    hosts: Sequence[str] | None, named: TransportNames | None, required: str | None, *, insecure: bool
) -> tuple[tuple[str, ...], tuple[Transport, ...]]:
    """Of the options of one instance -> where its fabric listens, and by which transports. Raises InputError."""
    places = require_fabric_hosts(hosts or INSTANCE_DEFAULTS.fabric_hosts, insecure=insecure)
    asked = named.names if named else ()
    transports = plan_transports(asked, required=cast("Transport | None", required), hosts=places)
    if hosts and set(transports) <= set(NEAR):
        raise InputError("fabric_host", f"must be left out where {' and '.join(transports)} is all: no address is used")
    return places, transports


def plan_transports(
    asked: Sequence[Transport], *, required: Transport | None, hosts: Sequence[str]
) -> tuple[Transport, ...]:
    """Those to be opened at these addresses. Nothing asked for: all that can be but shm, whose peers have mapped as
    well. Raises InputError where one cannot be, or is asked for and ruled out."""
    if asked and required is not None and required not in asked:
        raise InputError("require_provider", f"must be one of --transports ({', '.join(asked)}), is {required}")
    possible = possible_at(hosts)
    wanted = asked if required is None else (required,)
    for transport in wanted:
        if transport not in possible:
            field = "transports" if required is None else "require_provider"
            limit = "this machine has" if reaches_others(hosts) else f"stays at {', '.join(hosts)}"
            raise InputError(field, f"must be of what {limit} ({', '.join(possible)}), is {transport}")
    return tuple(transport for transport in get_args(Transport) if transport in (wanted or set(possible) - {"shm"}))


def possible_at(hosts: Sequence[str]) -> tuple[Transport, ...]:
    if not reaches_others(hosts):
        return HERE
    # Function-local: it loads the native fabric, which nothing else that is found out before a role starts needs.
    from headrace.fabric.native import available_transports

    return available_transports()


def reaches_others(hosts: Sequence[str]) -> bool:
    return not all(ipaddress.ip_address(host).is_loopback for host in hosts)
