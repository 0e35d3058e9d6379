"""What this machine is and how disturbed it was, for the line above a measurement. Reads /proc; owns nothing."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ticks:
    """Since boot, of all CPUs."""

    stolen: int
    all: int


def describe_machine() -> str:
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpus if line.startswith("model name")), "unknown CPU")
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{model}, {os.cpu_count()} CPUs, Linux {os.uname().release}, load {load}"


def ticks() -> Ticks:
    """Source: proc(5), /proc/stat; the eighth number is the time that the host gave to others."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return Ticks(numbers[7], sum(numbers[:8]))


def steal_share(since: Ticks) -> float:
    now = ticks()
    return (now.stolen - since.stolen) / max(1, now.all - since.all)


def cpu_ns(pid: int) -> int:
    """What the threads of a process, as far as they live, have had of the CPUs. Source: proc(5), schedstat."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())
