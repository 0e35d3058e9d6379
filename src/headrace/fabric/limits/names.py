"""Names of endpoints whose provider keeps a file in /dev/shm for each: given, removed and swept by us.

A provider forgets the file of a process that is killed. A name says whose it is, so that one whose process has ended
can be told from one in use: the process number, and the namespace in which that number means something.
"""

import os
import re
import secrets
from pathlib import Path

FOLDER = Path("/dev/shm")
PATTERN = r"headrace-limits-[0-9]+-[0-9]+-[0-9a-f]{8}"
"""Namespace, process, random; \\Z is the user's to add."""

_FILE = re.compile(rf"(?P<name>{PATTERN})")


def new_name(process: int) -> str:
    return f"headrace-limits-{_namespace()}-{process}-{secrets.token_hex(4)}"


def remove_files(name: str) -> None:
    """Those that the endpoint of that name left; the provider appends to the name."""
    for path in FOLDER.glob(f"{name}*"):
        path.unlink(missing_ok=True)


def sweep() -> None:
    """Remove what processes that were killed have left."""
    for path in FOLDER.glob(f"headrace-limits-{_namespace()}-*"):
        found = _FILE.match(path.name)
        if found and not _is_alive(int(found["name"].split("-")[3])):
            path.unlink(missing_ok=True)


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _is_alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()
