"""A comparison as it lies in a directory, from which every figure can be computed again. Reads and writes files.

DIR/comparison.json                       what was compared, on what, by which commands
DIR/arrivals/WORKLOAD/RATE-REP.json       each arrival list
DIR/runs/ARM/WORKLOAD/RATE-REP.jsonl      what came of each request (`records`)
DIR/report.html, report.json, report.csv  made of these, and nothing else
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from headrace.bench.metrics import Slo
from headrace.bench.records import Run, read_run
from headrace.errors import InputError

FORMAT = 1
FILE = "comparison.json"

Kind = Literal["colocated", "split", "target"]


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to serve. `devices`: that its instances have together; on CPUs a device is a core. `commands`: its
    processes, as they were started; of a target none."""

    name: str
    kind: Kind
    devices: int
    chunk_tokens: int | None = None
    num_prefillers: int = 0
    num_decoders: int = 0
    is_local_prefill: bool = False  # of a split one: prompts are computed at the decoder where that is cheaper
    commands: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """As a folder."""
        return slug(self.name)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`notes`: what it is, and what was done to it."""

    name: str
    notes: tuple[str, ...] = ()


class Rejected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that failed itself, and is in no figure."""

    arm: str
    workload: str
    rate: float
    repetition: int
    reasons: tuple[str, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`slo_source`: given, or where it comes from. `rates`: requests a second, by workload, that all arms were asked
    with, `repetitions` times each. `facts`: measured beside all runs, by arm: such as bytes of memory, seconds until a
    killed instance was made up for. What could not be measured is in `not_measured`, with the reason."""

    format: int = FORMAT
    began: str
    command: str
    versions: dict[str, str]
    machine: str
    model: str
    seed: int
    slo: Slo
    slo_source: str
    link: str
    arms: tuple[Arm, ...]
    workloads: tuple[Workload, ...]
    rates: dict[str, tuple[float, ...]]
    repetitions: int
    is_whole: bool = False
    rejected: tuple[Rejected, ...] = ()
    facts: dict[str, dict[str, float]] = {}
    not_measured: dict[str, str] = {}

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


def slug(name: str) -> str:
    """A name of letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-").lower() or "arm"


# ---- files -----------------------------------------------------------------------------------------------------


def write_comparison(directory: Path, comparison: Comparison) -> None:
    """Whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{FILE}.part"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(comparison), indent=1) + b"\n")
    part.replace(directory / FILE)


def read_comparison(directory: Path) -> Comparison:
    """Raises InputError naming the file, and the field where one is wrong."""
    file = directory / FILE
    try:
        told = file.read_bytes()
    except OSError as error:
        raise InputError(str(directory), f"must be the directory of a comparison, has no {FILE} ({error})") from error
    try:
        version = msgspec.json.decode(told, type=_Version).format
        if version != FORMAT:
            raise InputError(f"{file}: format", f"must be {FORMAT}, which this headrace writes, is {version}")
        return msgspec.json.decode(told, type=Comparison)
    except msgspec.DecodeError as error:
        raise InputError(str(file), f"must be a comparison: {error}") from error


class _Version(msgspec.Struct):
    format: int


def run_file(directory: Path, arm: Arm, workload: str, rate: float, repetition: int, *, under: str = "runs") -> Path:
    return directory / under / arm.slug / slug(workload) / f"{rate:g}-{repetition}.jsonl"


def arrivals_file(directory: Path, workload: str, rate: float, repetition: int) -> Path:
    return directory / "arrivals" / slug(workload) / f"{rate:g}-{repetition}.json"


def runs_of(directory: Path) -> Iterator[Run]:
    """All that are whole, in the order of their files' names. Raises InputError for one that is not."""
    for file in sorted((directory / "runs").rglob("*.jsonl")):
        yield read_run(file)
