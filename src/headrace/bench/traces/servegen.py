"""ServeGen's clients: of each, by ten minutes, the rate and the law of its gaps; arrivals are drawn from them.

Lengths come from `NAME_client0_dataset.json` or `NAME_dataset.json` beside `NAME_clients.csv`: by times of the day, how
likely each length of prompts and answers is. Source: github.com/alibaba/ServeGen, Apache-2.0; Xiang et al., ServeGen
(2025).
"""

import ast
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate
from pathlib import Path

import msgspec

from headrace.bench.traces.lines import Line, Reader
from headrace.bench.workload import Arrival
from headrace.errors import InputError

WINDOW_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Of one client. Gaps in seconds, of a gamma or a Weibull law."""

    begin_s: float
    rate: float
    law: str
    shape: float
    scale: float

    def gap_s(self, draw: random.Random) -> float:
        if self.law == "Weibull":
            return draw.weibullvariate(self.scale, self.shape)
        return draw.gammavariate(self.shape, self.scale) if self.law == "Gamma" else draw.expovariate(self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """From a time of the day on."""

    begin_s: float
    prompt: "_Law"
    output: "_Law"


class _Law:
    def __init__(self, shares: dict[int, float]) -> None:
        self._values = list(shares)
        self._upto = list(accumulate(shares.values()))

    def draw(self, draw: random.Random) -> int:
        return self._values[min(bisect_right(self._upto, draw.uniform(0, self._upto[-1])), len(self._values) - 1)]


def _read(lines: Iterator[Line], seed: int, begin_s: float) -> Iterator[Arrival | None]:
    clients: dict[int, list[_Window]] = {}
    file = ""
    for line in lines:
        file = line.place.rpartition(":")[0]
        window = _window(line)
        if window.rate > 0:
            clients.setdefault(line.count("client"), []).append(window)
    lengths = _read_lengths(Path(file))
    draw = random.Random(f"servegen lengths, {seed}")
    times = merge(
        *(_times(windows, random.Random(f"servegen {client}, {seed}"), begin_s) for client, windows in clients.items())
    )
    for at_s in times:
        now = lengths[max(0, bisect_right(lengths, at_s, key=lambda one: one.begin_s) - 1)]
        prompt, output = now.prompt.draw(draw), now.output.draw(draw)
        yield Arrival(at_s=at_s, prompt_tokens=prompt, max_tokens=output) if prompt > 0 and output > 0 else None


def _times(windows: Sequence[_Window], draw: random.Random, begin_s: float) -> Iterator[float]:
    for window in windows:
        if window.begin_s + WINDOW_S <= begin_s:
            continue
        at_s = window.begin_s + window.gap_s(draw) * draw.random()
        while at_s < window.begin_s + WINDOW_S:
            yield at_s
            at_s += window.gap_s(draw)


def _window(line: Line) -> _Window:
    rate, law = line.number("rate_rps"), line.fields.get("pattern") or ""
    if law not in {"", "Gamma", "Weibull"}:
        raise InputError(line.place, f"must have Gamma, Weibull or nothing as pattern, has {law[:40]!r}")
    shape, scale = line.number("param1"), line.number("param2")
    if law and not (shape > 0 and scale > 0):
        raise InputError(line.place, f"must have param1 and param2 above 0 for {law}, has {shape:g} and {scale:g}")
    return _Window(begin_s=line.number("start_s"), rate=rate, law=law, shape=shape, scale=scale)


def _read_lengths(clients: Path) -> list[_Lengths]:
    """Sorted by their begin, of which there is at least one."""
    stem = clients.stem.removesuffix("_clients")
    files = [clients.with_name(f"{stem}_{name}.json") for name in ("client0_dataset", "dataset")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise InputError(str(clients), f"must have its lengths beside it, in {files[1].name}")
    try:
        told = msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, str]])
        found = [
            _Lengths(begin_s=float(begin), prompt=_law(laws["input_tokens"]), output=_law(laws["output_tokens"]))
            for begin, laws in told.items()
            if laws["input_tokens"] != "{}" and laws["output_tokens"] != "{}"  # nothing came at that time
        ]
    except (msgspec.DecodeError, KeyError, ValueError, SyntaxError) as error:
        raise InputError(
            str(file), f"must tell input_tokens and output_tokens by time of the day: {error!r}"
        ) from error
    if not found:
        raise InputError(str(file), "must tell the lengths of one time of the day at least")
    return sorted(found, key=lambda one: one.begin_s)


def _law(text: str) -> _Law:
    """`{45: 0.0097, 46: 0.0117, ..}`."""
    shares = ast.literal_eval(text)
    if not isinstance(shares, dict) or not shares or not sum(shares.values()) > 0:
        raise ValueError(f"no shares by length: {text[:40]}")
    return _Law({int(length): float(share) for length, share in shares.items()})


READER = Reader(
    name="ServeGen",
    read=_read,
    columns=("client", "start_s", "rate_rps", "pattern", "param1", "param2"),
    notes=("arrivals are drawn by the file's laws, client by client; lengths by client 0's",),
)
