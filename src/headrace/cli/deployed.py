"""What a deployment file says, as the options of `serve`. Owns which options it takes the place of, and what is refused
because this machine cannot serve it.

An option that the file speaks of must not stand beside it: what runs is what was checked. Where HTTP listens, how
many threads compute and the like are not the deployment's, and go as always.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from headrace.cli.serve import ServeOptions, Sizes
from headrace.deploy.file import Deployment, Pool, naming, read_deployment
from headrace.errors import InputError

SAID = (
    *("model", "dtype", "page_size", "max_model_len", "prefillers", "decoders", "colocated"),
    *("prefiller_tp", "decoder_tp", "decoder_dp"),
    *("interactive_ttft_ms", "interactive_tpot_ms", "flex_ttft_ms", "flex_tpot_ms"),
    *("chunk_tokens", "max_running", "kv_memory", "tpot_ms", "max_stall_ms", "transports", "require_provider"),
)
"""Options that a file says, or rules out."""


def read_deployed(file: Path, *, given: Collection[str]) -> Deployment:
    """`given` are the options that stand beside it. Raises InputError, also where this machine cannot serve it."""
    for field in SAID:
        if field in given:
            raise InputError(field, f"must be left out with --deployment: {file} says it")
    deployment = read_deployment(file)
    with naming(f"{file}: "):
        _require_servable(deployment)
    return deployment


def as_deployed(options: ServeOptions, deployment: Deployment) -> ServeOptions:
    return replace(
        options,
        prefillers=deployment.prefillers.count,
        decoders=deployment.decoders.count,
        prefiller_tp=deployment.prefillers.tp,
        decoder_tp=deployment.decoders.tp,
        decoder_dp=deployment.decoders.dp,
        dtype=deployment.dtype,
        page_size=deployment.page_size,
        max_model_len=deployment.max_model_len,
        prefiller_sizes=_sizes(deployment.prefillers),
        decoder_sizes=_sizes(deployment.decoders),
        tpot_ms=deployment.decoders.tpot_ms,
        max_stall_ms=deployment.decoders.max_stall_ms,
        transports=deployment.link.transports,
        tiers=deployment.tiers,
    )


def _require_servable(deployment: Deployment) -> None:
    if deployment.device.kind != "cpu":
        hint = "headrace computes on CPUs; `headrace check` says what would fit"
        raise InputError("device.kind", f"must be cpu to be served, is {deployment.device.kind}: {hint}")


def _sizes(pool: Pool) -> Sizes:
    assert pool.kv_memory_bytes is not None, "a cpu's file says it"
    return Sizes(chunk_tokens=pool.chunk_tokens, max_running=pool.max_running, kv_memory_bytes=pool.kv_memory_bytes)
