"""BurstGPT: requests to ChatGPT and GPT-4 by seconds since the first day. Failed ones have no answer.

Source: github.com/HPMLL/BurstGPT, CC-BY-4.0; Wang et al., BurstGPT (KDD 2025).
"""

from collections.abc import Iterator

from headrace.bench.traces.lines import Line, Reader, asked
from headrace.bench.workload import Arrival


def _read(lines: Iterator[Line], seed: int, begin_s: float) -> Iterator[Arrival | None]:
    origin: float | None = None
    for line in lines:
        at_s = line.number("Timestamp")
        origin = at_s if origin is None else origin
        yield asked(at_s - origin, line.count("Request tokens"), line.count("Response tokens"))


READER = Reader(name="BurstGPT", read=_read, columns=("Timestamp", "Request tokens", "Response tokens"))
