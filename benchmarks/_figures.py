"""Figures as tables show them, and how disturbed the machine was while they were taken."""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.machine import describe_machine, steal_share, ticks

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Median (lowest-highest); a dash where nothing was measured."""
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def head(*cells: str) -> str:
    return f"{row(*cells)}\n|{'---|' * len(cells)}"


class Conditions:
    """The machine's load at the begin, and load and stolen time at the end."""

    def __init__(self, workload: str) -> None:
        self._begin = ticks()
        print(f"{workload}\n{describe_machine()}", flush=True)

    def end(self) -> None:
        load = describe_machine().rpartition("load ")[2]
        print(f"\nsteal {100 * steal_share(self._begin):.1f} %, load {load} at the end", flush=True)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="keep every run")


def keep(file: Path | None, runs: Sequence["DataclassInstance"]) -> None:
    if file is not None:
        file.write_text(json.dumps([asdict(run) for run in runs]))
