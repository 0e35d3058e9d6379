"""What a measurement tells, transport by transport. A share is how near the engine comes to a limit: its rate over the
limit's, or the limit's time over its own; 1 is as good as the bare loop, less is worse."""

from dataclasses import dataclass
from typing import Literal

TimeKind = Literal["owner", "owner_asleep", "python", "message", "submit", "coroutine"]
"""Round trips of eight bytes with an imm, from owner thread to owner thread, back to back or after a pause; the same
from Python to Python; of a message; submitting 1,000 pages; from the last of their arrivals to a coroutine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of a median, either lowest and highest of the values, or an interval around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLimit:
    name: str
    bytes_per_s: Spread
    cpu_s_per_gb: float  # of both processes
    share: Spread  # interval of the median


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRates:
    """Scattered pages of one size. The first limit is the one to come near to."""

    page_bytes: int
    num_bytes: int  # in each run
    num_pairs: int
    is_whole: bool  # every page arrived as it left, and nothing beside them changed
    bytes_per_s: Spread
    cpu_s_per_gb: float
    limits: tuple[PageLimit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    name: str
    p50_ns: Spread
    p99_ns: Spread
    share: Spread  # of the p50; interval of the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    kind: TimeKind
    num_rounds: int  # in each run
    num_pairs: int
    pause_s: float  # before each
    p50_ns: Spread  # over the runs
    p99_ns: Spread
    limit: TimeLimit | None  # None: there is none, or not on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Processor time with peers and no ticket, as a share of one core; of the side that took more."""

    seconds: float
    process: float
    owner: float  # its thread alone


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportMeasured:
    """`error`: what ended it before all was measured; None: nothing."""

    transport: str
    pages: tuple[PageRates, ...]
    times: tuple[Times, ...]
    rest: Rest | None
    error: str | None
