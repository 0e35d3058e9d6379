"""Two network namespaces and a shaped link between them: prefillers in one, decoders in the other. Owns both.

A veth pair with a token bucket (tbf) at each end. Delay would need netem, which many kernels lack, or a relay: a link
with a delay is refused by name. Needs root, or a namespace in which we are root, `ip` and `tc` (iproute2).
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.cli.compare.arms import Side
from headrace.errors import InputError

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
BURST = "256kb"  # packets between veths reach 64 KiB
SUBNET = "10.177.0"
HOSTS: Mapping[Side, int] = {"prefillers": 1, "decoders": 2}
SLOWEST_BITS, FASTEST_BITS = 1e6, 400e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    bits_per_s: float

    def __str__(self) -> str:
        unit = next((unit for unit in ("gbit", "mbit") if self.bits_per_s >= UNITS[unit]), "kbit")
        return f"{self.bits_per_s / UNITS[unit]:g} {unit.replace('bit', 'bit/s')}, shaped by tbf, no delay added"


def read_link(text: str) -> Link:
    """`100mbit`, `1gbit`. Raises InputError."""
    rate, _, delay = text.partition(",")
    if delay:
        raise InputError("link", f"must be a rate alone such as 1gbit: a delay ({delay}) cannot be added here")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits_per_s = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not SLOWEST_BITS <= bits_per_s <= FASTEST_BITS:
        raise InputError("link", f"must be a rate from 1mbit to 400gbit such as 100mbit, is {text!r}")
    return Link(bits_per_s=bits_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Where processes of each side run, and where they are reached."""

    namespaces: Mapping[Side, str]
    addresses: Mapping[Side, str]

    def inside(self, side: Side, command: tuple[str, ...]) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespaces[side], *command)

    def shape(self, bits_per_s: float) -> None:
        """Both ways, from now on."""
        # Its queue holds a second: what is too much waits, and is not dropped.
        limit = max(256 * 1024, int(bits_per_s / 8))
        for name in self.namespaces.values():
            shape = f"root tbf rate {bits_per_s:.0f}bit burst {BURST} limit {limit}"
            _run(*f"tc -n {name} qdisc replace dev veth0 {shape}".split())

    def unshape(self) -> None:
        """As fast as it goes. Idempotent."""
        for name in self.namespaces.values():
            subprocess.run(f"tc -n {name} qdisc del dev veth0 root".split(), capture_output=True, check=False)


@contextmanager
def laid(link: Link | None) -> Iterator[Ends]:
    """While this is entered; None: not shaped. Raises InputError where it cannot be done, with what denied it."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise InputError("link", f"cannot be shaped without {' and '.join(missing)} (iproute2)")
    ends = Ends(
        namespaces={side: f"headrace-{os.getpid()}-{side[0]}" for side in HOSTS},
        addresses={side: f"{SUBNET}.{host}" for side, host in HOSTS.items()},
    )
    try:
        _lay(ends)
        if link is not None:
            ends.shape(link.bits_per_s)
        yield ends
    except subprocess.CalledProcessError as error:
        text = f"cannot be shaped here: {' '.join(error.cmd)}: {error.stderr.strip()}"
        raise InputError("link", text) from error
    finally:
        for name in ends.namespaces.values():
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


def _lay(ends: Ends) -> None:
    one, other = ends.namespaces.values()
    for name in (one, other):
        _run("ip", "netns", "add", name)
    _run(*f"ip link add veth0 netns {one} type veth peer name veth0 netns {other}".split())
    for side, name in ends.namespaces.items():
        _run(*f"ip -n {name} addr add {ends.addresses[side]}/24 dev veth0".split())
        _run(*f"ip -n {name} link set veth0 up".split())
        _run(*f"ip -n {name} link set lo up".split())


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
