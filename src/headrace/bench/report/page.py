"""The report as one page that needs nothing else: no script, nothing from elsewhere. Pure but for its template."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from headrace.bench.evidence import TARGETS, target_name
from headrace.bench.metrics import Interval
from headrace.bench.records import Run
from headrace.bench.report import pictures
from headrace.bench.report.figures import Figures
from headrace.bench.report.terminal import goodput_text

DEFINITIONS = (
    (
        "time to first token (TTFT)",
        "from the intended arrival, whether or not the client was in time, to the first token's bytes at the client",
    ),
    (
        "second token",
        "from the first token's bytes to the second's: what a hand-over between the phases adds is there or in TTFT",
    ),
    ("time per output token (TPOT)", "from a request's first token to its last, by the tokens after the first"),
    (
        "inter-token latency (ITL)",
        "between two tokens of a request that came one after the other; in flight: while another request waited for "
        "its first token",
    ),
    ("stall, longest gap", "the longest ITL of a run; of an arm the median over its runs"),
    ("kept", "requests that kept both budgets, by all that came; whatever failed kept none"),
    (
        "goodput",
        "the highest rate at which so many requests keep both budgets, linear between the two rates beside it; >= "
        "where the highest that was tried still did, < where the lowest did not",
    ),
    (
        "intervals",
        "95 %, bootstrap over paired repetitions, widened for few of them as Student's t is; both arms had the same "
        "arrivals and tokens",
    ),
    ("exposed transfer", "what the transfer of the KV adds after the prefill has ended"),
    ("shared memory", "what more than one of the processes maps: weights count here, once"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    title: str
    caption: str
    svg: Markup


def page(told: Figures, runs: Sequence[Run]) -> str:
    """HTML."""
    return rendered(
        files("headrace.bench.report").joinpath("page.html.jinja").read_text(encoding="utf-8"),
        told=told,
        pictures=list(_pictures(told, runs)),
        definitions=DEFINITIONS,
        targets=[target_name(target) for target in TARGETS],
        ms=_ms,
        number=lambda value: f"{value:.3g}",
        percent=lambda share: f"{share:.0%}",
        interval=_interval,
        goodput=goodput_text,
        megabytes=lambda num: f"{num / 1e6:,.0f}",
    )


def rendered(template: str, **values: Any) -> str:  # noqa: ANN401 (whatever the template asks for)
    """HTML, in the style of all our pages."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    style = Markup(files("headrace.bench.report").joinpath("page.css").read_text(encoding="utf-8"))
    return environment.from_string(template).render(style=style, **values)


def _pictures(told: Figures, runs: Sequence[Run]) -> Sequence[Picture]:
    found = [
        Picture(
            title="Requests that kept both budgets, by rate",
            caption="Means over repetitions; the dotted line is nine of ten.",
            svg=Markup(pictures.kept_over_rate(told)),
        )
    ]
    for contest in told.evidence.contests:
        if not contest.differences:  # no rate that both were asked at
            continue
        workload = contest.workload
        made = (
            ("Latencies", "Dotted: the budget.", pictures.distributions(told, runs, workload)),
            ("The same arrivals in both", "Gaps in a lane's marks are stalls.", pictures.lanes(told, runs, workload)),
            ("Where the first token's time goes", "", pictures.waterfalls(told, runs, workload)),
            ("Chunk sizes, colocated", "The best is the rival.", pictures.chunk_sweep(told, workload)),
        )
        found += [Picture(title=title, caption=text, svg=Markup(svg)) for title, text, svg in made if svg]
    return found


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def _interval(value: Interval | None, factor: float = 1.0) -> str:
    if value is None:
        return "-"
    digits = 0 if factor > 1 else 2
    mean = f"{value.mean * factor:.{digits}f}"
    if value.low is None or value.high is None:
        return f"{mean} (one value)"
    return f"{mean} ({value.low * factor:.{digits}f} to {value.high * factor:.{digits}f})"
