"""Plots of a plan as SVG, in the style of a comparison's. Loaded only when a report is made."""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headrace.bench.report.pictures import HUES, INK, RULE, drawn
from headrace.cli.plan.report.told import DeploymentTold, PlanTold

COLOCATED, SPLIT = HUES[1], HUES[0]


def frontier(told: PlanTold) -> str | None:
    points = told.frontier
    if not points:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name, hue in (("colocated", COLOCATED), ("split", SPLIT)):
            values = [getattr(point, name) for point in points]
            if any(value is not None for value in values):
                paces = [1e3 * point.tpot_s for point in points]
                axes.plot(paces, values, "o-", color=hue, label=name, markersize=4)
        axes.axvline(1e3 * told.slo.tpot_s, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel("TPOT budget, ms")
        axes.set_ylabel("requests/s and device")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="lower right")

    return drawn(draw, height=3.0)


def region(told: PlanTold) -> str | None:
    """A table of lengths: which architecture does more with a device, and by how much."""
    points = told.region
    if not points:
        return None
    prompts = sorted({point.prompt_tokens for point in points})
    outputs = sorted({point.output_tokens for point in points})
    by_lengths = {(point.prompt_tokens, point.output_tokens): point for point in points}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for column, prompt in enumerate(prompts):
            for row, output in enumerate(outputs):
                point = by_lengths[prompt, output]
                hue, strength, text = _cell(point.colocated, point.split)
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color=hue, alpha=strength, linewidth=0))
                axes.text(column, row, text, ha="center", va="center", fontsize=7)
        axes.set_xlim(-0.5, len(prompts) - 0.5)
        axes.set_ylim(-0.5, len(outputs) - 0.5)
        axes.set_xticks(range(len(prompts)), [f"{number:,}" for number in prompts])
        axes.set_yticks(range(len(outputs)), [f"{number:,}" for number in outputs])
        axes.grid(visible=False)
        axes.set_xlabel("prompt tokens")
        axes.set_ylabel("output tokens")

    return drawn(draw, height=3.4)


def _cell(colocated: float, split: float) -> tuple[str, float, str]:
    """-> colour, how strong it is, text."""
    if not colocated and not split:
        return RULE, 0.15, "-"
    if not colocated:
        return SPLIT, 0.6, "split"
    if not split:
        return COLOCATED, 0.6, "coloc."
    ratio = split / colocated
    if ratio >= 1:
        return SPLIT, min(0.6, 0.6 * (ratio - 1) + 0.04), f"{ratio:.2f}"
    return COLOCATED, min(0.6, 0.6 * (1 / ratio - 1) + 0.04), f"{ratio:.2f}"


def chunks(told: PlanTold) -> str | None:
    known = [(one.chunk_tokens, one.least) for one in told.chunks]
    if len(known) < 2 or all(least is None for _, least in known):
        return None
    sizes = [str(size) for size, _ in known]

    def draw(figure: Figure) -> None:
        for axes, title, values in zip(
            figure.subplots(1, 3),
            (told.objective if told.objective != "cost" else "price an hour", "% kept", "longest gap, ms"),
            (
                [0.0 if least is None else _amount(told, least) for _, least in known],
                [0.0 if least is None else 100 * least.held.attainment for _, least in known],
                [0.0 if least is None else 1e3 * (least.held.stall_s or 0.0) for _, least in known],
            ),
            strict=True,
        ):
            axes.bar(sizes, values, color=COLOCATED, width=0.6)
            axes.set_title(title)
            axes.grid(visible=False, axis="x")
            axes.tick_params(axis="x", labelsize=7)
        figure.axes[1].set_xlabel("chunk, tokens; nothing: no number of instances holds")

    return drawn(draw, height=2.2)


def _amount(told: PlanTold, least: DeploymentTold) -> float:
    return {"devices": float(least.devices), "cost": least.price_hour, "power": least.watts}[told.objective]
