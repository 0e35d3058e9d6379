"""Seconds of a step, from what it has to do and what devices reach of their peaks. Pure.

    host      starts the kernels of each layer, while devices compute: what takes longer counts
    memory    weights and keys are read, at a share of the device's bandwidth        \\  both at once, not quite:
    compute   products, at a share of its operations a second                        /   a norm of the two
    exchange  two sums over all ranks in each layer, at a share of the fabric's bandwidth; large ones are slower

Each share is fitted, or assumed and said to be (`hardware`). Source of the form: the roofline model of Williams et al.
(CACM 2009), and what the groups of Splitwise's profile have in common (docs/plan.md).
"""

from dataclasses import dataclass

from headrace.engine.cost import StepSize
from headrace.errors import InputError
from headrace.planner.costs.work import Work

HOST_NORM, DEVICE_NORM = 6.0, 2.6
"""(a^p + b^p)^(1/p): a maximum for large p, a sum for 1."""
LARGE_MESSAGE_BYTES = 78e6
MANY_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of a device's peaks, and what an engine adds; see hardware.toml for each."""

    memory: float
    compute: float
    fabric: float
    large_message: float
    launch_s: float
    chunk_launch: float
    layer_s: float
    row_s: float
    late_row_s: float
    experts: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One of them. Bytes and operations a second, as its maker states; `fabric_bytes_s` to the others of its host."""

    name: str
    flops: float
    fp8_flops: float
    memory_bytes: int
    memory_bytes_s: float
    fabric_bytes_s: float
    per_host: int
    price_hour: float
    watts: float
    efficiency: Efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """`tp` devices share each request, `dp` such groups have requests of their own; experts lie on all of them."""

    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dp < 1:
            raise InputError("tp" if self.tp < 1 else "dp", "must be at least 1")

    @property
    def num_devices(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"TP{self.tp}" if self.dp == 1 else f"TP{self.tp} DP{self.dp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineSteps:
    """A StepModel: of one group, whose others do the same meanwhile."""

    work: Work
    device: Device
    sharding: Sharding = Sharding()

    def step_s(self, size: StepSize) -> float:
        reached, layers = self.device.efficiency, self.work.num_layers
        host_s = layers * reached.launch_s * (reached.chunk_launch if size.chunk_tokens else 1.0)
        compute_s = norm(self._memory_s(size), self._compute_s(size), DEVICE_NORM)
        device_s = compute_s + self._exchange_s(size) + (layers * reached.layer_s if size.chunk_tokens else 0.0)
        rows_s = reached.row_s * max(0, size.rows - 1) + reached.late_row_s * max(0, size.rows - MANY_ROWS)
        return norm(host_s, device_s, HOST_NORM) + rows_s

    def _memory_s(self, size: StepSize) -> float:
        """Of each device: its share of the weights, and of its group's keys."""
        work, sharding = self.work, self.sharding
        tokens = (size.rows + size.chunk_tokens) * sharding.dp
        read = (
            work.dense_bytes() / sharding.tp
            + work.expert_bytes(tokens) / sharding.num_devices
            + size.keys * work.key_bytes / self._key_ways()
        )
        return read / (self.device.memory_bytes_s * self.device.efficiency.memory)

    def _key_ways(self) -> int:
        """A latent is read by every rank; heads are shared, as far as there are so many."""
        return min(self.sharding.tp, self.work.num_key_parts)

    def _compute_s(self, size: StepSize) -> float:
        work, tp = self.work, self.sharding.tp
        tokens = size.rows + size.chunk_tokens
        reached = self.device.efficiency
        products = work.dense_operations(num_tokens=tokens, num_rows=size.rows)
        products += work.expert_operations(tokens) / reached.experts
        attention = size.pairs * work.pair_operations
        if size.rows:  # of all keys that are read, those that are not a chunk's
            attention += size.keys * work.row_pair_operations
        return (products / self._product_flops() + attention / self.device.flops) / (tp * reached.compute)

    def _product_flops(self) -> float:
        return self.device.fp8_flops if self.work.weight_bytes_each <= 1 else self.device.flops

    def _exchange_s(self, size: StepSize) -> float:
        ranks = self.sharding.tp
        if ranks < 2:
            return 0.0
        num_bytes = self.work.exchanged_bytes(size.rows + size.chunk_tokens)
        # Each byte of a sum goes out and in once, but for the rank's own part of it.
        travels = 2 * (ranks - 1) / ranks * num_bytes
        reached = self.device.efficiency
        share = num_bytes**4 / (num_bytes**4 + LARGE_MESSAGE_BYTES**4)
        slowed = 1 + share * reached.large_message
        return 2 * self.work.num_layers * travels * slowed / (self.device.fabric_bytes_s * reached.fabric)


def norm(one: float, other: float, power: float) -> float:
    """Between the larger of two and their sum. Computed by the larger one, so that no power of a short time is lost."""
    most, least = max(one, other), min(one, other)
    return most * (1 + (least / most) ** power) ** (1 / power) if most > 0 else 0.0
