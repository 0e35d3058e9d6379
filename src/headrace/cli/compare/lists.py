"""What is asked: a workload's arrivals at a rate, for each repetition its own. Reads the traces, once; then pure.

No two lists share a token but by blocks that a trace names, within one list: an arm that is asked one after the other
finds nothing of an earlier one in its prefix index. All arms are given the same ones.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.bench.synthetic import KINDS, POISSON, drawn, read_process, rearrived
from headrace.bench.traces.reading import read_trace
from headrace.bench.workload import ArrivalList, Fit, at_rate, clipped, part
from headrace.errors import InputError

MOST_SEEDS = 2**31


class Lists:
    """`words`: names of KINDS, or files of traces. Raises InputError for what is wrong with any."""

    def __init__(self, words: Sequence[str], arrivals: str | None, *, begin_s: float, fit: Fit, seed: int) -> None:
        self.workloads = _names(words)
        self._seed = seed
        self._fit = fit
        self._process = None if arrivals is None else read_process(arrivals)
        self._traces = {
            name: clipped(read_trace(Path(word), begin_s=begin_s), fit)
            for word, name in zip(words, self.workloads, strict=True)
            if word not in KINDS
        }

    def of(self, workload: str, rate: float, num_requests: int, *, repetition: int) -> ArrivalList:
        """Of a trace the next part with each repetition, from the begin again when it is through. Other lengths and
        arrivals with each repetition; other tokens with each rate, too."""
        process = self._process
        if workload in self._traces:
            found = part(self._traces[workload], nth=repetition, num_requests=num_requests)
            moved = at_rate(found, rate) if process is None and found.rate else self._drawn_anew(found, rate)
        else:
            moved = clipped(
                drawn(
                    workload,
                    rate=rate,
                    num_requests=num_requests,
                    seed=self._drawn_seed(repetition),
                    process=process or POISSON,
                ),
                self._fit,
            )
        return msgspec.structs.replace(moved, seed=self._drawn_seed(workload, f"{rate:g}", repetition))

    def _drawn_anew(self, arrivals: ArrivalList, rate: float) -> ArrivalList:
        return rearrived(arrivals, self._process or POISSON, rate)

    def _drawn_seed(self, *what: object) -> int:
        return random.Random(f"{self._seed}, {what}").randrange(MOST_SEEDS)


def _names(words: Sequence[str]) -> list[str]:
    """As the comparison calls them."""
    names = [word if word in KINDS else Path(word).stem for word in words]
    if len(set(names)) < len(names):
        raise InputError("workload", f"must name each once, is {', '.join(words)}")
    return names
