"""The options that only `headrace chaos` has: what each takes, and what it is for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from headrace.cli.values import whole_number
from headrace.deploy.sizes import MOST_TOKENS

PANEL = "Chaos"
MOST_RATE, MOST_MINUTES = 1000.0, 7 * 24 * 60.0


@dataclass(frozen=True, slots=True)
class Names:
    """Not a plain tuple, which typer would take for an option of several words. None of them: all."""

    names: tuple[str, ...]


ALL: Final = Names(())


def name_list(value: object) -> Names:
    """`all`, or some, which whoever knows them looks at."""
    if isinstance(value, Names):
        return value
    words = [word.strip() for word in str(value).split(",")]
    return ALL if words == ["all"] else Names(tuple(dict.fromkeys(words)))


def number_up_to(most: float) -> Callable[[object], float]:
    def parse(value: object) -> float:
        try:
            number = float(str(value))
        except ValueError:
            number = 0.0
        if not 0 < number <= most:
            raise typer.BadParameter(f"must be a number above 0, at most {most:g}, is {str(value)!r}")
        return number

    return parse


Faults = Annotated[
    Names,
    typer.Option(
        "--faults",
        metavar="LIST",
        help="What is done.",
        rich_help_panel=PANEL,
        parser=name_list,
        show_default="all",
    ),
]
States = Annotated[
    Names,
    typer.Option(
        "--states",
        metavar="LIST",
        help="Of a request, while it is done.",
        rich_help_panel=PANEL,
        parser=name_list,
        show_default="all",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        metavar="N",
        help="Go on for so long, with drawn faults and states; without it, each once.",
        rich_help_panel=PANEL,
        parser=number_up_to(MOST_MINUTES),
        show_default=False,
    ),
]
PromptTokens = Annotated[
    int,
    typer.Option(
        "--prompt-tokens",
        metavar="N",
        help="Of the requests that are hit, about.",
        rich_help_panel=PANEL,
        parser=whole_number(least=32, most=MOST_TOKENS),
    ),
]
Rate = Annotated[
    float,
    typer.Option(
        "--rate",
        metavar="N",
        help="Short requests a second that come beside them.",
        rich_help_panel=PANEL,
        parser=number_up_to(MOST_RATE),
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", help="Of what is drawn.", rich_help_panel=PANEL, parser=whole_number(least=0)),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write every cell there, too.", rich_help_panel=PANEL, show_default=False
    ),
]
