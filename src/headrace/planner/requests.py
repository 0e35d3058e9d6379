"""What a simulation keeps of a request. A plain record; gateway and instances change it.

Of a request that has a row in every step from step `joined` of its decoder's log on, nothing changes while it decodes:

    step s appends the KV of position `known` - 1 + s - joined, and draws its token number `generated` + s - joined
"""

from dataclasses import dataclass, field
from enum import Enum

from headrace.bench.records import RequestRecord, Waterfall
from headrace.bench.workload import Arrival
from headrace.engine.requests import Tier
from headrace.engine.schedule import rank
from headrace.planner.pages import Held, Prefix
from headrace.planner.spans import Log


class State(Enum):
    PLACING = "placing"  # at the gateway
    HELD = "held"  # has pages; its prompt is computed or under way elsewhere
    PREFILLING = "prefilling"
    READY = "ready"  # its prompt is there: it decodes from the next step on
    DECODING = "decoding"
    WAITING = "waiting"  # preempted
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """`attempt` counts its decoders: what is said of an earlier one is void. `pieces`: its tokens are the ends of the
    steps [first, last) of these logs, after `gateway_s`."""

    index: int
    arrival: Arrival
    block_tokens: int
    prefix: Prefix
    state: State = State.PLACING
    order: int = 0  # of arrival at its decoder
    attempt: int = 0
    generated: int = 0
    # Pages at its decoder
    held: Held = field(default_factory=dict)
    num_pages: int = 0
    hit_len: int = 0
    computed: int = 0
    # Its row, by its number
    row: int = 0
    joined: int = 0
    known: int = 0
    needs_from: int = 0  # the first step that needs a page more
    grows: bool = False
    pieces: list[tuple[Log, int, int]] = field(default_factory=list)
    # What came of it, seconds of the simulation
    placed_at: float | None = None
    begun_at: float | None = None
    computed_at: float | None = None
    landed_at: float | None = None
    decodes_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    cached_tokens: int | None = None
    num_preemptions: int = 0
    num_lost: int = 0
    error: str | None = None

    @property
    def tier(self) -> Tier:
        return self.arrival.tier

    @property
    def rank(self) -> tuple[int, int]:
        return rank(self.arrival.tier, self.order)

    @property
    def num_known(self) -> int:
        """Tokens, of those that are settled."""
        return self.arrival.prompt_tokens + self.generated

    @property
    def num_remaining(self) -> int:
        return self.arrival.max_tokens - self.generated

    @property
    def num_private(self) -> int:
        return self.num_pages - sum(self.held.values())

    def renew(self, page_size: int) -> None:
        """What it has by now is its prompt."""
        self.prefix = Prefix(
            self.arrival,
            own=self.index,
            block_tokens=self.block_tokens,
            num_tokens=self.num_known,
            page_size=page_size,
        )

    def longest_gap_s(self) -> float | None:
        """Between two tokens; None of fewer than two."""
        gaps, before = [], None
        for log, first, last in self.pieces:
            if before is not None:
                gaps.append(float(log.ends(first, first + 1)[0]) - before)
            if last - first > 1:
                gaps.append(log.slowest_s(first, last))
            before = float(log.ends(last - 1, last)[0])
        return max(gaps, default=None)

    def waterfall(self, gateway_s: float) -> Waterfall | None:
        """Of one that has its first token. It adds up to the time to that."""
        if self.first_at is None or self.begun_at is None or self.computed_at is None:
            return None
        begun, computed, first = self.begun_at, self.computed_at, self.first_at
        queue_s = begun - self.arrival.at_s - gateway_s
        if self.landed_at is None or self.decodes_at is None:  # drawn from the last chunk
            return Waterfall(gateway_s=2 * gateway_s, queue_s=queue_s, prefill_s=first - begun)
        return Waterfall(
            gateway_s=2 * gateway_s,
            queue_s=queue_s,
            prefill_s=computed - begun,
            exposed_transfer_s=self.landed_at - computed,
            hand_over_s=self.decodes_at - self.landed_at,
            first_step_s=first - self.decodes_at,
        )

    def record(self, gateway_s: float) -> RequestRecord:
        times: list[float] = []
        for log, first, last in self.pieces:
            times += (log.ends(first, last) + gateway_s).tolist()
        return RequestRecord(
            index=self.index,
            arrival_s=self.arrival.at_s,
            sent_s=self.arrival.at_s,
            prompt_tokens=self.arrival.prompt_tokens,
            max_tokens=self.arrival.max_tokens,
            token_s=tuple(times),
            num_reported=self.generated if self.error is None else None,
            cached_tokens=self.cached_tokens,
            error=self.error,
            tier=self.arrival.tier,
            waterfall=self.waterfall(gateway_s),
        )
