"""The report's files: page, JSON, CSV."""

from pathlib import Path

import msgspec

from headrace.bench.report.figures import JSON, figures_of
from headrace.bench.report.page import page
from headrace.bench.report.rows import as_csv
from headrace.bench.report.terminal import screen

HTML, CSV = "report.html", "report.csv"


def write_report(directory: Path) -> str:
    """-> one screen of it. Raises InputError."""
    told, runs = figures_of(directory)
    (directory / JSON).write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    (directory / CSV).write_text(as_csv(told), encoding="utf-8")
    (directory / HTML).write_text(page(told, runs), encoding="utf-8")
    return screen(told, str(directory / HTML))
