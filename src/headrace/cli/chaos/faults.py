"""What is done to a deployment, by real means: signals, sockets of other processes, bytes in their memory, clients.

A table. An act finds its victims by the request that was seen (`Scene`), does the harm, says when (`struck`), and
returns when the harm is over; whatever it stopped or bent is as before then.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.cli.chaos.client_acts import burst, leave, storm
from headrace.cli.chaos.judge import Kind
from headrace.cli.chaos.link_acts import corrupt_page, cut_link, darken_link, lose_write, slow_link
from headrace.cli.chaos.process_acts import (
    change_role_twice,
    kill_both,
    kill_decoder,
    kill_gateway,
    kill_prefiller,
    kill_prefiller_twice,
    stop_decoder,
    stop_gateway,
    stop_prefiller,
)
from headrace.cli.chaos.scene import Scene
from headrace.cli.chaos.states import STATES, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`allowed` are ends of answers that are right here beside whole ones; `breaks`: connections may break, and clients
    ask again. `is_quiet`: nothing else runs while it strikes. `counter`: of instances, rises where it was noticed, for
    one that may miss."""

    text: str
    act: Callable[[Scene], Awaitable[None]]
    allowed: frozenset[Kind] = frozenset()
    breaks: bool = False
    is_quiet: bool = False
    counter: str | None = None
    states: Sequence[State] = tuple(STATES)


OPEN_TICKET: Final[Sequence[State]] = ("prefilling", "transferring")

FAULTS: Final[Mapping[str, Fault]] = {
    "prefiller-killed": Fault(text="SIGKILL", act=kill_prefiller),
    "decoder-stopped-5s": Fault(text="SIGSTOP, SIGCONT after 5 s", act=stop_decoder),
    "link-cut": Fault(text="TCP connections of the pair shut down", act=cut_link),
    "gateway-killed": Fault(text="SIGKILL; clients ask again", act=kill_gateway, breaks=True),
    "prefiller-stopped-5s": Fault(text="SIGSTOP, SIGCONT after 5 s", act=stop_prefiller(5.0)),
    "client-leaves": Fault(text="its connection is closed", act=leave),
    "decoder-killed": Fault(text="SIGKILL", act=kill_decoder),
    "link-dark": Fault(text="every segment between the pair dropped for 5 s", act=darken_link),
    "prefiller-killed-twice": Fault(text="SIGKILL, and again when it is back", act=kill_prefiller_twice),
    "gateway-stopped-4s": Fault(text="SIGSTOP, SIGCONT after 4 s", act=stop_gateway),
    "page-corrupted": Fault(
        text="a bit of a landed page flipped, nothing else running",
        act=corrupt_page,
        is_quiet=True,
        counter="wrong_bytes_total",
        states=OPEN_TICKET,
    ),
    "write-lost": Fault(
        text="one write taken out of the decoder's socket, nothing else running",
        act=lose_write,
        is_quiet=True,
        counter="tickets_failed_lost_write_total",
        states=OPEN_TICKET,
    ),
    "link-slow": Fault(text="the pair's connections paced to 2 MB/s for 5 s", act=slow_link),
    "abort-storm": Fault(text="20 more requests, then nine of ten leave", act=storm),
    "both-killed": Fault(text="prefiller and decoder, SIGKILL", act=kill_both),
    "overload": Fault(text="64 more at once", act=burst, allowed=frozenset({"refused"})),
    "role-changed-twice": Fault(text="a prefiller drained, a decoder for a moment, and back", act=change_role_twice),
    "prefiller-stopped-40s": Fault(text="SIGSTOP, SIGCONT after 40 s", act=stop_prefiller(40.0)),
}
"""In the order in which a matrix goes through them: whoever is killed has time to come back before the next time."""
