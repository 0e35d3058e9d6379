"""The commands. Each puts its options together and runs what they describe; how that fails is shown in `app`.

Options are checked before anything slow is done or loaded: a role, and torch with it, only once they are right.
"""

import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, cast

import typer

from headrace.cli import options as opt
from headrace.cli.chaos.command import chaos_command
from headrace.cli.check import check_command
from headrace.cli.compare.command import compare_command
from headrace.cli.deployed import as_deployed, read_deployed
from headrace.cli.fabric.app import fabric_app
from headrace.cli.fetching import fetch_model
from headrace.cli.loading import loading
from headrace.cli.logs import DEFAULT_LEVEL, configure_logging
from headrace.cli.network import require_endpoint, require_free_port
from headrace.cli.operating import drain_command, role_command, status_command
from headrace.cli.plan.command import plan_command
from headrace.cli.profile.command import profile_command
from headrace.cli.profile_step.command import profile_step_command
from headrace.cli.run_directory import default_control, shared_weights_directory
from headrace.cli.serve import ServeOptions, Sizes, serve
from headrace.cli.successor import succeed
from headrace.cli.transports import plan_reach
from headrace.gateway.budgets import Tiers, budget_of
from headrace.gateway.options import GatewayOptions, LocalPrefill
from headrace.kvcache.layout import KVDtype
from headrace.model.builtin import BUILTIN_NAME
from headrace.model.locate import served_name as default_served_name
from headrace.model.options import KernelChoice
from headrace.protocol.control import Role
from headrace.roles.options import InstanceOptions, Transfer, Transport

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INSTANCE = opt.INSTANCE_DEFAULTS
GATEWAY = opt.GATEWAY_DEFAULTS


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def headrace(
    *,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve language models with prefill and decode in separate processes."""


@app.command("serve")
def serve_command(
    context: typer.Context,
    *,
    deployment: opt.DeploymentFile = None,
    gateways: opt.NumGateways = 1,
    prefillers: opt.Prefillers = None,
    decoders: opt.Decoders = 1,
    colocated: opt.Colocated = False,
    prefiller_tp: opt.PrefillerTpIfSplit = None,
    decoder_tp: opt.DecoderTp = INSTANCE.tp,
    decoder_dp: opt.DecoderDp = INSTANCE.dp,
    model: opt.ModelName = BUILTIN_NAME,
    served_name: opt.ServedName = None,
    dtype: opt.Dtype = INSTANCE.dtype,
    kernels: opt.Kernels = INSTANCE.kernels,
    max_model_len: opt.MaxModelLen = None,
    host: opt.Host = GATEWAY.host,
    port: opt.Port = GATEWAY.port,
    transfer: opt.TransferModeIfSplit = None,
    verify_kv: opt.VerifyKVIfSplit = None,
    transports: opt.Transports = None,
    require_provider: opt.RequireProvider = None,
    page_size: opt.PageSize = INSTANCE.page_size,
    chunk_tokens: opt.ChunkTokens = INSTANCE.chunk_tokens,
    max_running: opt.MaxRunning = INSTANCE.max_running,
    tpot_ms: opt.TpotMs = None,
    max_stall_ms: opt.MaxStallMs = None,
    kv_memory: opt.KVMemory = INSTANCE.kv_memory_bytes,
    threads: opt.Threads = INSTANCE.threads,
    cpus: opt.Cpus = None,
    max_queued: opt.MaxQueued = GATEWAY.max_queued,
    local_prefill: opt.LocalPrefillIfSplit = None,
    deadline: opt.Deadline = GATEWAY.deadline_s,
    interactive_ttft_ms: opt.InteractiveTtftMs = None,
    interactive_tpot_ms: opt.InteractiveTpotMs = None,
    flex_ttft_ms: opt.FlexTtftMs = None,
    flex_tpot_ms: opt.FlexTpotMs = None,
    log_level: opt.LogLevel = DEFAULT_LEVEL,
) -> int:
    """Gateways and their instances on this machine: an OpenAI-compatible server. Ctrl-C ends all of them."""
    configure_logging(log_level, "serve")
    deployed = None if deployment is None else read_deployed(deployment, given=_given(context))
    model = model if deployed is None else deployed.model
    sizes = Sizes(chunk_tokens=chunk_tokens, max_running=max_running, kv_memory_bytes=kv_memory)
    options = ServeOptions(
        model=model,
        served_name=served_name or default_served_name(model),
        dtype=cast("KVDtype", dtype),
        kernels=cast("KernelChoice", kernels),
        max_model_len=max_model_len,
        host=host,
        port=port,
        gateways=gateways,
        prefillers=prefillers,
        decoders=decoders,
        colocated=colocated,
        prefiller_tp=prefiller_tp,
        decoder_tp=decoder_tp,
        decoder_dp=decoder_dp,
        transfer=cast("Transfer | None", transfer),
        verify_kv=verify_kv,
        transports=transports.names if transports else None,
        require_provider=cast("Transport | None", require_provider),
        page_size=page_size,
        prefiller_sizes=sizes,
        decoder_sizes=sizes,
        tpot_ms=tpot_ms,
        max_stall_ms=max_stall_ms,
        threads=threads,
        cpus=cpus.numbers if cpus else (),
        max_queued=max_queued,
        local_prefill=cast("LocalPrefill | None", local_prefill),
        deadline_s=deadline,
        tiers=Tiers(
            budgets={
                "interactive": budget_of(interactive_ttft_ms, interactive_tpot_ms),
                "flex": budget_of(flex_ttft_ms, flex_tpot_ms),
            }
        ),
        log_level=log_level,
    )
    return 0 if serve(options if deployed is None else as_deployed(options, deployed)) else 1


@app.command()
def gateway(
    *,
    name: opt.ProcessName = None,
    model: opt.ModelName = BUILTIN_NAME,
    served_name: opt.ServedName = None,
    host: opt.Host = GATEWAY.host,
    port: opt.Port = GATEWAY.port,
    control: opt.Control = None,
    insecure: opt.Insecure = False,
    max_queued: opt.MaxQueued = GATEWAY.max_queued,
    local_prefill: opt.LocalPrefillChoice = GATEWAY.local_prefill,
    deadline: opt.Deadline = GATEWAY.deadline_s,
    interactive_ttft_ms: opt.InteractiveTtftMs = None,
    interactive_tpot_ms: opt.InteractiveTpotMs = None,
    flex_ttft_ms: opt.FlexTtftMs = None,
    flex_tpot_ms: opt.FlexTpotMs = None,
    key_tier: opt.KeyTiers = None,
    log_level: opt.LogLevel = DEFAULT_LEVEL,
) -> None:
    """One gateway: HTTP on one side, instances on the other."""
    name = name or _default_name("gateway")
    configure_logging(log_level, name)
    control = default_control() if control is None else require_endpoint("control", control, insecure=insecure)
    port = require_free_port(host, port)
    options = GatewayOptions(
        name=name,
        host=host,
        port=port,
        control=control,
        tokenizer=fetch_model(model),
        model=served_name or default_served_name(model),
        max_queued=max_queued,
        local_prefill=cast("LocalPrefill", local_prefill),
        deadline_s=deadline,
        tiers=Tiers(
            budgets={
                "interactive": budget_of(interactive_ttft_ms, interactive_tpot_ms),
                "flex": budget_of(flex_ttft_ms, flex_tpot_ms),
            },
            keys={one.digest: one.tier for one in key_tier or ()},
        ),
    )
    # Function-local: a role is loaded when all is right, and only the one that is to run.
    with loading():
        from headrace.gateway.server import run_gateway

    run_gateway(options)


@app.command()
def prefiller(
    *,
    name: opt.ProcessName = None,
    model: opt.ModelName = BUILTIN_NAME,
    served_name: opt.ServedName = None,
    dtype: opt.Dtype = INSTANCE.dtype,
    kernels: opt.Kernels = INSTANCE.kernels,
    tp: opt.Tp = INSTANCE.tp,
    max_model_len: opt.MaxModelLen = None,
    gateway: opt.Gateways = None,
    fabric_host: opt.FabricHosts = None,
    insecure: opt.Insecure = False,
    transports: opt.Transports = None,
    require_provider: opt.RequireProvider = None,
    transfer: opt.TransferMode = INSTANCE.transfer,
    page_size: opt.PageSize = INSTANCE.page_size,
    chunk_tokens: opt.ChunkTokens = INSTANCE.chunk_tokens,
    max_running: opt.MaxRunning = INSTANCE.max_running,
    kv_memory: opt.KVMemory = INSTANCE.kv_memory_bytes,
    threads: opt.Threads = INSTANCE.threads,
    cpus: opt.Cpus = None,
    log_level: opt.LogLevel = DEFAULT_LEVEL,
) -> None:
    """One prefiller: computes the KV of prompts and sends it to decoders."""
    name = name or _default_name("prefiller")
    configure_logging(log_level, name)
    hosts, ways = plan_reach(fabric_host, transports, require_provider, insecure=insecure)
    options = InstanceOptions(
        role="prefiller",
        name=name,
        gateways=_gateways(gateway, insecure=insecure),
        fabric_hosts=hosts,
        transports=ways,
        model_dir=fetch_model(model),
        model=served_name or default_served_name(model),
        dtype=cast("KVDtype", dtype),
        kernels=cast("KernelChoice", kernels),
        tp=tp,
        max_model_len=max_model_len,
        transfer=cast("Transfer", transfer),
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        max_running=max_running,
        kv_memory_bytes=kv_memory,
        threads=threads,
        cpus=opt.cpus_of(cpus.numbers if cpus else (), num_threads=threads, num_ranks=tp),
        share_weights_in=shared_weights_directory(),
    )
    with loading():
        from headrace.roles.prefiller import run_prefiller  # see gateway

    succeed(run_prefiller(options), options, insecure=insecure, log_level=log_level)


@app.command()
def decoder(
    *,
    name: opt.ProcessName = None,
    model: opt.ModelName = BUILTIN_NAME,
    served_name: opt.ServedName = None,
    dtype: opt.Dtype = INSTANCE.dtype,
    kernels: opt.Kernels = INSTANCE.kernels,
    tp: opt.Tp = INSTANCE.tp,
    dp: opt.Dp = INSTANCE.dp,
    max_model_len: opt.MaxModelLen = None,
    gateway: opt.Gateways = None,
    fabric_host: opt.FabricHosts = None,
    insecure: opt.Insecure = False,
    transports: opt.Transports = None,
    require_provider: opt.RequireProvider = None,
    colocated: opt.Colocated = False,
    verify_kv: opt.VerifyKVIfSplit = None,
    page_size: opt.PageSize = INSTANCE.page_size,
    chunk_tokens: opt.ChunkTokens = INSTANCE.chunk_tokens,
    max_running: opt.MaxRunning = INSTANCE.max_running,
    tpot_ms: opt.TpotMs = None,
    max_stall_ms: opt.MaxStallMs = None,
    kv_memory: opt.KVMemory = INSTANCE.kv_memory_bytes,
    threads: opt.Threads = INSTANCE.threads,
    cpus: opt.Cpus = None,
    log_level: opt.LogLevel = DEFAULT_LEVEL,
) -> None:
    """One decoder: takes the KV of prompts and generates; with --colocated it computes prompts itself."""
    role: Role = "colocated" if colocated else "decoder"
    name = name or _default_name(role)
    configure_logging(log_level, name)
    if colocated:
        opt.refuse_with_colocated(
            {
                "verify_kv": verify_kv,
                "fabric_host": fabric_host or None,
                "transports": transports,
                "require_provider": require_provider,
            }
        )
    hosts, ways = plan_reach(fabric_host, transports, require_provider, insecure=insecure)
    options = InstanceOptions(
        role=role,
        name=name,
        gateways=_gateways(gateway, insecure=insecure),
        fabric_hosts=hosts,
        transports=ways,
        model_dir=fetch_model(model),
        model=served_name or default_served_name(model),
        dtype=cast("KVDtype", dtype),
        kernels=cast("KernelChoice", kernels),
        tp=tp,
        dp=dp,
        max_model_len=max_model_len,
        verify_kv=INSTANCE.verify_kv if verify_kv is None else verify_kv,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        max_running=max_running,
        tpot_s=opt.in_seconds(tpot_ms),
        max_stall_s=opt.in_seconds(max_stall_ms),
        kv_memory_bytes=kv_memory,
        threads=threads,
        cpus=opt.cpus_of(cpus.numbers if cpus else (), num_threads=threads, num_ranks=tp * dp),
        share_weights_in=shared_weights_directory(),
    )
    with loading():
        from headrace.roles.decoder import run_decoder  # see gateway

    succeed(run_decoder(options), options, insecure=insecure, log_level=log_level)


@app.command(hidden=True)
def rank(
    *,
    name: opt.ProcessName,
    log_level: opt.LogLevel,
    lead_pid: opt.Handed,
    lead_fd: opt.Handed,
    pulse_fd: opt.Handed,
    steps_fd: opt.Handed,
) -> None:
    """A rank of an instance, started by its lead with what it needs."""
    configure_logging(log_level, name or _default_name("rank"))
    with loading():
        from headrace.roles.ranks.rank import run_rank  # see gateway

    run_rank(lead_pid=lead_pid, lead_fd=lead_fd, pulse_fd=pulse_fd, steps_fd=steps_fd)


app.command("status")(status_command)
app.command("drain")(drain_command)
app.command("role")(role_command)
app.command("check")(check_command)
app.command("profile")(profile_command)
app.command("profile-step")(profile_step_command)
app.command("chaos")(chaos_command)
app.command("compare")(compare_command)
app.command("plan")(plan_command)
app.add_typer(fabric_app, name="fabric")


def _default_name(role: str) -> str:
    return f"{role}-{os.getpid()}"


def _given(context: typer.Context) -> set[str]:
    """What the person wrote: no default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _gateways(endpoints: Sequence[str] | None, *, insecure: bool) -> tuple[str, ...]:
    if not endpoints:
        return (default_control(),)
    return tuple(require_endpoint("gateway", endpoint, insecure=insecure) for endpoint in endpoints)
