"""How much memory a process has of its own and how much it shares, as the kernel counts it. Owns no state."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What is resident. `own_bytes` go when the process ends; `shared_bytes` are mapped by others too, as of now: what
    the first of several processes shares counts as its own until the second comes. `proportional_bytes` divides each
    page by the number of processes that map it, so that the sum over all processes counts every page once."""

    own_bytes: int
    shared_bytes: int
    proportional_bytes: int

    def __str__(self) -> str:
        return f"memory: {self.own_bytes / 1e6:.0f} MB of its own, {self.shared_bytes / 1e6:.0f} MB shared"


def own_footprint() -> Footprint:
    """Of this process, as `footprint_of`."""
    return footprint_of("self")


def footprint_of(pid: int | Literal["self"]) -> Footprint:
    """Now; some milliseconds. Raises OSError where the kernel does not tell."""
    return parse_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))


def parse_rollup(text: str) -> Footprint:
    """Of the text of a `smaps_rollup` (Source: Documentation/filesystems/proc.rst of Linux)."""
    found = re.findall(r"^(\w+): +(\d+) kB$", text, flags=re.MULTILINE)
    num_bytes = {name: int(value) * 1024 for name, value in found}
    return Footprint(
        own_bytes=num_bytes["Private_Clean"] + num_bytes["Private_Dirty"] + num_bytes.get("Private_Hugetlb", 0),
        shared_bytes=num_bytes["Shared_Clean"] + num_bytes["Shared_Dirty"] + num_bytes.get("Shared_Hugetlb", 0),
        proportional_bytes=num_bytes["Pss"],
    )
