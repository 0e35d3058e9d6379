"""Which processes an arm is. Pure: options in, command lines out.

Equal devices: on CPUs a device is a core. N of them are N colocated instances, or P prefillers and N - P decoders, each
on a core of its own, the same cores in every arm. The gateway and the client run wherever the system puts them.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.bench.comparison import Arm
from headrace.cli.child import HEADRACE
from headrace.cli.run_directory import CONTROL_SOCKET
from headrace.deploy.sizes import MOST_MS
from headrace.errors import InputError
from headrace.gateway.options import LocalPrefill

SERVED = "compared"
Side = Literal["prefillers", "decoders"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What all arms have in common. `cpus`: one for each device."""

    model_dir: Path
    dtype: str
    cpus: tuple[int, ...]
    kv_memory_bytes: int
    max_running: int
    prefill_chunk_tokens: int  # of prefillers
    log_level: str = "warning"  # of instances


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """`side`: of the link, where there is one. `prefills`: a decoder that computes prompts by choice."""

    role: Literal["prefiller", "decoder", "colocated"]
    name: str
    cpu: int
    chunk_tokens: int
    prefills: bool = False

    @property
    def side(self) -> Side:
        return "prefillers" if self.role == "prefiller" else "decoders"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """`local_prefill`: of the gateway; None where nobody else could prefill."""

    arm: Arm
    instances: tuple[Instance, ...]
    local_prefill: LocalPrefill | None = None


def colocated_arm(served: Served, chunk_tokens: int) -> ArmPlan:
    instances = tuple(
        Instance(role="colocated", name=f"colocated-{nth}", cpu=cpu, chunk_tokens=chunk_tokens)
        for nth, cpu in enumerate(served.cpus)
    )
    arm = Arm(
        name=f"colocated, chunk {chunk_tokens}",
        kind="colocated",
        devices=len(served.cpus),
        chunk_tokens=chunk_tokens,
        num_decoders=len(instances),
    )
    return ArmPlan(arm=arm, instances=instances)


def split_arm(served: Served, num_prefillers: int, *, local_prefill: LocalPrefill) -> ArmPlan:
    """Decoders come first: who has one core fewer for decode has the same cores for it."""
    num_decoders = len(served.cpus) - num_prefillers
    is_local = local_prefill == "cheaper"
    decoders = [
        Instance(
            role="decoder",
            name=f"decoder-{nth}",
            cpu=cpu,
            chunk_tokens=served.prefill_chunk_tokens,
            prefills=is_local,
        )
        for nth, cpu in enumerate(served.cpus[:num_decoders])
    ]
    prefillers = [
        Instance(role="prefiller", name=f"prefiller-{nth}", cpu=cpu, chunk_tokens=served.prefill_chunk_tokens)
        for nth, cpu in enumerate(served.cpus[num_decoders:])
    ]
    arm = Arm(
        name=f"split {num_prefillers}:{num_decoders}{', local prefill' if is_local else ''}",
        kind="split",
        devices=len(served.cpus),
        chunk_tokens=served.prefill_chunk_tokens,
        num_prefillers=num_prefillers,
        num_decoders=num_decoders,
        is_local_prefill=is_local,
    )
    return ArmPlan(arm=arm, instances=(*prefillers, *decoders), local_prefill=local_prefill)


def ratios(num_devices: int) -> list[int]:
    """Numbers of prefillers, the evenest first. Raises InputError where there is nothing to split."""
    if num_devices < 2:
        raise InputError("cpus", f"must be two devices at the least, one for each phase, is {num_devices}")
    return sorted(range(1, num_devices), key=lambda num: (abs(2 * num - num_devices), num))


# ---- command lines ---------------------------------------------------------------------------------------------


def gateway_command(plan: ArmPlan, served: Served, *, directory: Path, port: int) -> tuple[str, ...]:
    """At --log-level debug, in every arm: its log tells each request's waterfall."""
    local = () if plan.local_prefill is None else ("--local-prefill", plan.local_prefill)
    return (
        *(*HEADRACE, "gateway", "--name", "gateway", "--control", _control(directory), "--port", str(port)),
        *("--model", str(served.model_dir), "--served-name", SERVED, "--log-level", "debug", *local),
    )


def instance_command(
    instance: Instance, served: Served, *, directory: Path, address: str | None = None
) -> tuple[str, ...]:
    """`address`: of its end of the link, where there is one."""
    role = ("decoder", "--colocated") if instance.role == "colocated" else (instance.role,)
    # A decoder is given a prompt by choice once it knows what chunks take (decision 0019). One with a bound finds out
    # before its first request; no step comes near this bound.
    bound = ("--max-stall-ms", str(MOST_MS)) if instance.prefills else ()
    over = () if address is None else ("--fabric-host", address, "--insecure", "--require-provider", "tcp")
    return (
        *(*HEADRACE, *role, "--name", instance.name, "--gateway", _control(directory)),
        *("--model", str(served.model_dir), "--served-name", SERVED, "--dtype", served.dtype),
        *("--chunk-tokens", str(instance.chunk_tokens), "--max-running", str(served.max_running)),
        *("--kv-memory", str(served.kv_memory_bytes), "--cpus", str(instance.cpu)),
        *("--log-level", served.log_level, *bound, *over),
    )


def told_commands(plan: ArmPlan, served: Served) -> tuple[str, ...]:
    """For the report: what a person would type."""
    directory = Path("DIR")
    commands = [gateway_command(plan, served, directory=directory, port=8000)]
    commands += [instance_command(one, served, directory=directory) for one in plan.instances]
    return tuple(shlex.join(("headrace", *command[len(HEADRACE) :])) for command in commands)


def _control(directory: Path) -> str:
    return f"ipc://{directory / CONTROL_SOCKET}"
