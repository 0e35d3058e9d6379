"""The options that only `headrace profile-step` has: what each takes, and what it is for."""

from pathlib import Path
from typing import Annotated, Final

import typer

from headrace.cli.profile_step.plan import StreamCounts, stream_counts
from headrace.cli.values import whole_number
from headrace.deploy.sizes import MOST_TOKENS

PANEL = "Profile"
MOST_TEMPERATURE = 100.0

DEFAULT_STREAMS: Final = StreamCounts((1, 8))


def temperature(value: object) -> float:
    """0 is greedy."""
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 <= number <= MOST_TEMPERATURE:
        raise typer.BadParameter(f"must be a number from 0 to {MOST_TEMPERATURE:g}, is {str(value)!r}")
    return number


Streams = Annotated[
    StreamCounts,
    typer.Option(
        "--streams",
        metavar="LIST",
        help="Numbers of streams that decode at once, one profile for each.",
        rich_help_panel=PANEL,
        parser=stream_counts,
    ),
]
KVLen = Annotated[
    int,
    typer.Option(
        "--kv-len",
        metavar="TOKENS",
        help="Keys that each stream has when it begins to decode.",
        rich_help_panel=PANEL,
        parser=whole_number(least=1, most=MOST_TOKENS),
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        metavar="N",
        help="Steps that count, for each number of streams.",
        rich_help_panel=PANEL,
        parser=whole_number(least=2, most=MOST_TOKENS),
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", metavar="T", help="Of the draws; 0 is greedy.", rich_help_panel=PANEL, parser=temperature
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Where the same numbers are written.", rich_help_panel=PANEL, show_default=False
    ),
]
