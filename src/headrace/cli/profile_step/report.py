"""The numbers of a profile, and the table that a person reads. Pure.

Times are in ms. A spread is the median and the 10th and 90th percentile, linear between the two nearest. A share is of
the time of all steps together, so that shares add up.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from headrace.cli.tables import aligned

NAMES: Mapping[str, str] = {
    "linear": "linear layers",
    "attention": "attention",
    "norms": "norms, rotation, KV append",
    "logits": "logits",
    "sampling": "sampling",
    "python": "Python of the model loop",
    "engine": "engine",
    "messaging": "messaging",
    "waiting": "waiting: event loop, threads",
}
"""Of the parts of a step, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least two."""
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(median=statistics.median(values), low=tenths[0], high=tenths[-1])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    ms: Spread
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsProfile:
    """`itl_ms`: between two tokens of a stream where the client reads them. `gateway_cpu_ms`: of the gateway's process,
    for each token. `stopwatch_ms`: what measuring added to a step. `key_bytes`: keys and values that a step reads."""

    num_streams: int
    num_steps: int
    parts: Mapping[str, Part]
    step_ms: Spread
    itl_ms: Spread
    gateway_cpu_ms: float
    stopwatch_ms: float
    key_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`read_gbps`: at which the threads read so many bytes of memory; None where torch computes, whose weights lie
    otherwise. `chooses_weights`: a step reads only the experts that its tokens chose, of `weight_bytes`."""

    machine: str
    kernels: str
    workload: str
    weight_bytes: int
    read_gbps: float | None
    chooses_weights: bool
    streams: Sequence[StreamsProfile]

    def bound_ms(self, of: StreamsProfile) -> float | None:
        """No step is shorter: weights, keys and values are read once. None where not known."""
        if self.read_gbps is None or self.chooses_weights:
            return None
        return (self.weight_bytes + of.key_bytes) / self.read_gbps / 1e6


def rendered(profile: Profile) -> str:
    """Markdown, readable as it is."""
    lines = [
        f"machine: {profile.machine}",
        f"kernels: {profile.kernels}",
        f"workload: {profile.workload}",
        "",
        *aligned([*_rows(profile.streams), *_bound_row(profile)]),
        "",
        "ms: median (10th-90th percentile); shares are of all steps' time.",
        *_below(profile),
    ]
    return "\n".join(lines) + "\n"


def _rows(streams: Sequence[StreamsProfile]) -> Iterator[list[str]]:
    head = ["ms a step"]
    for one in streams:
        head += [f"{one.num_streams} stream{'s' if one.num_streams > 1 else ''}", "share"]
    yield head
    for key, name in NAMES.items():
        yield _row(name, [(str(one.parts[key].ms), f"{100 * one.parts[key].share:.1f} %") for one in streams])
    yield _row("from step to step", [(str(one.step_ms), "100 %") for one in streams])
    yield _row("beside it: ITL at the client, through HTTP", [(str(one.itl_ms), "") for one in streams])
    yield _row("beside it: CPU of the gateway, a token", [(f"{one.gateway_cpu_ms:.2f}", "") for one in streams])


def _row(name: str, cells: Sequence[tuple[str, str]]) -> list[str]:
    return [name, *(text for cell in cells for text in cell)]


def _bound_row(profile: Profile) -> Iterator[list[str]]:
    bounds = [profile.bound_ms(one) for one in profile.streams]
    if None not in bounds:
        yield _row("beside it: what a step reads, read once", [(f"{bound:.2f}", "") for bound in bounds])


def _below(profile: Profile) -> Iterator[str]:
    keys = ", ".join(f"{one.key_bytes / 1e6:.0f}" for one in profile.streams)
    rate = "" if profile.read_gbps is None else f", at {profile.read_gbps:.1f} GB/s where nothing else is done"
    most = "at most " if profile.chooses_weights else ""
    yield f"A step reads {most}{profile.weight_bytes / 1e6:.0f} MB of weights and {keys} MB of keys and values{rate}."
    costs = ", ".join(f"{one.stopwatch_ms:.3f}" for one in profile.streams)
    yield f"The stopwatches themselves took about {costs} ms a step, most of it in the row of Python."
