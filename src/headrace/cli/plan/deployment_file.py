"""The answer of a plan as a deployment file. Pure but for the look whether it can be written."""

from collections.abc import Iterator
from pathlib import Path

from headrace.cli.plan.ground import Ground
from headrace.cli.plan.report.told import PlanTold, PoolTold
from headrace.errors import InputError


def require_writable(file: Path) -> None:
    """Before anything is simulated."""
    if not file.parent.is_dir():
        raise InputError("write", f"must be in a folder that exists, is {file}")


def as_toml(told: PlanTold, ground: Ground) -> str:
    """The split one: a file says no other. Raises InputError where there is none."""
    deployment = told.split
    if deployment is None:
        raise InputError("write", "must have a split deployment to write; none that was tried holds")
    prefillers, decoders = deployment.pools
    if prefillers.device != decoders.device:
        raise InputError(
            "write",
            f"must have one kind of device, as deployment files have; prefillers are {prefillers.device}, decoders "
            f"{decoders.device}",
        )
    return "\n".join(_lines(told, prefillers, decoders, ground))


def _lines(told: PlanTold, prefillers: PoolTold, decoders: PoolTold, ground: Ground) -> Iterator[str]:
    if told.verdict.kind not in {"disaggregate", "disaggregate from"}:
        yield f"# The plan's verdict: {told.verdict.words}. This is what splitting would take."
    yield f"# {told.command}"
    yield f"# {told.rate:g} requests/s of {told.workload}: first token {1e3 * told.slo.ttft_s:g} ms, further ones"
    yield f"# {1e3 * told.slo.tpot_s:g} ms, for {told.target:.0%}; step times may be wrong by {told.error:.0%}."
    yield f'model = "{ground.model}"'
    yield f'dtype = "{ground.dtype}"'
    yield f"page_size = {prefillers.page_size}"
    yield from ground.device_and_link
    for name, pool in (("prefillers", prefillers), ("decoders", decoders)):
        yield f"\n[{name}]"
        yield f"count = {pool.count}"
        yield f"tp = {pool.tp}"
        if pool.dp > 1:
            yield f"dp = {pool.dp}"
        yield f"chunk_tokens = {pool.chunk_tokens}"
        yield f"max_running = {pool.max_running}"
        if ground.page_bytes is not None:
            yield f"kv_memory = {pool.num_pages * ground.page_bytes}"
        if name == "decoders":
            yield f"tpot_ms = {1e3 * told.slo.tpot_s:g}"
    yield "\n[tiers.interactive]"
    yield f"ttft_ms = {1e3 * told.slo.ttft_s:g}"
    yield f"tpot_ms = {1e3 * told.slo.tpot_s:g}"
    yield ""
