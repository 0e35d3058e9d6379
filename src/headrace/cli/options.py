"""The options of all commands, each once: its name, what it takes, what it is for.

Their defaults are those of GatewayOptions and InstanceOptions; the commands put both together. `IfSplit`: None where
it was not given, for it would do nothing with --colocated.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer

from headrace.cli.logs import LEVELS
from headrace.cli.values import (
    CpuNumbers,
    KeyTier,
    TransportNames,
    cpu_list,
    in_units,
    key_tier,
    milliseconds,
    one_of,
    plain_name,
    seconds,
    size_in_bytes,
    transport_list,
    whole_number,
)
from headrace.deploy.sizes import MOST_INSTANCES, MOST_RANKS, MOST_REQUESTS, MOST_TOKENS
from headrace.errors import InputError
from headrace.gateway.options import GatewayOptions, LocalPrefill
from headrace.kvcache.layout import KVDtype
from headrace.model.builtin import BUILTINS
from headrace.model.options import KernelChoice
from headrace.roles.options import InstanceOptions, Transfer, Transport

INSTANCE_DEFAULTS: Final = InstanceOptions(role="decoder", name="", gateways=(), model_dir=Path(), model="")
GATEWAY_DEFAULTS: Final = GatewayOptions(control="", tokenizer=Path(), model="")

MOST_GATEWAYS = 16

MODEL_PANEL = "Model"
MEMORY_PANEL = "Memory and batches"
PLACE_PANEL = "Addresses"
PROCESS_PANEL = "Processes"


def option(names: str, metavar: str | None, help_text: str, panel: str, **more: Any) -> Any:  # noqa: ANN401 (typer's)
    """In a panel of the help."""
    return typer.Option(names, metavar=metavar, help=help_text, rich_help_panel=panel, **more)


ModelName = Annotated[
    str,
    option("--model", "NAME", f"A Hugging Face directory, a hub id (org/name), {' or '.join(BUILTINS)}.", MODEL_PANEL),
]
ServedName = Annotated[
    str | None,
    option(
        *("--served-name", "NAME", "What clients call the model; without it, what --model says.", MODEL_PANEL),
        parser=plain_name,
        show_default=False,
    ),
]
Dtype = Annotated[
    str,
    option(
        *("--dtype", "|".join(get_args(KVDtype)), "Of weights, arithmetic and KV.", MODEL_PANEL),
        parser=one_of(*get_args(KVDtype)),
    ),
]
MaxModelLen = Annotated[
    int | None,
    option(
        *("--max-model-len", "TOKENS", "Of prompt and output together; without it, what model and KV memory allow."),
        MODEL_PANEL,
        parser=whole_number(least=2, most=MOST_TOKENS),
        show_default=False,
    ),
]

PageSize = Annotated[
    int,
    option(
        *("--page-size", "TOKENS", "Of a KV page, the unit of memory and of transfer.", MEMORY_PANEL),
        parser=whole_number(least=1, most=MOST_TOKENS),
    ),
]
ChunkTokens = Annotated[
    int,
    option(
        *("--chunk-tokens", "TOKENS", "Prompt tokens computed in one step, at most.", MEMORY_PANEL),
        parser=whole_number(least=1, most=MOST_TOKENS),
    ),
]
MaxRunning = Annotated[
    int,
    option(
        *("--max-running", "N", "Requests that hold KV pages at once, at most.", MEMORY_PANEL),
        parser=whole_number(least=1, most=MOST_REQUESTS),
    ),
]
TpotMs = Annotated[
    float | None,
    option(
        *("--tpot-ms", "MS", "Longest decode step; who would make it longer waits. Without it, no bound."),
        MEMORY_PANEL,
        parser=milliseconds,
        show_default=False,
    ),
]
MaxStallMs = Annotated[
    float | None,
    option(
        *("--max-stall-ms", "MS", "Longest step that computes prompts beside decode. Without it, no bound."),
        MEMORY_PANEL,
        parser=milliseconds,
        show_default=False,
    ),
]
KVMemory = Annotated[
    int,
    option(
        *("--kv-memory", "SIZE", "KV memory of an instance, all ranks: 512MiB, 2GB, or bytes.", MEMORY_PANEL),
        parser=size_in_bytes,
        show_default=in_units(INSTANCE_DEFAULTS.kv_memory_bytes),
    ),
]
Threads = Annotated[
    int,
    option(
        *("--threads", "N", "CPU threads that compute, for each rank.", MEMORY_PANEL),
        parser=whole_number(least=1, most=1024),
    ),
]

Kernels = Annotated[
    str,
    option(
        *("--kernels", "|".join(get_args(KernelChoice)), "What computes; auto: native where CPU and model allow it."),
        MODEL_PANEL,
        parser=one_of(*get_args(KernelChoice)),
    ),
]
Cpus = Annotated[
    CpuNumbers | None,
    option(
        *("--cpus", "LIST", "CPUs of all ranks' threads, in order: 0,2-5; without it, wherever the system puts them."),
        MEMORY_PANEL,
        parser=cpu_list,
        show_default=False,
    ),
]


def _ranks(name: str, help_text: str, **more: Any) -> Any:  # noqa: ANN401 (typer's)
    return option(name, "N", help_text, PROCESS_PANEL, parser=whole_number(least=1, most=MOST_RANKS), **more)


_TP_HELP = "Ranks (processes) that share each layer, its heads and experts"
_DP_HELP = "Groups of ranks, each with a step, pages and --max-running of its own; experts are spread over all"
Tp = Annotated[int, _ranks("--tp", f"{_TP_HELP}.")]
Dp = Annotated[int, _ranks("--dp", f"{_DP_HELP}.")]
PrefillerTpIfSplit = Annotated[int | None, _ranks("--prefiller-tp", f"{_TP_HELP}: of a prefiller.", show_default="1")]
DecoderTp = Annotated[int, _ranks("--decoder-tp", f"{_TP_HELP}: of a decoder, colocated too.")]
DecoderDp = Annotated[int, _ranks("--decoder-dp", f"{_DP_HELP}: of a decoder, colocated too.")]

_TRANSFER = option(
    *("--transfer", "|".join(get_args(Transfer)), "Send each layer as it is computed, or all when all are."),
    MEMORY_PANEL,
    parser=one_of(*get_args(Transfer)),
    show_default=INSTANCE_DEFAULTS.transfer,
)
TransferMode = Annotated[str, _TRANSFER]
TransferModeIfSplit = Annotated[str | None, _TRANSFER]

VerifyKVIfSplit = Annotated[
    bool | None,
    option(
        *("--verify-kv/--no-verify-kv", None, "Compare a digest of every KV page that was received.", MEMORY_PANEL),
        show_default="verify-kv",
    ),
]

Host = Annotated[str, option("--host", "ADDRESS", "Where HTTP listens.", PLACE_PANEL)]
Port = Annotated[
    int,
    option(
        *("--port", "PORT", "Where HTTP listens; 0 for any that is free.", PLACE_PANEL),
        parser=whole_number(least=0, most=65535),
    ),
]
Control = Annotated[
    str | None,
    option(
        *("--control", "ENDPOINT", "Where instances announce themselves; without it, a socket in your run directory."),
        PLACE_PANEL,
        show_default=False,
    ),
]
RunningControl = Annotated[
    str | None,
    option(
        *("--control", "ENDPOINT", "A gateway's --control; without it, that of the one gateway that you run here."),
        PLACE_PANEL,
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines, instead of tables.")]
Gateways = Annotated[
    list[str] | None,
    option(
        *("--gateway", "ENDPOINT", "A gateway's --control, once for each; without it, the default one.", PLACE_PANEL),
        show_default=False,
    ),
]
FabricHosts = Annotated[
    list[str] | None,
    option(
        *("--fabric-host", "ADDRESS", "Where KV pages are sent from and received, once for each NIC.", PLACE_PANEL),
        show_default=", ".join(INSTANCE_DEFAULTS.fabric_hosts),
    ),
]
Transports = Annotated[
    TransportNames | None,
    option(
        *(
            "--transports",
            "LIST",
            "Of mapped, shm, efa, verbs, tcp: the first that a peer has too carries KV; auto: all but shm.",
            PLACE_PANEL,
        ),
        parser=transport_list,
        show_default="auto",
    ),
]
RequireProvider = Annotated[
    str | None,
    option(
        *("--require-provider", "NAME", "The one transport that KV may travel by: no other peer is talked to."),
        PLACE_PANEL,
        parser=one_of(*get_args(Transport)),
        show_default=False,
    ),
]
Insecure = Annotated[
    bool,
    option(
        *("--insecure", None, "Allow addresses that others can reach: messages are not authenticated.", PLACE_PANEL),
    ),
]

DeploymentFile = Annotated[
    Path | None,
    option(
        *("--deployment", "FILE", "A file that says which model, instances and sizes; see `headrace check`."),
        PROCESS_PANEL,
        show_default=False,
    ),
]
NumGateways = Annotated[
    int,
    option(
        *("--gateways", "N", "Servers before the same instances, at --port and the next ones.", PROCESS_PANEL),
        parser=whole_number(least=1, most=MOST_GATEWAYS),
    ),
]
Prefillers = Annotated[
    int | None,
    option(
        *("--prefillers", "N", "Processes that compute prompts.", PROCESS_PANEL),
        parser=whole_number(least=1, most=MOST_INSTANCES),
        show_default="1",
    ),
]
Decoders = Annotated[
    int,
    option(
        *("--decoders", "N", "Processes that generate; with --colocated those that do both.", PROCESS_PANEL),
        parser=whole_number(least=1, most=MOST_INSTANCES),
    ),
]
Colocated = Annotated[
    bool, option("--colocated", None, "One pool: prompts are computed where tokens are generated.", PROCESS_PANEL)
]
Handed = Annotated[int, typer.Option()]
"""A process id or a descriptor, from the process that starts this one."""

ProcessName = Annotated[
    str | None,
    option(
        *("--name", "NAME", "In log lines and metrics; without it, role and process id.", PROCESS_PANEL),
        parser=plain_name,
        show_default=False,
    ),
]


def _promise(tier: str, latency: str, what: str) -> Any:  # noqa: ANN401 (typer's)
    return option(
        *(f"--{tier}-{latency}-ms", "MS", f"{what} of {tier} requests: a budget. Without it, none.", PROCESS_PANEL),
        parser=milliseconds,
        show_default=False,
    )


InteractiveTtftMs = Annotated[float | None, _promise("interactive", "ttft", "Time to first token")]
InteractiveTpotMs = Annotated[float | None, _promise("interactive", "tpot", "Mean time of a further token")]
FlexTtftMs = Annotated[float | None, _promise("flex", "ttft", "Time to first token")]
FlexTpotMs = Annotated[float | None, _promise("flex", "tpot", "Mean time of a further token")]
KeyTiers = Annotated[
    list[KeyTier] | None,
    option(
        *("--key-tier", "SHA256=TIER", "An API key's digest, and the tier of its requests. Once for each."),
        PROCESS_PANEL,
        parser=key_tier,
        show_default=False,
    ),
]
MaxQueued = Annotated[
    int,
    option(
        *("--max-queued", "N", "Requests of a tier that wait; the next one is answered 429.", PROCESS_PANEL),
        parser=whole_number(least=1, most=MOST_REQUESTS),
    ),
]
_LOCAL_PREFILL = (
    "--local-prefill",
    "|".join(get_args(LocalPrefill)),
    "When a decoder computes a prompt itself: where that is cheaper, or only where no prefiller could.",
    PROCESS_PANEL,
)
LocalPrefillChoice = Annotated[str, option(*_LOCAL_PREFILL, parser=one_of(*get_args(LocalPrefill)))]
LocalPrefillIfSplit = Annotated[
    str | None,
    option(
        *_LOCAL_PREFILL,
        parser=one_of(*get_args(LocalPrefill)),
        show_default=f"({GATEWAY_DEFAULTS.local_prefill})",
    ),
]
Deadline = Annotated[
    float,
    option("--deadline", "SECONDS", "Of a request that names none.", PROCESS_PANEL, parser=seconds),
]
LogLevel = Annotated[
    str,
    option(
        *("--log-level", "|".join(LEVELS), "At debug, a line for every request, and tracebacks.", PROCESS_PANEL),
        parser=one_of(*LEVELS),
    ),
]


def refuse_with_colocated(given: Mapping[str, object]) -> None:
    """Raises InputError where one of these options was given."""
    for field, value in given.items():
        if value is not None:
            raise InputError(field, "must be left out with --colocated: no KV travels then")


def refuse_with_prefiller(role: str, given: Mapping[str, object]) -> None:
    """Raises InputError where one of these options of a decoder was given for another role."""
    for field, value in given.items():
        if value is not None and role == "prefiller":
            raise InputError(field, "must be left out for a prefiller: it bounds steps that decode")


def in_seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def cpus_of(cpus: Sequence[int], *, num_threads: int, num_ranks: int = 1) -> tuple[int, ...]:
    """None where none were given. Raises InputError for too few or too many, or one that we may not use."""
    if not cpus:
        return ()
    wanted = num_threads * num_ranks
    if len(cpus) != wanted:
        each = f"{num_threads} threads" if num_ranks == 1 else f"{num_ranks} ranks of {num_threads} threads"
        raise InputError("cpus", f"must be one for each of {each}, {wanted} in all, are {len(cpus)}")
    if missing := sorted(set(cpus) - os.sched_getaffinity(0)):
        raise InputError("cpus", f"must be CPUs that this process may use, {missing[0]} is none")
    return tuple(cpus)
