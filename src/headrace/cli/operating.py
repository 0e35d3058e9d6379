"""The commands of an operator, `headrace status`, `drain` and `role`: each asks a gateway at its control socket.

What is shown goes to stdout, as `deployment_report` puts it; how far something is, to stderr where that is a terminal.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from headrace.cli import options as opt
from headrace.cli.deployment_report import described, rendered
from headrace.cli.network import require_endpoint
from headrace.cli.run_directory import running_control
from headrace.cli.values import one_of, seconds
from headrace.protocol.messages import FabricRole

if TYPE_CHECKING:
    from headrace.cli.operator import Operator

TIMEOUT_S = 600.0

InstanceName = Annotated[str, typer.Argument(metavar="INSTANCE", help="Its name or uuid, as `headrace status` shows.")]
RoleName = Annotated[
    str,
    typer.Argument(metavar="prefiller|decoder", help="What it is to become.", parser=one_of("prefiller", "decoder")),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", help="How long to wait; it goes on afterwards.", parser=seconds),
]
Force = Annotated[bool, typer.Option("--force", help="Also the last decoder: no request can be served then.")]


def status_command(
    *,
    control: opt.RunningControl = None,
    insecure: opt.Insecure = False,
    json: opt.AsJson = False,
) -> None:
    """How a deployment stands: its instances, and the requests under way."""
    with operator_at(control, insecure=insecure) as operator:
        deployment = operator.inspect()
    if json:
        typer.echo(described(deployment))
        return
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)  # names are what they are
    for part in rendered(deployment):
        console.print(part)


def drain_command(
    instance: InstanceName,
    *,
    force: Force = False,
    timeout: Timeout = TIMEOUT_S,
    control: opt.RunningControl = None,
    insecure: opt.Insecure = False,
) -> None:
    """Have an instance end what it runs, take nothing new, and leave. Returns when it is gone."""
    with operator_at(control, insecure=insecure) as operator:
        name, _ = _dismiss(operator, instance, None, force=force, deadline=time.monotonic() + timeout)
    typer.echo(f"{name} has left")


def role_command(
    instance: InstanceName,
    role: RoleName,
    *,
    force: Force = False,
    tpot_ms: opt.TpotMs = None,
    max_stall_ms: opt.MaxStallMs = None,
    timeout: Timeout = TIMEOUT_S,
    control: opt.RunningControl = None,
    insecure: opt.Insecure = False,
) -> None:
    """Drain an instance, and have it come back in the other role. Returns when it serves in that."""
    opt.refuse_with_prefiller(role, {"tpot_ms": tpot_ms, "max_stall_ms": max_stall_ms})
    with operator_at(control, insecure=insecure) as operator:
        name, successor = _dismiss(
            operator,
            instance,
            cast("FabricRole", role),
            force=force,
            tpot_s=opt.in_seconds(tpot_ms),
            max_stall_s=opt.in_seconds(max_stall_ms),
            deadline=time.monotonic() + timeout,
        )
    typer.echo(f"{name} serves as {successor}")


def _dismiss(
    operator: "Operator",
    instance: str,
    role: FabricRole | None,
    *,
    force: bool,
    deadline: float,
    tpot_s: float | None = None,
    max_stall_s: float | None = None,
) -> tuple[str, str | None]:
    """-> its name, and its successor's."""
    from headrace.cli.leaving import the_one, wait_gone, wait_serving  # see operator_at

    facts = the_one(instance, operator.inspect().instances)
    answer = operator.dismiss(facts.uuid, role, tpot_s=tpot_s, max_stall_s=max_stall_s, is_forced=force)
    with _progress() as show:
        wait_gone(operator, facts, deadline=deadline, show=show)
        if answer.successor is not None:
            wait_serving(operator, answer.successor, deadline=deadline, show=show)
    return facts.name, answer.successor


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    console = Console(file=sys.stderr)
    if console.is_terminal:
        with console.status("") as line:
            yield line.update
    else:
        yield lambda text: None


def operator_at(control: str | None, *, insecure: bool) -> "Operator":
    """Raises InputError."""
    endpoint = running_control() if control is None else require_endpoint("control", control, insecure=insecure)
    # Function-local, as roles are: the command line alone loads no ZeroMQ.
    from headrace.cli.operator import Operator

    return Operator(endpoint)
