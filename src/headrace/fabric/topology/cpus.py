"""Lists of CPUs as the kernel writes them, such as `0-47,96-143`. Pure."""

import re
from collections.abc import Iterable

MOST_CPU = 2**16
"""Kernels are built for up to 8192; a list is not taken at its word."""

_PART = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def parse_cpus(text: str) -> tuple[int, ...] | None:
    """In order, each once. None for what is no list of CPUs; an empty text is the empty list."""
    cpus: set[int] = set()
    for part in text.split(",") if text else ():
        match = _PART.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= MOST_CPU:
            return None
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def cpu_text(cpus: Iterable[int]) -> str:
    """As parse_cpus and taskset take it."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
