"""A plan's files: page and JSON."""

from pathlib import Path

import msgspec

from headrace.cli.plan.report.page import page
from headrace.cli.plan.report.told import PlanTold

HTML, JSON = "plan.html", "plan.json"


def write_plan(directory: Path, told: PlanTold) -> Path:
    """-> the page."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / JSON).write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    (directory / HTML).write_text(page(told), encoding="utf-8")
    return directory / HTML
