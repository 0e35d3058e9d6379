"""What was read of sysfs: directories and their one-line texts. From a directory (/sys) or from a recorded file.

Only what `parse` needs is read, so that a recording holds no addresses, serial numbers or host names. Reading never
fails: what is missing or unreadable is absent from the snapshot. Any thread may read; nothing is kept.

A recorded file is a line for each directory, fields separated by tabs; `#` begins a comment:

    # headrace sysfs 1
    cpus_allowed	0-1
    class/net
    devices/pci0000:00/0000:00:03.0	class=0x020000	vendor=0x1af4	driver=virtio-pci

The directories are real ones, below `devices`; a link is followed, and `driver` is the last part of one. A directory
without texts (`class/net`) was there and could be listed.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import InputError
from headrace.fabric.topology.cpus import cpu_text, parse_cpus
from headrace.fabric.topology.machine import PciPath

FIRST_LINE = "# headrace sysfs 1"
MOST_FILE_BYTES = 16 * 2**20
MOST_TEXT_BYTES = 4096

_CPUS_ALLOWED = "cpus_allowed"
_LISTINGS = ("bus/pci/devices", "class/infiniband", "class/net", "devices/system/node")
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("online",),
    "node": ("cpulist", "distance"),
    "pci": ("class", "vendor", "device", "numa_node", "current_link_speed", "current_link_width"),
    "net": ("type", "operstate", "speed", "ifindex", "iflink"),
    "port": ("state", "rate"),
}

_NETWORK = "0x02"
_WANTED_CLASSES = (_NETWORK, "0x03", "0x12", "0x0604")
"""Networks, displays (GPUs among them), accelerators, PCI bridges. Source: PCI code and ID assignment."""
_FIELD = re.compile(r"([a-z_]+)=(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`tree`: directory, relative to /sys -> name -> text. `cpus_allowed` None where it was not recorded."""

    tree: Mapping[str, Mapping[str, str]]
    cpus_allowed: tuple[int, ...] | None = None


def read_machine() -> Snapshot:
    """Of the machine and for the process that calls."""
    return read_directory(Path("/sys"), cpus_allowed=tuple(sorted(os.sched_getaffinity(0))))


def read_directory(root: Path, *, cpus_allowed: tuple[int, ...] | None = None) -> Snapshot:
    """Of `root`, which is laid out as /sys. Links that lead out of it are not followed."""
    top = os.path.realpath(root)
    tree: dict[str, dict[str, str]] = {}
    for listing in _LISTINGS:
        names = _names(f"{top}/{listing}")
        if names is not None:
            tree[listing] = {}
        for name in names or ():
            tree.update(_entry(top, listing, name))
    online = _texts(f"{top}/devices/system/cpu", _TEXTS["cpu"])
    if online:
        tree["devices/system/cpu"] = online
    plain = {_plain(path): texts for path, texts in tree.items()}
    return Snapshot(tree=dict(sorted(plain.items())), cpus_allowed=cpus_allowed)


def _entry(top: str, listing: str, name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The directories that belong to one name of a listing."""
    real = os.path.realpath(f"{top}/{listing}/{name}")
    if not real.startswith(f"{top}/") or not os.path.isdir(real):
        return
    path = real.removeprefix(f"{top}/")
    if listing == "bus/pci/devices":
        texts = _function(real)
        if texts.get("class", _NETWORK).startswith(_WANTED_CLASSES):
            yield path, texts
        return
    function = PciPath.of(path)
    if function is not None:  # behind a NIC; the list of all PCI devices may be hidden
        above = path[: path.rindex(function.address) + len(function.address)]
        yield above, _function(f"{top}/{above}")
    if listing == "class/infiniband":
        yield path, {}
        for port in _names(f"{real}/ports") or ():
            yield f"{path}/ports/{port}", _texts(f"{real}/ports/{port}", _TEXTS["port"])
    elif listing == "class/net":
        yield path, _texts(real, _TEXTS["net"])
    elif re.fullmatch(r"node[0-9]+", name):
        yield path, _texts(real, _TEXTS["node"])


def _names(directory: str) -> list[str] | None:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return None


def _texts(directory: str, names: tuple[str, ...]) -> dict[str, str]:
    texts = {name: _text(f"{directory}/{name}") for name in names}
    return {name: text for name, text in texts.items() if text is not None}


def _text(path: str) -> str | None:
    """The first line. A text of sysfs is neither a link nor a pipe; in somebody's copy of it, it may be."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        lines = os.read(fd, MOST_TEXT_BYTES).decode(errors="replace").splitlines()
    except OSError:  # such as EINVAL for the speed of an interface that is down
        return None
    finally:
        os.close(fd)
    return (_plain(lines[0].strip()) or None) if lines else None


def _function(directory: str) -> dict[str, str]:
    texts = _texts(directory, _TEXTS["pci"])
    try:
        return {**texts, "driver": _plain(os.path.basename(os.readlink(f"{directory}/driver")))}
    except OSError:
        return texts


def _plain(text: str) -> str:
    """Names and texts end up in a terminal and in a file of lines and tabs."""
    return "".join(char if char.isprintable() else "?" for char in text)


# ---- the file --------------------------------------------------------------------------------------------------


def format_snapshot(snapshot: Snapshot) -> str:
    lines = [FIRST_LINE]
    if snapshot.cpus_allowed is not None:
        lines.append(f"{_CPUS_ALLOWED}\t{cpu_text(snapshot.cpus_allowed)}")
    for path, texts in snapshot.tree.items():
        lines.append("\t".join([path, *(f"{name}={text}" for name, text in texts.items())]))
    return "\n".join(lines) + "\n"


def read_recording(file: Path) -> Snapshot:
    """Raises InputError for what is no recording, OSError for what cannot be read."""
    with file.open("rb") as stream:
        content = stream.read(MOST_FILE_BYTES + 1)
    if len(content) > MOST_FILE_BYTES:
        raise InputError("sysfs", f"must be a recording of at most {MOST_FILE_BYTES >> 20} MiB, {file} is larger")
    try:
        return parse_recording(content.decode())
    except UnicodeDecodeError:
        raise InputError("sysfs", f"must be a recording, which is text in UTF-8; {file} is not") from None


def parse_recording(text: str) -> Snapshot:
    """Raises InputError, with the number of the line."""
    lines = text.split("\n")
    if lines[0].rstrip() != FIRST_LINE:
        raise InputError("sysfs", f"must be a recording, whose first line is {FIRST_LINE!r}")
    tree: dict[str, dict[str, str]] = {}
    cpus_allowed: tuple[int, ...] | None = None
    for number, line in enumerate(lines, start=1):
        path, *fields = line.rstrip("\r").split("\t")
        if not line.strip() or path.startswith("#"):
            continue
        if path == _CPUS_ALLOWED:
            cpus_allowed = parse_cpus(fields[0]) if len(fields) == 1 else None
            if cpus_allowed is None:
                raise InputError("sysfs", f"line {number}: must be CPUs such as 0-3,8")
        elif path in tree:
            raise InputError("sysfs", f"line {number}: must name each directory once, {path} was there before")
        else:
            tree[path] = _fields(fields, number)
            if not path.isprintable() or path.startswith("/") or ".." in path.split("/"):
                raise InputError("sysfs", f"line {number}: must begin with a directory below /sys")
    return Snapshot(tree=tree, cpus_allowed=cpus_allowed)


def _fields(fields: list[str], number: int) -> dict[str, str]:
    matches = [_FIELD.fullmatch(field) for field in fields]
    texts = {match[1]: match[2] for match in matches if match and match[2].isprintable()}
    if len(texts) < len(fields):
        raise InputError("sysfs", f"line {number}: must have fields such as class=0x020000, each once, after tabs")
    return texts
