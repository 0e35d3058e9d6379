"""`headrace fabric topology`: reads sysfs or a recording of it, then shows, writes or records what is there."""

import json
import sys
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from headrace.cli.fabric.topology_report import described, rendered
from headrace.cli.values import one_of
from headrace.errors import InputError
from headrace.fabric.topology.groups import TRANSPORTS, plan_domain_groups
from headrace.fabric.topology.machine import Transport
from headrace.fabric.topology.parse import parse_topology
from headrace.fabric.topology.snapshot import (
    Snapshot,
    format_snapshot,
    read_directory,
    read_machine,
    read_recording,
)

PANEL = "Topology"
BEST = "best"

Sysfs = Annotated[
    Path | None,
    typer.Option(
        "--sysfs",
        metavar="PATH",
        help="Another machine: a recording, or a directory laid out as /sys.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        help="Where to write what was read, for --sysfs elsewhere; without addresses, serial numbers, host names.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines, instead of tables.", rich_help_panel=PANEL)]
ForTransport = Annotated[
    str,
    typer.Option(
        "--transport",
        metavar="|".join((BEST, *TRANSPORTS)),
        help="Whose NICs the devices are given.",
        rich_help_panel=PANEL,
        parser=one_of(BEST, *TRANSPORTS),
    ),
]


def topology_command(
    *, sysfs: Sysfs = None, transport: ForTransport = BEST, as_json: AsJson = False, record: Record = None
) -> None:
    """Which NICs are near which GPU or NUMA node, and where the threads that drive them belong."""
    snapshot = _read(sysfs)
    topology = parse_topology(snapshot)
    groups = plan_domain_groups(topology, None if transport == BEST else cast("Transport", transport))
    if record is not None:
        _record(snapshot, record)
    if as_json:
        sys.stdout.write(json.dumps(described(topology, groups), indent=1) + "\n")
        return
    console = Console(markup=False, highlight=False, emoji=False)  # names come from outside
    for part in rendered(topology, groups):
        console.print(part)
    if record is not None:
        console.print(f"Recorded in {record}.", soft_wrap=True)


def _read(sysfs: Path | None) -> Snapshot:
    if sysfs is None:
        return read_machine()
    if sysfs.is_file():
        return read_recording(sysfs)
    if not sysfs.is_dir():
        raise InputError("sysfs", f"must be a recording or a directory laid out as /sys, {sysfs} is neither")
    snapshot = read_directory(sysfs)
    if not snapshot.tree:
        raise InputError("sysfs", f"must be laid out as /sys, with bus, class and devices, which {sysfs} is not")
    return snapshot


def _record(snapshot: Snapshot, file: Path) -> None:
    if file.is_dir() or not file.parent.is_dir():
        raise InputError("record", f"must be a file in a folder that exists, is {file}")
    file.write_text(format_snapshot(snapshot))
