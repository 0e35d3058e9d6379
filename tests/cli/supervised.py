"""What the supervisor's tests share: scripted children, what they noted, and whether a process is there."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from headrace.cli.child import Child

SCRIPT = Path(__file__).with_name("scripted_child.py")


def scripted(directory: Path, name: str, behaviour: str) -> Child:
    command = (sys.executable, "-S", str(SCRIPT), str(directory), name, behaviour)
    return Child(name=name, command=command)


def noted(directory: Path, name: str, suffix: str) -> list[str]:
    path = directory / f"{name}.{suffix}"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def is_running(pid: int | str) -> bool:
    """Not where it has ended and only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(holds: Callable[[], object], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"waited {within_s} s in vain"
        time.sleep(0.01)
