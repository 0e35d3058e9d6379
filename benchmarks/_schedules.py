"""Two schedules side by side, drawn from a measured run of each: one tick for each token of each running stream.

Owns no data; `interference.py` hands it its runs. The picture is plain SVG, which can be read and compared as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, LEFT, RIGHT, ROW, GAP = 1100, 150, 30, 26, 8
LABEL_WIDTH = 50  # a gap as wide as that has its length written into it
INK, SOFT, BAND, LATE, TICK = "#1f2933", "#52606d", "#fdf3ec", "#c2410c", "#1d4ed8"


@dataclass(frozen=True)
class Schedule:
    """Times in seconds from the run's begin. `prompt` is when a long prompt was in flight."""

    title: str
    streams: Sequence[Sequence[float]]
    prompt: tuple[float, float]
    note: str


@dataclass(frozen=True)
class Window:
    """Of time around the begin of the long prompt."""

    before_s: float
    after_s: float

    @property
    def scale(self) -> float:
        return (WIDTH - LEFT - RIGHT) / (self.before_s + self.after_s)


def draw(schedules: Sequence[Schedule], *, before_s: float, after_s: float) -> str:
    """Each from `before_s` before its long prompt to `after_s` after that one's begin, all on one scale."""
    window = Window(before_s, after_s)
    parts: list[str] = []
    y = 20.0
    for schedule in schedules:
        y = _panel(parts, schedule, y, window)
    _axis(parts, y, window)
    height = y + 40
    label = "Tokens of four running streams while a long prompt is computed, under both schedules"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" role="img" '
        f'aria-label="{label}">\n<rect width="{WIDTH}" height="{height:.0f}" rx="10" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(parts: list[str], schedule: Schedule, y: float, window: Window) -> float:
    begin = schedule.prompt[0] - window.before_s
    end = schedule.prompt[0] + window.after_s

    def at(time_s: float) -> float:
        return LEFT + (min(max(time_s, begin), end) - begin) * window.scale

    parts.append(_text(16, y + 14, schedule.title, size=16, bold=True))
    parts.append(_text(WIDTH - RIGHT, y + 14, schedule.note, anchor="end", colour=SOFT))
    y += 28
    height = ROW * (len(schedule.streams) + 1) + GAP
    x0, x1 = at(schedule.prompt[0]), at(schedule.prompt[1])
    parts.append(_rect(x0, y, x1 - x0, height, BAND))
    parts.append(_rect(x0, y + 4, x1 - x0, ROW - 8, LATE, opacity=0.55))
    parts.append(_text(16, y + 17, "long prompt", colour=LATE))
    for number, times in enumerate(schedule.streams):
        top = y + ROW * (number + 1) + GAP
        parts.append(_text(16, top + 17, f"stream {number + 1}"))
        parts += [_rect(at(time_s) - 0.6, top + 3, 1.2, ROW - 6, TICK) for time_s in times if begin <= time_s <= end]
        for early, late in pairwise(times):
            width = at(late) - at(early)
            if width >= LABEL_WIDTH and begin <= early and late <= end:
                parts.append(_text(at(early) + width / 2, top + 17, f"{1e3 * (late - early):.0f} ms", anchor="middle"))
    return y + height + 22


def _axis(parts: list[str], y: float, window: Window) -> None:
    for second in range(-int(window.before_s), int(window.after_s) + 1):
        x = LEFT + (second + window.before_s) * window.scale
        parts.append(_rect(x, y - 14, 1, 6, SOFT))
        parts.append(_text(x, y + 6, f"{second} s", anchor="middle", colour=SOFT))


def _text(
    x: float, y: float, text: str, *, size: int = 13, bold: bool = False, anchor: str = "start", colour: str = INK
) -> str:
    weight = ' font-weight="700"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1.0) -> str:
    see_through = f' opacity="{opacity}"' if opacity < 1 else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{see_through}/>'
