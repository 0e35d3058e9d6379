"""Lengths without arrivals, as Vidur's processed traces have them (arXiv papers and their summaries).

Source: github.com/microsoft/vidur, MIT; Agrawal et al., Vidur (MLSys 2024).
"""

from collections.abc import Iterator

from headrace.bench.traces.lines import Line, Reader, asked
from headrace.bench.workload import Arrival


def _read(lines: Iterator[Line], seed: int, begin_s: float) -> Iterator[Arrival | None]:
    for nth, line in enumerate(lines):
        yield asked(float(nth), line.count("num_prefill_tokens"), line.count("num_decode_tokens"))


READER = Reader(
    name="Vidur",
    read=_read,
    columns=("num_prefill_tokens", "num_decode_tokens"),
    notes=("the file has no arrivals: one request a second, in its order",),
)
