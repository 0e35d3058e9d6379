"""The commands of an operator: `headrace status`. Each asks a running gateway at its control socket.

What is shown goes to stdout, as `deployment_report` puts it.
"""

import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from headrace.cli import options as opt
from headrace.cli.deployment_report import described, rendered
from headrace.cli.network import require_endpoint
from headrace.cli.run_directory import running_control

if TYPE_CHECKING:
    from headrace.cli.operator import Operator


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
    console = Console(file=sys.stdout)
    for part in rendered(deployment):
        console.print(part)


def operator_at(control: str | None, *, insecure: bool) -> "Operator":
    """Raises InputError."""
    endpoint = running_control() if control is None else require_endpoint("control", control, insecure=insecure)
    # Function-local, as roles are: the command line alone loads no ZeroMQ.
    from headrace.cli.operator import Operator

    return Operator(endpoint)
