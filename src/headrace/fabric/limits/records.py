"""What the loops tell: plain numbers of every repetition, so that the caller takes medians and shows the spread."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """`num_bytes` copied in each repetition by one thread."""

    method: str  # "memcpy", or the non-temporal stores used: "avx512", "avx2", "sse2"
    page_bytes: int
    num_bytes: int
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]

    @property
    def bytes_per_s(self) -> tuple[float, ...]:
        return tuple(self.num_bytes / seconds for seconds in self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRun:
    """One repetition over a link: from when the receiver was ready to when the sender knew that it has everything."""

    num_bytes: int
    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """`num_bytes` carried from one process to another in each repetition."""

    link: str  # "tcp", or a libfabric provider
    page_bytes: int
    runs: tuple[LinkRun, ...]

    @property
    def bytes_per_s(self) -> tuple[float, ...]:
        return tuple(run.num_bytes / run.seconds for run in self.runs)

    @property
    def cpu_s_per_gb(self) -> tuple[float, ...]:
        """Processor time of both processes for 10**9 bytes."""
        return tuple((run.sender_cpu_s + run.receiver_cpu_s) * 1e9 / run.num_bytes for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrips:
    """Times of `num_rounds` round trips, by nearest rank."""

    num_rounds: int
    p50_ns: int
    p99_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTripTimes:
    link: str  # "futex", "eventfd", "spin", "tcp", or a libfabric provider
    pause_s: float  # before each round, so that the other side sleeps
    runs: tuple[RoundTrips, ...]
