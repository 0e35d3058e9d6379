"""What is to be measured: sizes, how much, how often. Pure; raises InputError for what cannot be."""

from dataclasses import dataclass

from headrace.errors import InputError
from headrace.fabric.limits.wire import MAX_MEMORY_BYTES, MAX_PAGES

REGION_OF_BYTES = 4
"""The pages of a run are drawn out of so much more memory, so that caches do not flatter."""

LEAST_REGION_BYTES = 8 << 20
MOST_BYTES = MAX_MEMORY_BYTES // REGION_OF_BYTES

SUBMIT_PAGES = 1000
SUBMIT_PAGE_BYTES = 4096
NUM_SUBMITS = 100

MOST_TIME_PAIRS = 7
"""Medians of round trips stand still long before those of rates do."""

ASLEEP_PAUSE_S = 0.002
"""Outlasts every spin window."""

ASLEEP_SHARE = 5
"""One round trip with a pause for so many without."""

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    transports: tuple[str, ...] = ()  # none: all that both sides have
    page_sizes: tuple[int, ...] = (16 * KIB, 64 * KIB, 256 * KIB, MIB)
    num_bytes: int = 64 * MIB  # in each run
    num_pairs: int = 21
    num_rounds: int = 1000  # of round trips in each run; 0: no times are measured
    rest_s: float = 1.0  # 0: not measured
    seed: int = 5

    def __post_init__(self) -> None:
        if not self.page_sizes or min(self.page_sizes) < 1:
            raise InputError("sizes", f"must be at least one, of at least 1 byte each, are {list(self.page_sizes)}")
        if len(set(self.page_sizes)) < len(self.page_sizes):
            raise InputError("sizes", "must name each size once")
        if not max(self.page_sizes) <= self.num_bytes <= MOST_BYTES:
            raise InputError(
                "num_bytes",
                f"must be from {max(self.page_sizes)}, the largest page, to {MOST_BYTES}, is {self.num_bytes}",
            )
        if self.num_bytes // min(self.page_sizes) > MAX_PAGES:
            least = -(-self.num_bytes // MAX_PAGES)
            raise InputError("sizes", f"must be at least {least} for {self.num_bytes} bytes, is {min(self.page_sizes)}")
        if self.num_pairs < 1 or self.num_rounds < 0 or self.rest_s < 0:
            raise InputError("plan", "must have at least one pair, and no rounds or seconds below 0")

    @property
    def region_bytes(self) -> int:
        """Of each side's memory."""
        return max(REGION_OF_BYTES * self.num_bytes, LEAST_REGION_BYTES)

    @property
    def num_time_pairs(self) -> int:
        return min(self.num_pairs, MOST_TIME_PAIRS)


FULL = Plan()
QUICK = Plan(num_bytes=16 * MIB, num_pairs=5, num_rounds=200, rest_s=0.5)
