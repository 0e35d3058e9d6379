"""Plots of a comparison as SVG, to be put into a page: their text is text, their colours are the page's.

Drawn by matplotlib in colours that stand for roles (ink, rule, one for each arm) and are replaced by CSS variables, so
that the page's light and dark themes are the pictures' too. Loaded only when a report is made.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from headrace.bench.evidence import TARGETS, ArmFigures
from headrace.bench.metrics import all_itls_s, mean_waterfall, ttft_s
from headrace.bench.records import RequestRecord, Run
from headrace.bench.report.figures import Figures

INK, RULE = "#010101", "#020202"
HUES = ("#030301", "#030302", "#030303", "#030304", "#030305", "#030306", "#030307", "#030308")
"""Stand-ins: the page has a colour for each."""

PARTS: Mapping[str, str] = {
    "gateway_s": "gateway",
    "queue_s": "queue",
    "prefill_s": "prefill",
    "exposed_transfer_s": "exposed transfer",
    "hand_over_s": "hand-over",
    "first_step_s": "first step",
}
NOBODY = {"Date": None, "Creator": None}
MOST_LANES = 28
MOST_POINTS = 400  # of a curve: more are not seen

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "headrace",  # the same records, the same picture
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}


def drawn(draw: Callable[[Figure], None], *, width: float = 7.2, height: float = 2.8) -> str:
    """Inches. -> an svg element."""
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # its keys are a type of 300 literals
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        draw(figure)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata=NOBODY)  # type: ignore[no-untyped-call]
    return _themed(text.getvalue())


def _themed(svg: str) -> str:
    """Only the element, in the page's colours, as wide as there is room for."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="img"', svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, name in ((INK, "ink"), (RULE, "rule"), *((hue, f"hue{nth}") for nth, hue in enumerate(HUES))):
        svg = svg.replace(colour, f"var(--{name})")
    return svg


# ---- each of them ----------------------------------------------------------------------------------------------


def hue_of(told: Figures, arm: str) -> str:
    """The same in every picture, for the arms that are shown in more than one of them."""
    names = [one.arm for one in _contenders(told)]
    rest = sorted({one.arm for one in told.evidence.figures} - set(names))
    return HUES[[*names, *rest].index(arm) % len(HUES)]


def kept_over_rate(told: Figures) -> str:
    """Attainment over rate for each arm."""
    workloads = [one.name for one in told.comparison.workloads]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(workloads), squeeze=False)[0]
        for axes, workload in zip(panels, workloads, strict=True):
            for one in _of(told, workload):
                kept = [100 * share for share in one.kept]
                axes.plot(one.rates, kept, "o-", color=hue_of(told, one.arm), label=one.arm, markersize=4)
            axes.axhline(100 * TARGETS[0], color=INK, linewidth=0.8, linestyle=":")
            axes.set_title(workload)
            axes.set_xlabel("requests/s")
            axes.set_ylabel("% that kept both budgets")
            axes.set_ylim(-3, 103)
        panels[0].legend(fontsize=8, loc="lower left")

    return drawn(draw, height=3.0)


def distributions(told: Figures, runs: Sequence[Run], workload: str) -> str:
    """First tokens and gaps of the contenders, at the highest rate that all were asked at."""
    chosen, rate = _paired_runs(told, runs, workload)

    def draw(figure: Figure) -> None:
        first, gaps = figure.subplots(1, 2)
        for arm, own in chosen.items():
            records = [record for run in own for record in run.counted]
            came = [value for record in records if (value := ttft_s(record)) < inf]
            _ecdf(first, came, hue_of(told, arm), arm)
            _ecdf(gaps, all_itls_s(records), hue_of(told, arm), arm)
        for axes, title, budget in (
            (first, "time to first token", told.comparison.slo.ttft_s),
            (gaps, "between tokens", told.comparison.slo.tpot_s),
        ):
            axes.axvline(budget, color=INK, linewidth=0.8, linestyle=":")
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(_seconds))
            axes.set_title(f"{title}, {workload} at {rate:.3g}/s")
            axes.set_ylabel("% no longer than that")
        first.legend(fontsize=8, loc="lower right")

    return drawn(draw)


def lanes(told: Figures, runs: Sequence[Run], workload: str) -> str:
    """The same arrivals in both contenders: a lane for each request, waiting until its first token, then its tokens."""
    chosen, rate = _paired_runs(told, runs, workload)
    last = {arm: own[0] for arm, own in chosen.items()}

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(last), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (arm, run) in zip(panels, last.items(), strict=True):
            for lane, record in enumerate(run.counted[:MOST_LANES]):
                _lane(axes, lane, record, hue_of(told, arm))
            axes.set_title(f"{arm}, {workload} at {rate:.3g}/s")
            axes.set_yticks([])
            axes.invert_yaxis()
            axes.grid(visible=False)
        panels[-1].set_xlabel("seconds; a line: waits for its first token; a mark: a token")

    return drawn(draw, height=1.0 + 2.1 * len(last))


def waterfalls(told: Figures, runs: Sequence[Run], workload: str) -> str:
    """Where the time to the first token goes: means of the contenders."""
    chosen, rate = _paired_runs(told, runs, workload)
    means = {arm: _mean_parts(own) for arm, own in chosen.items()}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, (_, parts) in enumerate(means.items()):
            begin = 0.0
            for nth, (name, seconds) in enumerate(parts.items()):
                axes.barh(row, 1e3 * seconds, left=1e3 * begin, color=HUES[nth], label=name if row == 0 else None)
                begin += seconds
        axes.set_yticks(range(len(means)), list(means))
        axes.invert_yaxis()
        axes.set_xlabel(f"ms, {workload} at {rate:.3g}/s, mean of its requests")
        axes.grid(visible=False, axis="y")
        axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.35))

    return drawn(draw, height=1.3 + 0.5 * len(means))


def chunk_sweep(told: Figures, workload: str) -> str | None:
    """What the chunk size does in the colocated arms, at the rate that all of them were asked at."""
    own = [one for one in _of(told, workload) if told.comparison.arm(one.arm).kind == "colocated"]
    shared = sorted(set.intersection(*(set(one.rates) for one in own))) if own else []
    if len(own) < 2 or not shared:
        return None
    rate = shared[0]
    own.sort(key=lambda one: told.comparison.arm(one.arm).chunk_tokens or 0)
    sizes = [str(told.comparison.arm(one.arm).chunk_tokens) for one in own]

    def draw(figure: Figure) -> None:
        for axes, title, values in zip(
            figure.subplots(1, 3),
            ("% kept", "first token, p90, ms", "longest gap, ms"),
            (
                [100 * one.kept[one.rates.index(rate)] for one in own],
                [1e3 * (one.ttft_p90_s[one.rates.index(rate)] or inf) for one in own],
                [1e3 * (one.stall.longest_s if one.stall else 0.0) for one in own],
            ),
            strict=True,
        ):
            axes.bar(sizes, [0.0 if value == inf else value for value in values], color=HUES[0], width=0.6)
            axes.set_title(title)
            axes.grid(visible=False, axis="x")
        figure.axes[1].set_xlabel(f"chunk, tokens; {workload} at {rate:.3g}/s")

    return drawn(draw, height=2.2)


# ---- their parts -----------------------------------------------------------------------------------------------


def _ecdf(axes: Axes, values: Sequence[float], hue: str, label: str) -> None:
    ordered = sorted(value for value in values if value > 0)
    picks = [round(nth * (len(ordered) - 1) / (MOST_POINTS - 1)) for nth in range(MOST_POINTS)] if ordered else []
    kept = sorted(set(picks))
    shares = [100 * (nth + 1) / len(ordered) for nth in kept]
    axes.plot([ordered[nth] for nth in kept], shares, color=hue, label=label, drawstyle="steps-post")


def _lane(axes: Axes, lane: int, record: RequestRecord, hue: str) -> None:
    first = record.token_s[0] if record.token_s else record.arrival_s
    axes.plot([record.arrival_s, first], [lane, lane], color=INK, linewidth=0.7)
    axes.plot(record.token_s, [lane] * len(record.token_s), "|", color=hue, markersize=4, markeredgewidth=0.7)


def _mean_parts(runs: Sequence[Run]) -> dict[str, float]:
    mean = mean_waterfall(record for run in runs for record in run.counted)
    return {name: getattr(mean, field) or 0.0 for field, name in PARTS.items()}


def _of(told: Figures, workload: str) -> list[ArmFigures]:
    return [one for one in told.evidence.figures if one.workload == workload]


def _contenders(told: Figures) -> list[ArmFigures]:
    """The rival and the best split arm of every workload; each once."""
    names = dict.fromkeys(
        name for contest in told.evidence.contests for name in (contest.colocated, contest.split) if name is not None
    )
    return [next(one for one in told.evidence.figures if one.arm == name) for name in names]


def _paired_runs(told: Figures, runs: Sequence[Run], workload: str) -> tuple[dict[str, list[Run]], float]:
    """Of the contenders, at the highest rate that all of them were asked at; the rival first."""
    contest = next(one for one in told.evidence.contests if one.workload == workload)
    names = [name for name in (contest.colocated, contest.split) if name is not None]
    own = {name: [run for run in runs if run.head.arm == name and run.head.workload == workload] for name in names}
    rate = max(set.intersection(*({run.head.rate for run in each} for each in own.values())), default=0.0)
    return {name: [run for run in each if run.head.rate == rate] for name, each in own.items()}, rate


def _seconds(value: float, _: object) -> str:
    return f"{value:g} s" if value >= 1 else f"{1e3 * value:g} ms"
