"""What the devices of a pool of instances hold: weights, and KV in what they leave. Pure.

    device memory  | usable share                                        | reserve
                   | weights of a rank | KV pages of a rank, all layers  | activations, communication, the driver

On a CPU there is one memory for all instances and their ranks, and those that hold the same weights share one copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.deploy.file import Deployment, Pool, naming
from headrace.errors import InputError
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.sharding import Sharding
from headrace.model.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """Each number is one rank's, but for pages and tokens: those of a data-parallel group, whose ranks hold parts of
    the same. `longest` is the longest request that fits, prompt and output together."""

    num_hosts: int  # of all instances
    weight_bytes: int
    kv_bytes: int
    page_bytes: int  # of one layer
    num_pages: int
    num_tokens: int
    longest: int


def plan_memory(deployment: Deployment, shape: ModelShape, weight_bytes: Mapping[str, int]) -> dict[str, PoolMemory]:
    """By pool, of the weights that a rank of each holds. Raises InputError with the number that does not fit."""
    _require_model_len(deployment, shape)
    room = _room_on_a_host if deployment.device.kind == "cpu" else _room_on_devices
    kv_bytes = room(deployment, weight_bytes)
    return {
        name: _pool_memory(deployment, name, shape, weight_bytes[name], kv_bytes[name]) for name in deployment.pools
    }


def sharding_of(pool: Pool, kv: KVLayout, name: str) -> Sharding:
    """Raises InputError, naming the key of the pool."""
    with naming(f"{name}."):
        return Sharding(kv=kv, tp=pool.tp, dp=pool.dp)


def _require_model_len(deployment: Deployment, shape: ModelShape) -> None:
    wanted = deployment.max_model_len
    if wanted is not None and wanted > shape.max_model_len:
        raise InputError("max_model_len", f"must be at most {shape.max_model_len:,} (the model's), is {wanted:,}")


def _room_on_devices(deployment: Deployment, weight_bytes: Mapping[str, int]) -> dict[str, int]:
    """Of each rank, for KV."""
    device, room = deployment.device, {}
    for name, pool in deployment.pools.items():
        left = device.usable_bytes - weight_bytes[name]
        if left <= 0:
            needed = f"a rank of {name} holds {weight_bytes[name]:,} bytes of weights"
            raise InputError("device.memory", f"{needed}, its device {_usable(deployment)}: {-left:,} bytes too few")
        asked = left if pool.kv_memory_bytes is None else pool.kv_memory_bytes // pool.num_ranks
        if asked > left:
            beside = f"on each of {pool.num_ranks} devices beside the weights"
            raise InputError(f"{name}.kv_memory", f"must leave at most {left:,} bytes {beside}, takes {asked:,}")
        room[name] = asked
    return room


def _room_on_a_host(deployment: Deployment, weight_bytes: Mapping[str, int]) -> dict[str, int]:
    device, room, copies, needed = deployment.device, {}, set(), 0
    for name, pool in deployment.pools.items():
        assert pool.kv_memory_bytes is not None, f"{name}.kv_memory on a cpu"
        room[name] = pool.kv_memory_bytes // pool.num_ranks
        needed += pool.count * pool.kv_memory_bytes
        if (copy := (pool.tp, pool.dp)) not in copies:
            copies.add(copy)
            needed += pool.num_ranks * weight_bytes[name]
    if needed > device.usable_bytes:
        said = f"weights and KV of all instances take {needed:,} bytes, the host {_usable(deployment)}"
        raise InputError("device.memory", said)
    return room


def _usable(deployment: Deployment) -> str:
    device = deployment.device
    return f"has {device.usable_bytes:,} for them, {device.usable:.0%} of {device.memory_bytes:,}"


def _pool_memory(deployment: Deployment, name: str, shape: ModelShape, weight_bytes: int, kv_bytes: int) -> PoolMemory:
    pool, device = deployment.pools[name], deployment.device
    local = sharding_of(pool, shape.kv_layout(deployment.page_size, deployment.dtype), name).local
    num_pages = kv_bytes // (local.num_layers * local.page_bytes)
    num_tokens = num_pages * local.page_size
    longest = min(deployment.max_model_len or shape.max_model_len, num_tokens)
    if num_pages < 2 or (deployment.max_model_len or 0) > num_tokens:
        wanted = max(2 * local.page_size, deployment.max_model_len or 0)
        said = f"a rank of {name} must hold the KV of {wanted:,} tokens, {wanted * local.token_bytes:,} bytes"
        raise InputError("max_model_len" if num_pages > 1 else "page_size", f"{said}; has {kv_bytes:,} for it")
    per_host = max(1, device.per_host // pool.num_ranks) if device.kind == "cuda" else pool.count
    return PoolMemory(
        num_hosts=-(-pool.count // per_host),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        page_bytes=local.page_bytes,
        num_pages=num_pages,
        num_tokens=num_tokens,
        longest=longest,
    )
