"""A plan as one page that needs nothing else. Pure but for its template."""

from collections.abc import Iterator
from importlib.resources import files

from markupsafe import Markup

from headrace.bench.report.page import Picture, rendered
from headrace.cli.plan.report import pictures
from headrace.cli.plan.report.terminal import error_text, power_text, wanted_text
from headrace.cli.plan.report.told import PlanTold


def page(told: PlanTold) -> str:
    """HTML."""
    return rendered(
        files("headrace.cli.plan.report").joinpath("page.html.jinja").read_text(encoding="utf-8"),
        told=told,
        pictures=list(_pictures(told)),
        wanted=wanted_text(told),
        error=error_text(told),
        ms=lambda seconds: "-" if seconds is None else f"{seconds * 1e3:,.1f} ms",
        power=power_text,
        percent=lambda share: f"{share:.0%}",
    )


def _pictures(told: PlanTold) -> Iterator[Picture]:
    made = (
        (
            "What a device does, over the TPOT budget",
            "The two deployments above, each at the highest rate at which they keep both budgets; dotted: the budget "
            "that was asked for.",
            pictures.frontier(told),
        ),
        (
            "Split by colocated, by lengths",
            "Requests a second and device at the asked budgets, split by colocated, each with the sharding, chunk size "
            "and ratio that suit those lengths. In closed form, for many devices: single instances that were simulated "
            "differ by up to a factor of two, so only what is far from 1 says something. A dash: neither keeps the "
            "budgets.",
            pictures.region(told),
        ),
        ("Chunk sizes, colocated", "The least that holds with each.", pictures.chunks(told)),
    )
    for title, caption, svg in made:
        if svg:
            yield Picture(title=title, caption=caption, svg=Markup(svg))
