"""All figures as rows of one table, for spreadsheets: arm, workload, rate, repetition, class, figure, value. Pure."""

import csv
import io
from collections.abc import Iterator

import msgspec

from headrace.bench.evidence import RunSummary
from headrace.bench.report.figures import Figures

HEAD = ("arm", "workload", "rate", "repetition", "class", "figure", "value")


def as_csv(told: Figures) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEAD)
    for run in told.evidence.runs:
        writer.writerows(_rows(run))
    return text.getvalue()


def _rows(run: RunSummary) -> Iterator[tuple[str, ...]]:
    for name, summary in run.classes.items():
        for figure, value in _flat("", msgspec.to_builtins(summary)):
            yield (run.arm, run.workload, f"{run.rate:g}", str(run.repetition), name, figure, value)
    for figure, number in run.facts.items():
        yield (run.arm, run.workload, f"{run.rate:g}", str(run.repetition), "all", figure, f"{number:g}")


def _flat(place: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{place}.{name}".lstrip("."), inner)
    else:
        yield place, "" if value is None else str(value)
