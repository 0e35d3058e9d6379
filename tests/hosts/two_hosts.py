"""Two hosts on one machine: network namespaces joined by a veth pair or by the relay, and how that link is shaped.

Owns the namespaces and the link; knows no fabric. A namespace is held by a process of ours that ends when its stdin
does, and neither it nor anything in it has a name outside: the kernel takes it away, devices and all, when its last
process has ended, even after a kill -9 of the test. So there is nothing to sweep.

    host a  192.0.2.1 ----- headrace0 ----- headrace0 ----- 192.0.2.2  host b

As root, or in a user namespace to which both network namespaces belong. Where neither is allowed, or a tool is missing,
the test is skipped with the reason; HEADRACE_REQUIRE_HOSTS=1 makes that a failure.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import pytest
from line_process import LineProcess

HERE = Path(__file__).resolve().parent
TOOLS = ("ip", "nsenter", "tc", "unshare")
DEVICE = "headrace0"
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # TEST-NET-1: routed nowhere

NEW_USER = ("--user", "--map-root-user")
WAYS: Mapping[str, Sequence[str]] = {"root": (), "user namespace": NEW_USER}
"""What `unshare` is told besides the network namespace."""


def cannot(why: str) -> NoReturn:
    if os.environ.get("HEADRACE_REQUIRE_HOSTS") == "1":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def importing_from(*folders: str) -> dict[str, str]:
    """The environment of a Python that finds modules there, and where we were told to."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One network namespace, by the process that holds it."""

    holder: LineProcess
    in_user_namespace: bool
    address: str

    @property
    def pid(self) -> int:
        return self.holder.process.pid

    def command(self, *words: str) -> list[str]:
        """`words`, to be run on this host."""
        user = ("--user", "--preserve-credentials") if self.in_user_namespace else ()
        return ["nsenter", "--target", str(self.pid), *user, "--net", "--", *words]

    def python(self, script: str, *arguments: str, path: Sequence[str] = ()) -> LineProcess:
        """A script of this folder on this host; `path`: where else it imports from."""
        command = self.command(sys.executable, "-X", "faulthandler", str(HERE / script), *arguments)
        return LineProcess(command, environment=importing_from(*path))

    def run(self, *words: str) -> str:
        answer = subprocess.run(self.command(*words), capture_output=True, text=True)
        assert answer.returncode == 0, f"{words}: {answer.stderr}"
        return answer.stdout

    def refusal(self, *words: str) -> str | None:
        """Run what a kernel may have been built without. -> why it could not be done."""
        answer = subprocess.run(self.command(*words), capture_output=True, text=True)
        return f"`{' '.join(words)}`: {answer.stderr.strip()}" if answer.returncode else None

    def shape(self, *words: str) -> None:
        if why := self.refusal(*words):
            cannot(why)

    def set_link(self, state: str) -> None:
        self.run("ip", "link", "set", DEVICE, state)

    def set_kernel(self, name: str, value: int) -> None:
        """A setting of /proc/sys/net, of this host alone."""
        self.run("sh", "-c", f"echo {value} >/proc/sys/net/{name}")


class TwoHosts:
    """Two hosts that are not joined yet. `way` is one of WAYS; None: the first that is allowed."""

    def __init__(self, way: str | None = None) -> None:
        self._ending = ExitStack()
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            cannot(f"two hosts cannot be made here: {', '.join(missing)} missing (iproute2, util-linux)")
        refusals = []
        for each in [way] if way else WAYS:
            refused = _refusal(WAYS[each])
            if refused is None:
                self.way = each
                break
            refusals.append(f"as {each}: {refused}")
        else:
            cannot(f"two hosts cannot be made here: {'; '.join(refusals)}")

    def __enter__(self) -> Self:
        with ExitStack() as ending:
            flags = WAYS[self.way]
            user = flags == NEW_USER
            first = ending.enter_context(LineProcess(["unshare", *flags, "--net", *_HOLD]))
            assert first.greeting == {}  # else there is nothing to enter yet
            self.a = Host(holder=first, in_user_namespace=user, address=ADDRESSES[0])
            # Made from inside the first, so that both belong to one user namespace.
            second = ending.enter_context(LineProcess(self.a.command("unshare", "--net", *_HOLD)))
            self.b = Host(holder=second, in_user_namespace=user, address=ADDRESSES[1])
            assert second.greeting == {}
            for host in self.both:
                host.run("ip", "link", "set", "lo", "up")
            self._ending = ending.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()

    @property
    def both(self) -> tuple[Host, Host]:
        return self.a, self.b

    # ---- the link

    def join(self) -> None:
        """By a veth pair."""
        pair = ("type", "veth", "peer", "name", DEVICE, "netns", str(self.b.pid))
        self.a.shape("ip", "link", "add", "name", DEVICE, *pair)
        for host in self.both:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", DEVICE)
            host.set_link("up")

    def join_by_relay(self, *, delay_s: float, loss: float = 0.0, seed: int = 0) -> LineProcess:
        """By a process that owns a TUN device on each. -> it, to be told `stop` and `go`."""
        tun = Path("/dev/net/tun")
        if not os.access(tun, os.R_OK | os.W_OK):
            cannot(f"the relay needs {tun}, which {'may not be opened' if tun.exists() else 'is not there'}")
        arguments = (DEVICE, str(self.b.pid), str(delay_s), str(loss), str(seed))
        relay = self._ending.enter_context(self.a.python("relay.py", *arguments))
        assert relay.greeting  # the devices are there
        for host, other in (self.both, self.both[::-1]):
            host.run("ip", "address", "add", host.address, "peer", other.address, "dev", DEVICE)
            host.set_link("up")
        return relay

    def limit(self, rate: str) -> None:
        """In both directions. The burst has room for a packet before it is cut (64 KiB)."""
        tbf = ("tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
        for host in self.both:
            host.shape("tc", "qdisc", "add", "dev", DEVICE, "root", *tbf)

    def delay(self, seconds: float) -> None:
        """By netem, in both directions. Always skipped where it is not in the kernel: the relay does the same."""
        for host in self.both:
            if why := host.refusal("tc", "qdisc", "add", "dev", DEVICE, "root", "netem", "delay", f"{seconds * 1e3}ms"):
                pytest.skip(why)

    def lose(self, fraction: float) -> None:
        """In both directions, each packet by its own draw; not seeded.

        By a classic BPF program at tc's egress, which needs no tool but tc, where nft and iptables are often missing.
        Packets of connections made from now on are cut before they get there, or 64 KiB would be lost at a time.
        """
        for host in self.both:
            host.run("ip", "link", "set", DEVICE, "gso_max_segs", "1")
            host.shape("tc", "qdisc", "add", "dev", DEVICE, "clsact")
            program = _dropping(fraction)
            host.shape("tc", "filter", "add", "dev", DEVICE, "egress", "bpf", "direct-action", "bytecode", program)

    def num_lost(self) -> int:
        """Packets that `lose` has taken so far."""
        told = [json.loads(host.run("tc", "-s", "-j", "qdisc", "show", "dev", DEVICE, "clsact")) for host in self.both]
        return sum(qdisc["drops"] for qdiscs in told for qdisc in qdiscs)


# Says that it is ready, and then waits for its stdin to end.
_HOLD = ("sh", "-c", "echo {}; exec cat >&2")


def _refusal(flags: Sequence[str]) -> str | None:
    """Why no namespace can be made that way here; None: it can."""
    answer = subprocess.run(
        ["unshare", *flags, "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True
    )
    return answer.stderr.strip() if answer.returncode else None


def _dropping(fraction: float) -> str:
    """A program of four instructions in tc's notation (code jump-if-true jump-if-false operand).

    Source: linux/filter.h (SKF_AD_RANDOM), linux/pkt_cls.h (TC_ACT_SHOT is 2, TC_ACT_UNSPEC is -1).
    """
    draw, keep = (32, 0, 0, 2**32 - 0x1000 + 56), (53, 1, 0, round(fraction * 2**32))
    program = (draw, keep, (6, 0, 0, 2), (6, 0, 0, 2**32 - 1))
    return ",".join([str(len(program)), *(" ".join(map(str, each)) for each in program)])
