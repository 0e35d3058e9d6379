"""What is simulated: instances and what their steps take, the links between them, the gateway, failures. Pure values.

Owns no numbers: cost models fill them in, from hardware, profiles or measured steps. Seconds, bytes and tokens
throughout. A split deployment has prefillers and decoders, a colocated one only instances of that role.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, Protocol

from headrace.engine.cost import StepCost, StepSize
from headrace.errors import InputError
from headrace.messenger.plan import TransferPlan

Role = Literal["prefiller", "decoder", "colocated"]


class StepModel(Protocol):
    """What one step takes, in truth. Of the keys alone, all else equal, it is a sum or a maximum of linear terms (it
    is convex): then a few looks tell what many steps take together."""

    def step_s(self, size: StepSize) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearSteps:
    """As engines measure their own steps."""

    cost: StepCost

    def step_s(self, size: StepSize) -> float:
        return self.cost.predict(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """`steps`: what its steps take; `told`: what it has measured of that, and decides and tells the gateway by (None:
    a line through a few of its steps). `num_pages` of KV. `prefills`: a decoder that computes a prompt by itself
    where that is cheaper; otherwise only where nobody else can. `knows_chunks` False: it has no figure of what a chunk
    takes before it has computed one, as an engine without budgets, and so is not chosen for that before. `num_layers`
    is of the model: layer by layer its KV leaves. Instances of one `host`, or of one `switch`, have faster links."""

    name: str
    role: Role
    steps: StepModel
    num_pages: int
    page_size: int = 16
    chunk_tokens: int = 256
    max_running: int = 32
    tpot_s: float | None = None
    max_stall_s: float | None = None
    prefills: bool = False
    knows_chunks: bool = True
    host: str = ""
    switch: str = ""
    told: StepCost | None = None

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "chunk_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise InputError(name, f"must be at least 1, is {getattr(self, name)}")

    @property
    def decodes(self) -> bool:
        return self.role != "prefiller"

    @property
    def measured(self) -> StepCost:
        return line_through(self) if self.told is None else self.told


def line_through(instance: Instance) -> StepCost:
    """What an engine would find: the slope of each part of a step from nothing to as much as the instance is for."""
    if isinstance(instance.steps, LinearSteps):
        return instance.steps.cost
    seconds = instance.steps.step_s
    rows, tokens = instance.max_running, instance.chunk_tokens
    keys = max(rows, instance.num_pages * instance.page_size // 2)
    least = seconds(StepSize(rows=1, keys=1))
    row_s = max(0.0, seconds(StepSize(rows=rows, keys=rows)) - least) / max(1, rows - 1)
    key_s = max(0.0, seconds(StepSize(rows=rows, keys=keys)) - seconds(StepSize(rows=rows, keys=rows))) / keys
    chunk = StepSize().with_chunk(0, tokens)
    token_s = max(0.0, seconds(chunk) - least) / tokens
    later = StepSize().with_chunk(keys, keys + tokens)
    pair_s = max(0.0, seconds(later) - seconds(chunk) - key_s * keys) / (later.pairs - chunk.pairs)
    return StepCost(step_s=least, row_s=row_s, token_s=token_s, key_s=key_s, pair_s=pair_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """From one instance to another. `latency_s`: of what is sent last; `message_s`: of each message, at its sender."""

    bytes_s: float
    latency_s: float = 0.0
    message_s: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.bytes_s) and self.bytes_s > 0):
            raise InputError("bytes_s", f"must be bytes a second, above 0, is {self.bytes_s}")
        for name in ("latency_s", "message_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InputError(name, f"must be a number of seconds, at least 0, is {getattr(self, name)}")

    def seconds(self, num_bytes: int, num_messages: int) -> float:
        """That these keep the link."""
        return num_bytes / self.bytes_s + num_messages * self.message_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Of a pair the first that fits. Each instance has one way out and one way in, which its transfers share."""

    routed: LinkModel
    same_switch: LinkModel | None = None
    same_host: LinkModel | None = None

    def between(self, one: Instance, other: Instance) -> LinkModel:
        if self.same_host is not None and one.host and one.host == other.host:
            return self.same_host
        if self.same_switch is not None and one.switch and one.switch == other.switch:
            return self.same_switch
        return self.routed


@dataclass(frozen=True, slots=True, kw_only=True)
class KvModel:
    """Of all layers and ranks of an instance: what one page of a prompt is when it travels."""

    num_layers: int
    page_bytes: int
    page_messages: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "page_bytes", "page_messages"):
            if getattr(self, name) < 1:
                raise InputError(name, f"must be at least 1, is {getattr(self, name)}")

    @classmethod
    def of(cls, plan: TransferPlan) -> "KvModel":
        sent: Counter[int] = plan.bytes_of(1)
        num_layers = max(route.layers.stop for route in plan.routes)
        return cls(num_layers=num_layers, page_bytes=sent.total(), page_messages=plan.num_messages(1) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The instance dies at `at_s` and is there again, empty, `down_s` later. Its requests go on elsewhere `noticed_s`
    after its death."""

    instance: str
    at_s: float
    down_s: float
    noticed_s: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.noticed_s <= self.down_s:
            raise InputError("noticed_s", f"must be in 0..{self.down_s} (down_s), is {self.noticed_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`gateway_s`: from a request's arrival until it can be placed, and its tokens' way back, which a token takes as
    well. `hand_over_s`: from the last byte of a prompt at its decoder until it may decode. `ttft_s`: the budget that
    every request has, so that one is refused which is predicted to be late; None: none is refused for that.
    `max_queued`: of a tier, before the gateway refuses."""

    instances: Sequence[Instance]
    kv: KvModel
    network: Network
    gateway_s: float = 0.0
    hand_over_s: float = 0.0
    ttft_s: float | None = None
    max_queued: int | None = None
    failures: Sequence[Failure] = field(default=())

    def __post_init__(self) -> None:
        names = [instance.name for instance in self.instances]
        if len(set(names)) < len(names):
            raise InputError("instances", "must have names of their own")
        if not any(instance.decodes for instance in self.instances):
            raise InputError("instances", "must be one at the least that decodes")
        if len({instance.page_size for instance in self.instances}) > 1:
            raise InputError("page_size", "must be the same of all instances")
        for failure in self.failures:
            if failure.instance not in names:
                raise InputError("failures", f"must be of one of the instances, one is of {failure.instance!r}")
