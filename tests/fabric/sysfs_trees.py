"""The recorded and synthetic trees of `sysfs/`, parts of them, and a tree laid out as a directory again."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from headrace.fabric.topology.snapshot import Snapshot, read_recording

TREES = Path(__file__).parent / "sysfs"
EFA, CONNECTX, GUEST = "efa_8gpu", "connectx_8gpu", "virtual_machine"
ALL = (EFA, CONNECTX, GUEST)


@cache
def tree(name: str) -> Snapshot:
    return read_recording(TREES / f"{name}.txt")


def without(snapshot: Snapshot, is_hidden: Callable[[str], bool]) -> Snapshot:
    """Without the directories of which it is true."""
    return replace(snapshot, tree={path: texts for path, texts in snapshot.tree.items() if not is_hidden(path)})


def with_text(snapshot: Snapshot, ending: str, name: str, text: str | None) -> Snapshot:
    """One text replaced, or unreadable, in every directory that ends so and has it."""
    changed = {}
    for path, texts in snapshot.tree.items():
        ours = path.endswith(ending) and name in texts
        changed[path] = {key: value for key, value in {**texts, name: text}.items() if value} if ours else texts
    return replace(snapshot, tree=changed)


def rdma(path: str) -> bool:
    return "infiniband" in path


def numa_nodes(path: str) -> bool:
    return path.startswith("devices/system/node")


def laid_out(snapshot: Snapshot, root: Path) -> Path:
    """The directory that reads as the snapshot: files, and links as /sys has them."""
    for path, texts in snapshot.tree.items():
        directory = root / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            if name == "driver":
                (directory / name).symlink_to(f"../../../bus/pci/drivers/{text}")
            else:
                (directory / name).write_text(text + "\n")
        listing = _listing_of(path, texts)
        if listing is not None and listing in snapshot.tree:
            (root / listing).mkdir(parents=True, exist_ok=True)
            (root / listing / directory.name).symlink_to("../" * (listing.count("/") + 1) + path)
    return root


def _listing_of(path: str, texts: object) -> str | None:
    parent = path.split("/")[-2] if "/" in path else ""
    if parent in {"net", "infiniband"} and path.startswith("devices/"):
        return f"class/{parent}"
    return "bus/pci/devices" if isinstance(texts, dict) and "class" in texts else None
