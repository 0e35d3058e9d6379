"""The sub-commands of `headrace fabric`. Nothing heavy is loaded here: a command loads what it needs when it runs."""

import typer

from headrace.cli.fabric.bench import bench_command
from headrace.cli.fabric.selftest import selftest_command
from headrace.cli.fabric.serve import serve_command
from headrace.cli.fabric.topology import topology_command

fabric_app = typer.Typer(no_args_is_help=True, help="Look at the link between machines.")

fabric_app.command("topology")(topology_command)
fabric_app.command("selftest")(selftest_command)
fabric_app.command("serve")(serve_command)
fabric_app.command("bench")(bench_command)
