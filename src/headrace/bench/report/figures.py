"""Everything that a report tells, computed from the records in a directory. Reads files; the rest is pure."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.bench.comparison import Comparison, read_comparison, runs_of
from headrace.bench.evidence import Evidence, gather
from headrace.bench.records import Run
from headrace.bench.verdict import Verdict, judge, overall

JSON = "report.json"


class Figures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As report.json holds it."""

    comparison: Comparison
    verdict: Verdict
    verdicts: tuple[Verdict, ...]
    evidence: Evidence


def figures_of(directory: Path) -> tuple[Figures, list[Run]]:
    """With the runs that it is made of. Raises InputError."""
    comparison, runs = read_comparison(directory), list(runs_of(directory))
    evidence = gather(comparison, runs)
    verdicts = judge(comparison, evidence)
    told = Figures(comparison=comparison, verdict=overall(verdicts), verdicts=verdicts, evidence=evidence)
    return told, runs


def recheck(directory: Path) -> list[str]:
    """What report.json says otherwise than the records: each a place in it, and both values. Raises InputError."""
    told, _ = figures_of(directory)
    kept = msgspec.json.decode((directory / JSON).read_bytes())
    return list(_differences("", kept, msgspec.json.decode(msgspec.json.encode(told))))


def _differences(place: str, kept: object, told: object) -> Iterator[str]:
    if isinstance(kept, dict) and isinstance(told, dict):
        for name in dict.fromkeys((*kept, *told)):
            yield from _differences(f"{place}.{name}".lstrip("."), kept.get(name), told.get(name))
    elif isinstance(kept, list) and isinstance(told, list) and len(kept) == len(told):
        for nth, (one, other) in enumerate(zip(kept, told, strict=True)):
            yield from _differences(f"{place}[{nth}]", one, other)
    elif kept != told:
        yield f"{place}: the report says {_short(kept)}, the records {_short(told)}"


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}.."
