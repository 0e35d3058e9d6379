"""What a gateway process is started with, made by the command line, and how long it waits for what. Plain data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.gateway.budgets import NO_TIERS, Tiers
from headrace.protocol.control import BEAT_S, SILENCE_S

LocalPrefill = Literal["cheaper", "needed"]
"""When a decoder computes a prompt itself: where that is cheaper, or only where no prefiller could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """`control` is the ZeroMQ endpoint that instances announce themselves at (ipc://..., or tcp://... with
    --insecure). `tokenizer` is the model's directory; `model` the name that requests may use."""

    name: str = "gateway"
    host: str = "127.0.0.1"
    port: int = 8000
    control: str
    tokenizer: Path
    model: str
    max_queued: int = 256  # requests of a tier that wait for a lease or for pages; the next one gets 429
    deadline_s: float = 600.0  # of a request, where it names none
    tiers: Tiers = NO_TIERS
    local_prefill: LocalPrefill = "cheaper"

    @property
    def url(self) -> str:
        """Where it serves HTTP."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Of the dispatch side. News cut every wait short; these are the bounds. Tests make everything short."""

    beat_s: float = BEAT_S
    silence_s: float = SILENCE_S  # an instance that is not heard of for so long is gone
    forget_s: float = 600.0  # what a silent or refused instance said of itself is kept so long, should it come back
    lease_retry_s: float = 0.05  # after Wait
    room_retry_s: float = 0.1  # after NoRoom
    answer_s: float = 2.0  # to Reserve and Generate: an instance's loop answers at once, whatever its model does
    late_s: float = 0.1  # without an answer so far: others go on meanwhile, and ask elsewhere
    need_prefill_s: float = 0.15  # the decoder waits 200 ms, two journeys included
    comeback_s: float = 4.0  # for a decoder, when none is left: with its loss noticed, an answer within 5 s
    max_resumes: int = 2  # of one request, on another decoder


DEFAULT_TIMINGS = Timings()
