"""`headrace serve`: gateways and their instances on this machine, as processes of their own.

Owns the plan of which processes run with which options, and what the person is told. Everything that can be wrong with
the options, the port and the model is found before the first process starts.
"""

import asyncio
import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.cli.child import HEADRACE, Child
from headrace.cli.fetching import fetch_model, require_pool
from headrace.cli.network import require_free_port
from headrace.cli.options import INSTANCE_DEFAULTS, cpus_of, refuse_with_colocated
from headrace.cli.readiness import wait_until_ready
from headrace.cli.run_directory import CONTROL_SOCKET, private_directory
from headrace.cli.supervisor import Supervisor
from headrace.cli.transports import plan_transports
from headrace.errors import InputError
from headrace.gateway.budgets import Tiers
from headrace.gateway.options import LocalPrefill
from headrace.kvcache.layout import KVDtype
from headrace.model.options import KernelChoice
from headrace.protocol.control import Role
from headrace.roles.options import InstanceOptions, Transfer, Transport

MOST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of an instance."""

    chunk_tokens: int
    max_running: int
    kv_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """None: the option was not given. `decoder_sizes` are also those of colocated instances; page_size is in tokens."""

    gateways: int
    prefillers: int | None
    decoders: int
    colocated: bool
    prefiller_tp: int | None
    decoder_tp: int
    decoder_dp: int
    model: str
    served_name: str
    host: str
    port: int  # of the first gateway; the others' follow, or (0) are any that are free
    transfer: Transfer | None
    verify_kv: bool | None
    transports: tuple[Transport, ...] | None  # none of them: auto
    require_provider: Transport | None
    dtype: KVDtype
    page_size: int
    prefiller_sizes: Sizes
    decoder_sizes: Sizes
    tpot_ms: float | None
    max_stall_ms: float | None
    max_model_len: int | None
    kernels: KernelChoice
    threads: int
    cpus: tuple[int, ...]  # of all instances' threads, in their order; none: wherever the system puts them
    max_queued: int
    local_prefill: LocalPrefill | None
    deadline_s: float
    tiers: Tiers
    log_level: str


def serve(options: ServeOptions) -> bool:
    """Until a signal. -> whether all processes ended in time. Raises InputError, ChildEnded."""
    if options.colocated:
        refuse_with_colocated(
            {
                "prefillers": options.prefillers,
                "prefiller_tp": options.prefiller_tp,
                "transfer": options.transfer,
                "local_prefill": options.local_prefill,
                "verify_kv": options.verify_kv,
                "transports": options.transports,
                "require_provider": options.require_provider,
            }
        )
    transports_of(options)
    num_ranks = sum(num_ranks_of(role, options) for role, _ in instances_of(options))
    cpus_of(options.cpus, num_threads=options.threads, num_ranks=num_ranks)
    ports = free_ports(options)
    model_dir = fetch_model(options.model)
    for role in dict.fromkeys(role for role, _ in instances_of(options)):
        _require_fitting(role, options, model_dir)
    with private_directory() as directory:
        children = plan_children(options, ports=ports, model_dir=model_dir, directory=directory)
        return asyncio.run(Supervisor(children, directory).run(partial(_bring_up, options, ports)))


def free_ports(options: ServeOptions) -> tuple[int, ...]:
    """One for each gateway. Raises InputError."""
    if options.port + options.gateways > MOST_PORT + 1:
        wanted = f"must leave room for {options.gateways} gateways up to {MOST_PORT}"
        raise InputError("port", f"{wanted}, is {options.port}")
    ports: tuple[int, ...] = ()
    while len(ports) < options.gateways:
        port = require_free_port(options.host, options.port and options.port + len(ports))
        ports = ports if port in ports else (*ports, port)
    return ports


def _require_fitting(role: Role, options: ServeOptions, model_dir: Path) -> None:
    """Its ranks can share the model, and its pool holds something. Raises InputError, by the option's name here."""
    try:
        require_pool(_sized(role, options, model_dir))
    except InputError as error:
        if error.field != "tp":
            raise
        said = str(error).removeprefix("tp: ")
        raise InputError("prefiller_tp" if role == "prefiller" else "decoder_tp", said) from error


def _sized(role: Role, options: ServeOptions, model_dir: Path) -> InstanceOptions:
    """Any of its instances of that role, as far as its pool is concerned."""
    sizes = _sizes_of(role, options)
    tp, dp = sharding_of(role, options)
    return InstanceOptions(
        role=role,
        name="",
        gateways=(),
        model_dir=model_dir,
        model=options.served_name,
        dtype=options.dtype,
        tp=tp,
        dp=dp,
        page_size=options.page_size,
        max_running=sizes.max_running,
        kv_memory_bytes=sizes.kv_memory_bytes,
        max_model_len=options.max_model_len,
    )


async def _bring_up(options: ServeOptions, ports: Sequence[int]) -> None:
    host = reachable_host(options.host)
    for port in ports:
        await wait_until_ready(host, port, Counter(role for role, _ in instances_of(options)))
    more = "".join(f"Another gateway to the same: {url_of(host, port)}\n" for port in ports[1:])
    sys.stdout.write(greeting(host, ports[0], options.served_name, split=more + described_split(options)))
    sys.stdout.flush()


# ---- which processes -------------------------------------------------------------------------------------------


def plan_children(
    options: ServeOptions, *, ports: Sequence[int], model_dir: Path, directory: Path
) -> tuple[Child, ...]:
    model = ("--model", str(model_dir), "--served-name", options.served_name, "--log-level", options.log_level)
    controls = control_endpoints(options, directory)
    gateways = [
        _child(
            name,
            *("gateway", "--name", name, "--control", control, "--host", options.host, "--port", str(port)),
            *("--max-queued", str(options.max_queued), "--deadline", repr(options.deadline_s)),
            *(() if options.local_prefill is None else ("--local-prefill", options.local_prefill)),
            *_promises(options.tiers),
            *model,
        )
        for (name, control), port in zip(controls.items(), ports, strict=True)
    ]
    announced_to = [word for control in controls.values() for word in ("--gateway", control)]
    shared = (*announced_to, *model, *_shared(options))
    instances, num_ranks = [], 0
    for role, name in instances_of(options):
        end = num_ranks + num_ranks_of(role, options)
        cpus = _cpus(options, range(num_ranks, end))
        arguments = (*_role_arguments(role, options), "--name", name, *shared, *_sizes(role, options), *cpus)
        instances.append(_child(name, *arguments))
        num_ranks = end
    return (*gateways, *instances)


def control_endpoints(options: ServeOptions, directory: Path) -> dict[str, str]:
    """By the name of the gateway."""
    if options.gateways == 1:
        return {"gateway": f"ipc://{directory / CONTROL_SOCKET}"}
    sockets = (CONTROL_SOCKET, *(f"control-{number}.sock" for number in range(1, options.gateways)))
    return {f"gateway-{number}": f"ipc://{directory / socket}" for number, socket in enumerate(sockets)}


def instances_of(options: ServeOptions) -> list[tuple[Role, str]]:
    if options.colocated:
        return [("colocated", f"colocated-{index}") for index in range(options.decoders)]
    num_prefillers = 1 if options.prefillers is None else options.prefillers
    return [
        *(("prefiller", f"prefiller-{index}") for index in range(num_prefillers)),
        *(("decoder", f"decoder-{index}") for index in range(options.decoders)),
    ]


def sharding_of(role: Role, options: ServeOptions) -> tuple[int, int]:
    """-> tp and dp of its instances of that role."""
    return (options.prefiller_tp or 1, 1) if role == "prefiller" else (options.decoder_tp, options.decoder_dp)


def num_ranks_of(role: Role, options: ServeOptions) -> int:
    return math.prod(sharding_of(role, options))


def transports_of(options: ServeOptions) -> tuple[Transport, ...]:
    """By which KV may travel between its instances, which are all on this machine. Raises InputError."""
    return plan_transports(
        options.transports or (), required=options.require_provider, hosts=INSTANCE_DEFAULTS.fabric_hosts
    )


def _promises(tiers: Tiers) -> Iterator[str]:
    for tier, budget in tiers.budgets.items():
        for latency, seconds in (("ttft", budget.ttft_s), ("tpot", budget.tpot_s)):
            if seconds is not None:
                yield from (f"--{tier}-{latency}-ms", f"{seconds * 1e3:.12g}")
    for digest, tier in tiers.keys.items():
        yield from ("--key-tier", f"{digest}={tier}")


def _role_arguments(role: Role, options: ServeOptions) -> Sequence[str]:
    tp, dp = sharding_of(role, options)
    ranks = ("--tp", str(tp)) if role == "prefiller" else ("--tp", str(tp), "--dp", str(dp))
    match role:
        case "prefiller":
            return ("prefiller", *ranks, "--transfer", options.transfer or "layers", *_transports(options))
        case "decoder":
            verify_kv = "--no-verify-kv" if options.verify_kv is False else "--verify-kv"
            return ("decoder", *ranks, verify_kv, *_transports(options), *_budgets(options))
        case "colocated":
            return ("decoder", *ranks, "--colocated", *_budgets(options))


def _transports(options: ServeOptions) -> Sequence[str]:
    return ("--transports", ",".join(transports_of(options)))


def _budgets(options: ServeOptions) -> Iterator[str]:
    """Of those that decode."""
    for name, bound_ms in (("--tpot-ms", options.tpot_ms), ("--max-stall-ms", options.max_stall_ms)):
        if bound_ms is not None:
            yield from (name, repr(bound_ms))


def _sizes_of(role: Role, options: ServeOptions) -> Sizes:
    return options.prefiller_sizes if role == "prefiller" else options.decoder_sizes


def _sizes(role: Role, options: ServeOptions) -> Sequence[str]:
    sizes = _sizes_of(role, options)
    return (
        *("--chunk-tokens", str(sizes.chunk_tokens), "--max-running", str(sizes.max_running)),
        *("--kv-memory", str(sizes.kv_memory_bytes)),
    )


def _shared(options: ServeOptions) -> Sequence[str]:
    """By all instances."""
    longest = () if options.max_model_len is None else ("--max-model-len", str(options.max_model_len))
    return (
        *("--dtype", options.dtype, "--page-size", str(options.page_size)),
        *("--threads", str(options.threads), "--kernels", options.kernels),
        *longest,
    )


def _cpus(options: ServeOptions, ranks: range) -> Sequence[str]:
    """Of the threads of one instance, whose ranks are these of all."""
    cpus = options.cpus[ranks.start * options.threads : ranks.stop * options.threads]
    return ("--cpus", ",".join(map(str, cpus))) if cpus else ()


def _child(name: str, *arguments: str) -> Child:
    return Child(name=name, command=(*HEADRACE, *arguments))


# ---- what the person is told -----------------------------------------------------------------------------------


def reachable_host(host: str) -> str:
    """Where a client on this machine finds a server that listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def described_split(options: ServeOptions) -> str:
    """One line about what travels; empty where nothing does."""
    if options.colocated:
        return ""
    counts = Counter(role for role, _ in instances_of(options))
    prefillers, decoders = (_described_pool(role, counts[role], options) for role in ("prefiller", "decoder"))
    return f"KV goes from {prefillers} to {decoders} over {transports_of(options)[0]}.\n"


def _described_pool(role: Role, number: int, options: ServeOptions) -> str:
    num_ranks = num_ranks_of(role, options)
    return f"{number} {role}{'s' * (number > 1)}" + (f" of {num_ranks} ranks" if num_ranks > 1 else "")


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def greeting(host: str, port: int, model: str, *, split: str = "") -> str:
    address = url_of(host, port)
    body = {"model": model, "messages": [{"role": "user", "content": "What is a water wheel?"}], "max_tokens": 60}
    return (
        f"\nheadrace serves {model} at {address}; Ctrl-C ends it.\n{split}To try:\n\n"
        f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body))}\n\n"
    )
