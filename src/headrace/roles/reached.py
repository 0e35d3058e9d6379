"""How a peer is reached, told when it is ready: over which transport, and why over no better one. Owns nothing."""

import logging
from collections.abc import Sequence
from typing import get_args

from headrace.errors import InputError
from headrace.fabric.interface import Fabric
from headrace.fabric.native import PROVIDERS
from headrace.messenger.outcomes import PeerReady
from headrace.protocol.control import Role
from headrace.roles.instance import Instance
from headrace.roles.options import NEAR, Transport

_log = logging.getLogger(__name__)


def tell_ready(role: Role, ready: PeerReady, *, fabric: Fabric, instance: Instance) -> None:
    """One line about this peer of that role; a warning where a transport that we have was to be expected."""
    try:
        transport = transport_of(fabric.transport(ready.peer))
    except InputError:
        return  # gone already: another process has its address
    is_here = ready.process.host == instance.identity.process.host
    if reason := why_no_better(transport, instance.options.transports, is_here=is_here):
        _log.warning("%s %s is ready over %s: %s", role, ready.uuid, transport, reason)
    else:
        _log.info("%s %s is ready over %s", role, ready.uuid, transport)


def transport_of(name: str) -> Transport:
    """By its name in the fabric, where it may be that of a libfabric provider."""
    return next((each for each in get_args(Transport) if name in (each, PROVIDERS.get(each))), "tcp")


def why_no_better(transport: Transport, ours: Sequence[Transport], *, is_here: bool) -> str:
    """Empty where `transport` is the first of ours by which such a peer can be reached. `is_here`: on this host."""
    better = ours[: ours.index(transport)]
    near = [each for each in better if each in NEAR]
    if is_here and near:
        without = " and ".join(near)
        return f"it is on this host, but without {without}, or another user's, or in another network namespace"
    if rdma := [each for each in better if each not in NEAR]:
        return f"it has no {' or '.join(rdma)}, which we have"
    return ""
