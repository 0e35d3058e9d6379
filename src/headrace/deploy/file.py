"""A deployment as a file: TOML, read strictly. Owns its keys, their bounds and defaults; knows no model.

What several values say together is refused here too, as far as it takes no model to see it. A key is named with its
path, as `decoders.tp`, behind the file's name: others have options of the same names.
"""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, cast, get_args

from headrace.deploy.fields import Fields
from headrace.deploy.keys import read_keys
from headrace.deploy.sizes import MOST_INSTANCES, MOST_MS, MOST_RANKS, MOST_REQUESTS, MOST_TOKENS
from headrace.errors import InputError
from headrace.gateway.budgets import NO_BUDGET, NO_TIERS, TIERS, Budget, Tiers, budget_of
from headrace.kvcache.layout import KVDtype
from headrace.protocol.messages import Tier
from headrace.roles.options import InstanceOptions, Transport

DeviceKind = Literal["cpu", "cuda"]

DEFAULTS: Final = InstanceOptions(role="decoder", name="", gateways=(), model_dir=Path(), model="")

MOST_NICS = 4
"""Of a device: as many as the fabric takes."""
MOST_GBPS = 100_000
MOST_LATENCY_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Instances that are alike. Each has `dp` groups of `tp` ranks; a mixture's experts are spread over all of them.
    `kv_memory_bytes`: of an instance; None: all that its devices leave."""

    count: int
    tp: int
    dp: int
    chunk_tokens: int
    max_running: int
    kv_memory_bytes: int | None
    tpot_ms: float | None = None
    max_stall_ms: float | None = None

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A CUDA device of each rank; or, of kind cpu, the memory of the one host that runs everything. `usable` is the
    share of it for weights and KV. `per_host`: devices of a host."""

    kind: DeviceKind
    memory_bytes: int
    usable: float
    per_host: int

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.usable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """NICs of each device, of the host where it is a cpu; `latency_us` is of one write."""

    transports: tuple[Transport, ...]
    nics: int
    nic_gbps: float
    latency_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`max_model_len` None: what model and memory allow."""

    model: str
    dtype: KVDtype
    page_size: int
    max_model_len: int | None
    device: Device
    link: Link
    prefillers: Pool
    decoders: Pool
    tiers: Tiers = NO_TIERS

    @property
    def pools(self) -> dict[str, Pool]:
        return {"prefillers": self.prefillers, "decoders": self.decoders}


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Whatever is wrong is said of a field there."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}{error.field}", str(error).removeprefix(f"{error.field}: ")) from error


def read_deployment(file: Path) -> Deployment:
    """Raises InputError, naming file and key."""
    try:
        values = tomllib.loads(file.read_text())
    except OSError as error:
        raise InputError(str(file), f"must be a file that can be read: {error.strerror or error}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise InputError(str(file), f"must be TOML, is not: {error}") from error
    with naming(f"{file}: "):
        return parse_deployment(Fields(values), folder=file.parent)


def parse_deployment(fields: Fields, *, folder: Path) -> Deployment:
    """Files that it names are in `folder`, unless their paths are absolute."""
    deployment = Deployment(
        model=fields.text("model"),
        dtype=cast("KVDtype", fields.choice("dtype", get_args(KVDtype), DEFAULTS.dtype)),
        page_size=fields.whole("page_size", most=MOST_TOKENS, default=DEFAULTS.page_size),
        max_model_len=fields.optional_whole("max_model_len", least=2, most=MOST_TOKENS),
        device=_device(fields.table("device")),
        link=_link(fields.table("link")),
        prefillers=_prefillers(fields.table("prefillers")),
        decoders=_decoders(fields.table("decoders")),
        tiers=Tiers(
            budgets=_budgets(fields.optional_table("tiers")),
            keys=read_keys(fields.optional_table("keys"), folder=folder),
        ),
    )
    fields.finish()
    for name, pool in deployment.pools.items():
        _require_placed(name, pool, deployment.device)
    return deployment


def _device(fields: Fields) -> Device:
    kind = cast("DeviceKind", fields.choice("kind", get_args(DeviceKind)))
    device = Device(
        kind=kind,
        memory_bytes=fields.size("memory"),
        usable=fields.number("usable", most=1, default=0.9),
        per_host=fields.whole("per_host", most=MOST_RANKS) if kind == "cuda" else 1,
    )
    fields.finish()
    return device


def _link(fields: Fields) -> Link:
    link = Link(
        transports=cast("tuple[Transport, ...]", fields.choices("transports", get_args(Transport))),
        nics=fields.whole("nics", most=MOST_NICS),
        nic_gbps=fields.number("nic_gbps", most=MOST_GBPS),
        latency_us=fields.number("latency_us", most=MOST_LATENCY_US),
    )
    fields.finish()
    return link


def _prefillers(fields: Fields) -> Pool:
    # No dp: groups of a prefiller would share nothing but its address. A larger count is the same, and simpler.
    pool = _pool(fields, dp=1)
    fields.finish()
    return pool


def _decoders(fields: Fields) -> Pool:
    pool = replace(
        _pool(fields, dp=fields.whole("dp", most=MOST_RANKS, default=1)),
        tpot_ms=fields.optional_number("tpot_ms", most=MOST_MS),
        max_stall_ms=fields.optional_number("max_stall_ms", most=MOST_MS),
    )
    fields.finish()
    return pool


def _budgets(fields: Fields) -> dict[Tier, Budget]:
    budgets = {tier: _budget(fields.optional_table(tier)) for tier in TIERS}
    fields.finish()
    return {tier: budget for tier, budget in budgets.items() if budget != NO_BUDGET}


def _budget(fields: Fields) -> Budget:
    ttft_ms = fields.optional_number("ttft_ms", most=MOST_MS)
    tpot_ms = fields.optional_number("tpot_ms", most=MOST_MS)
    fields.finish()
    return budget_of(ttft_ms, tpot_ms)


def _pool(fields: Fields, *, dp: int) -> Pool:
    return Pool(
        count=fields.whole("count", most=MOST_INSTANCES),
        tp=fields.whole("tp", most=MOST_RANKS, default=1),
        dp=dp,
        chunk_tokens=fields.whole("chunk_tokens", most=MOST_TOKENS, default=DEFAULTS.chunk_tokens),
        max_running=fields.whole("max_running", most=MOST_REQUESTS, default=DEFAULTS.max_running),
        kv_memory_bytes=fields.optional_size("kv_memory"),
    )


def _require_placed(name: str, pool: Pool, device: Device) -> None:
    """The ranks of an instance share one memory, so they are on one host."""
    if device.kind == "cuda" and pool.num_ranks > device.per_host:
        ranks = "tp" if pool.dp == 1 else "tp * dp"
        said = f"{ranks} must be at most device.per_host, {device.per_host}: an instance is on one host"
        raise InputError(f"{name}.tp", f"{said}; is {pool.num_ranks}")
    if device.kind == "cpu" and pool.kv_memory_bytes is None:
        raise InputError(f"{name}.kv_memory", "must be given on a cpu, whose memory everybody uses, is missing")
