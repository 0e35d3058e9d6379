"""Workloads that are drawn, not recorded: lengths between two bounds, arrivals of a stated process. Pure, by seed."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Literal

import msgspec

from headrace.bench.workload import Arrival, ArrivalList
from headrace.errors import InputError

ProcessName = Literal["poisson", "gamma", "constant"]


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """When requests come. `cv`: standard deviation of the gaps by their mean; more than 1 comes in bursts. A Poisson
    process has 1, constant gaps 0."""

    name: ProcessName = "poisson"
    cv: float = 1.0

    def gaps_s(self, rate: float, draw: random.Random) -> Iterator[float]:
        """Between one arrival and the next, for ever."""
        shape = 1.0 if self.name == "poisson" else math.inf if self.name == "constant" else 1 / self.cv**2
        while True:
            yield 1 / rate if self.name == "constant" else draw.gammavariate(shape, 1 / (rate * shape))

    def __str__(self) -> str:
        return f"gamma arrivals, cv {self.cv:g}" if self.name == "gamma" else f"{self.name} arrivals"


POISSON = Process()


def read_process(text: str) -> Process:
    """`poisson`, `constant`, `gamma:CV`. Raises InputError."""
    name, _, number = text.partition(":")
    if name == "gamma":
        try:
            cv = float(number or "2")
        except ValueError:
            cv = math.nan
        if 0.05 <= cv <= 20:
            return Process(name="gamma", cv=cv)
    elif text == "poisson":
        return POISSON
    elif text == "constant":
        return Process(name="constant", cv=0.0)
    raise InputError("arrivals", f"must be poisson, constant or gamma:CV with CV from 0.05 to 20, is {text!r}")


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, each as likely as the other. `share`: of all requests."""

    share: float
    prompt: tuple[int, int]
    output: tuple[int, int]


SHORT = Lengths(share=1.0, prompt=(64, 256), output=(32, 96))
LONG = Lengths(share=1.0, prompt=(1000, 4000), output=(32, 96))

KINDS: Mapping[str, Sequence[Lengths]] = {
    "short": (SHORT,),
    "long": (LONG,),
    "mixed": (msgspec.structs.replace(SHORT, share=0.8), msgspec.structs.replace(LONG, share=0.2)),
}
"""By the name of a workload."""


def drawn(kind: str, *, rate: float, num_requests: int, seed: int, process: Process = POISSON) -> ArrivalList:
    """So many requests of KINDS[kind], the first at 0. Raises InputError."""
    if kind not in KINDS:
        raise InputError("workload", f"must be {', '.join(KINDS)} or a trace file, is {kind!r}")
    draw = random.Random(f"{kind}, {seed}")  # the same lengths at every rate
    lengths = draw.choices(KINDS[kind], [one.share for one in KINDS[kind]], k=num_requests)
    sizes = [(draw.randint(*one.prompt), draw.randint(*one.output)) for one in lengths]
    gaps = islice(process.gaps_s(rate, random.Random(f"{process}, {seed}")), max(0, num_requests - 1))
    arrivals = tuple(
        Arrival(at_s=at_s, prompt_tokens=prompt, max_tokens=output)
        for at_s, (prompt, output) in zip(accumulate(gaps, initial=0.0), sizes, strict=True)
    )
    told = "; ".join(
        f"{one.share:.0%}: {one.prompt[0]} to {one.prompt[1]} in, {one.output[0]} to {one.output[1]} out"
        for one in KINDS[kind]
    )
    return ArrivalList(name=kind, seed=seed, arrivals=arrivals, notes=(f"drawn: {told}; {process}",))


def rearrived(arrivals: ArrivalList, process: Process, rate: float) -> ArrivalList:
    """The same requests in the same order, at times that are drawn."""
    gaps = islice(process.gaps_s(rate, random.Random(f"{process}, {arrivals.seed}")), len(arrivals.arrivals) - 1)
    times = accumulate(gaps, initial=0.0)
    moved = tuple(msgspec.structs.replace(one, at_s=at_s) for one, at_s in zip(arrivals.arrivals, times, strict=True))
    notes = (*arrivals.notes, f"{process} in place of its own, {rate:.3g} requests/s")
    return msgspec.structs.replace(arrivals, arrivals=moved, notes=notes)
