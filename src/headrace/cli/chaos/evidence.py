"""What is left over: as the instances say, and as the system does, which they cannot talk into anything.

    said    pages held or quarantined, open tickets; pages that no column of theirs counts
    seen    descriptors, threads and memory of its own in /proc; files in /dev/shm; bytes of an idle KV pool that change

Owns nothing but mappings of pools while it looks at them.
"""

import mmap
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.chaos.sockets import descriptors
from headrace.protocol.operator import Deployment, InstanceFacts

BUSY = ("pages_held", "pages_quarantined", "tickets_open", "tickets_revoking", "pages_held_by_decoders")
MORE_DESCRIPTORS, MORE_THREADS, MORE_BYTES = 8, 2, 160 << 20
"""That a process may have more than when it was first seen: connections to peers that came late, and the 95 MiB that an
instance takes for its first steps."""

LATE_WRITE_S = 0.3
SHM = Path("/dev/shm")
POOL = "/memfd:headrace-kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """By one process."""

    num_descriptors: int
    num_threads: int
    own_bytes: int  # resident, and nobody else's: neither KV memory nor weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """At one moment, of an idle deployment; or of each process when it was first seen. By name and process id."""

    held: Mapping[tuple[str, int], Held]
    orphans: frozenset[str]  # files whose process is gone


def gather(deployment: Deployment) -> Evidence:
    processes = [(one.name, one.pid) for one in deployment.instances if one.standing == "serving"]
    processes.append((deployment.gateway.name, deployment.gateway.pid))
    held = {process: found for process in processes if (found := _held(process[1])) is not None}
    return Evidence(held=held, orphans=frozenset(_orphans(os.listdir(SHM))))


def first_seen(before: Evidence, after: Evidence) -> Evidence:
    """With those that are new."""
    return Evidence(held={**after.held, **before.held}, orphans=before.orphans)


def _held(pid: int) -> Held | None:
    with suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return Held(
            num_descriptors=len(descriptors(pid)),
            num_threads=int(fields["Threads"]),
            own_bytes=1024 * int(fields.get("RssAnon", "0").split()[0]),
        )
    return None


def _orphans(names: Iterable[str]) -> Iterator[str]:
    """headrace-shm-ROLE-PID-.."""
    for name in names:
        words = name.split("-")
        if name.startswith("headrace-shm-") and len(words) > 3 and not Path(f"/proc/{words[3]}").exists():
            yield name


def left_over(before: Evidence, after: Evidence) -> list[str]:
    """Of processes that were there before and after, in words; and new files whose process is gone."""
    found = []
    for process in before.held.keys() & after.held.keys():
        was, now = before.held[process], after.held[process]
        for name, more, allowed in (
            ("descriptors", now.num_descriptors - was.num_descriptors, MORE_DESCRIPTORS),
            ("threads", now.num_threads - was.num_threads, MORE_THREADS),
            ("MiB", (now.own_bytes - was.own_bytes) >> 20, MORE_BYTES >> 20),
        ):
            if more > allowed:
                found.append(f"{process[0]} has {more} {name} more")
    new = sorted(after.orphans - before.orphans)
    return [*found, *(f"/dev/shm/{name} of a process that is gone" for name in new)]


# ---- as the instances say --------------------------------------------------------------------------------------


def is_idle(instances: Iterable[InstanceFacts]) -> bool:
    """Each holds nothing, says its last Status."""
    return all(one.status is not None and not _busy(one) and not one.status.num_running for one in instances)


def num_leaked_pages(instances: Iterable[InstanceFacts]) -> int:
    """Of an idle deployment: held for nobody, or in no column."""
    return sum(_leaked(one.status.gauges) for one in instances if one.status is not None)


def told(instances: Iterable[InstanceFacts]) -> list[str]:
    """Who holds what, in words."""
    return [f"{one.name} says {value:.0f} {name}" for one in instances for name, value in _busy(one).items()]


def counted(instances: Iterable[InstanceFacts], counter: str) -> float:
    """By all of them."""
    return sum(one.status.counters.get(counter, 0.0) for one in instances if one.status is not None)


def _busy(instance: InstanceFacts) -> dict[str, float]:
    gauges = {} if instance.status is None else instance.status.gauges
    return {name: gauges[name] for name in BUSY if gauges.get(name)}


def _leaked(gauges: Mapping[str, float]) -> int:
    counted = gauges["pages_free"] + gauges["pages_cached"]
    return int(gauges["pages"] - counted)


# ---- KV pools, from outside ------------------------------------------------------------------------------------


def pool_of(pid: int) -> mmap.mmap:
    """The KV memory of an instance, shared with it. Raises OSError."""
    fd = next((fd for fd, target in descriptors(pid).items() if target.startswith(POOL)), None)
    if fd is None:
        raise FileNotFoundError(f"process {pid} has no KV memory")
    with Path(f"/proc/{pid}/fd/{fd}").open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def late_writes(instances: Sequence[InstanceFacts]) -> list[str]:
    """Whose pools change while nothing runs there. Takes LATE_WRITE_S; blocks."""
    pools = {one.name: pool_of(one.pid) for one in instances}
    before = {name: zlib.crc32(pool) for name, pool in pools.items()}
    time.sleep(LATE_WRITE_S)
    changed = [name for name, pool in pools.items() if zlib.crc32(pool) != before[name]]
    for pool in pools.values():
        pool.close()
    return [f"something landed in the idle pool of {name}" for name in changed]
