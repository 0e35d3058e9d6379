"""The answer of a plan as a deployment file. Pure but for the look whether it can be written."""

from collections.abc import Iterator
from pathlib import Path

from headrace.cli.plan.report.told import PlanTold, PoolTold
from headrace.errors import InputError
from headrace.planner.costs.hardware import Hardware


def require_writable(file: Path) -> None:
    """Before anything is simulated."""
    if not file.parent.is_dir():
        raise InputError("write", f"must be in a folder that exists, is {file}")


def as_toml(told: PlanTold, *, hardware: Hardware, model: str, link: str) -> str:
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
    return "\n".join(_lines(told, prefillers, decoders, hardware=hardware, model=model, link=link))


def _lines(
    told: PlanTold, prefillers: PoolTold, decoders: PoolTold, *, hardware: Hardware, model: str, link: str
) -> Iterator[str]:
    device, between = hardware.device(prefillers.device), hardware.link(link)
    if told.verdict.kind not in {"disaggregate", "disaggregate from"}:
        yield f"# The plan's verdict is to {told.verdict.words}: this is what splitting would take."
    yield f"# {told.command}"
    yield f"# {told.rate:g} requests/s of {told.workload}: first token {1e3 * told.slo.ttft_s:g} ms, further ones"
    yield f"# {1e3 * told.slo.tpot_s:g} ms, for {told.target:.0%}; step times may be wrong by {told.error:.0%}."
    yield f'model = "{model}"'
    yield 'dtype = "bf16"'
    yield f"page_size = {prefillers.page_size}"
    yield ""
    yield "[device]"
    yield 'kind = "cuda"'
    yield f"memory = {device.memory_bytes}"
    yield f"per_host = {device.per_host}"
    yield ""
    yield "[link]"
    yield 'transports = ["efa", "verbs"]'
    yield "nics = 1"
    yield f"nic_gbps = {between.bytes_s * 8 / 1e9:g}  # what is reached of {link}"
    yield f"latency_us = {1e6 * between.latency_s:g}"
    for name, pool in (("prefillers", prefillers), ("decoders", decoders)):
        yield ""
        yield f"[{name}]"
        yield f"count = {pool.count}"
        yield f"tp = {pool.tp}"
        if pool.dp > 1:
            yield f"dp = {pool.dp}"
        yield f"chunk_tokens = {pool.chunk_tokens}"
        yield f"max_running = {pool.max_running}"
        if name == "decoders":
            yield f"tpot_ms = {1e3 * told.slo.tpot_s:g}"
    yield ""
    yield "[tiers.interactive]"
    yield f"ttft_ms = {1e3 * told.slo.ttft_s:g}"
    yield f"tpot_ms = {1e3 * told.slo.tpot_s:g}"
    yield ""
