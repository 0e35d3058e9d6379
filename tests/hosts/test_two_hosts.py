"""The two hosts themselves: made either way, told apart, gone without a trace, and missed aloud."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from two_hosts import ADDRESSES, DEVICE, HERE, WAYS, TwoHosts, importing_from

pytestmark = pytest.mark.hosts

OWNER = """
import json, os, sys, time
from two_hosts import TwoHosts
with TwoHosts() as hosts:
    relay = hosts.join_by_relay(delay_s=0.001) if sys.argv[1] == "relay" else hosts.join()
    pids = [host.pid for host in hosts.both] + ([relay.process.pid] if relay else [])
    print(json.dumps({"pids": pids, "networks": [os.readlink(f"/proc/{pid}/ns/net") for pid in pids]}), flush=True)
    time.sleep(60)
"""


def networks_now() -> set[str]:
    """Of every process that we may look at."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:  # it has ended, or it is another user's
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], networks: set[str], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(is_running, pids)) or networks & networks_now():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("way", WAYS)
def test_hosts_that_may_be_made_reach_each_other_and_have_nothing_else(way: str) -> None:
    with TwoHosts(way) as hosts:
        hosts.join()
        for host, other in (hosts.both, hosts.both[::-1]):
            devices = [link["ifname"] for link in json.loads(host.run("ip", "-j", "link", "show"))]
            assert sorted(devices) == [DEVICE, "lo"]
            [route] = json.loads(host.run("ip", "-j", "route", "get", other.address))
            assert (route["dev"], route["prefsrc"]) == (DEVICE, host.address)
        own = os.readlink("/proc/self/ns/net")
        assert len({own, *(os.readlink(f"/proc/{host.pid}/ns/net") for host in hosts.both)}) == 3
        pids = [host.pid for host in hosts.both]
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("link", ["veth", "relay"])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_hosts_whose_owner_is_killed(link: str, ending: signal.Signals) -> None:
    with TwoHosts() as allowed:  # else this test is skipped here
        if link == "relay":
            allowed.join_by_relay(delay_s=0.0)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, link],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **importing_from(str(HERE))},
    )
    try:
        assert owner.stdout is not None
        made = json.loads(owner.stdout.readline())
        assert set(made["networks"]) <= networks_now()
        owner.send_signal(ending)
        owner.wait(10.0)
        assert gone(made["pids"], set(made["networks"]))
        assert not set(ADDRESSES) & set(subprocess.check_output(["ip", "-brief", "address"], text=True).split())
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("required", ["0", "1"])
def test_hosts_that_cannot_be_made_are_missed_aloud(required: str, tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "test_messenger_between_hosts.py")],
        cwd=HERE.parent.parent,
        env={**os.environ, "PATH": str(tmp_path), "HEADRACE_REQUIRE_HOSTS": required},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == int(required), answer.stdout
    assert "two hosts cannot be made here: ip, nsenter, tc, unshare missing" in answer.stdout
    assert ("could NOT be run" in answer.stdout) == (required == "0")
