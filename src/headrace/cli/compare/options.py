"""The options that only `headrace compare` has: what each takes, and what it is for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from headrace.cli.options import option
from headrace.cli.values import milliseconds, whole_number
from headrace.deploy.sizes import MOST_TOKENS

PANEL = "Comparison"
ARMS_PANEL = "Arms"
REPORT_PANEL = "Reports"
MOST_RATE = 10_000.0


@dataclass(frozen=True, slots=True)
class Numbers:
    """Not a plain tuple, which typer would take for an option of several words. None of them: not given."""

    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return ",".join(f"{number:g}" for number in self.numbers)


NONE: Final = Numbers(())


def number_list(*, least: float, most: float, is_whole: bool = False) -> Callable[[object], Numbers]:
    """`1,2.5`: rising, none twice."""

    def parse(value: object) -> Numbers:
        if isinstance(value, Numbers):
            return value
        try:
            numbers = sorted({float(word) for word in str(value).split(",")})
        except ValueError:
            numbers = []
        if not numbers or not all(least <= one <= most and (not is_whole or one == int(one)) for one in numbers):
            kind = "whole numbers" if is_whole else "numbers"
            raise typer.BadParameter(f"must be {kind} from {least:g} to {most:g} such as 2,4, is {str(value)!r}")
        return Numbers(tuple(numbers))

    return parse


def number(*, least: float, most: float) -> Callable[[object], float]:
    def parse(value: object) -> float:
        try:
            one = float(str(value))
        except ValueError:
            one = float("nan")
        if not least <= one <= most:
            raise typer.BadParameter(f"must be a number from {least:g} to {most:g}, is {str(value)!r}")
        return one

    return parse


Quick = Annotated[
    bool, option("--quick", None, "An answer in under three minutes: few chunk sizes, two rates, short runs.", PANEL)
]
Workloads = Annotated[
    list[str] | None,
    option(
        *("--workload", "NAME|FILE", "short, long, mixed, or a trace file; may be given several times.", PANEL),
        show_default="mixed",
    ),
]
Arrivals = Annotated[
    str | None,
    option(
        *("--arrivals", "PROCESS", "poisson, constant or gamma:CV; of a trace its own, unless this is given.", PANEL),
        show_default=False,
    ),
]
Begin = Annotated[
    float,
    option(
        "--begin", "SECONDS", "Of a trace, where the part that is used begins.", PANEL, parser=number(least=0, most=1e8)
    ),
]
Rates = Annotated[
    Numbers,
    option(
        *("--rates", "LIST", "Requests a second, for all arms; without it they are searched.", PANEL),
        parser=number_list(least=0.001, most=MOST_RATE),
        show_default=False,
    ),
]
Seconds = Annotated[
    float | None,
    option(
        *("--seconds", "N", "Of arrivals in each run.", PANEL), parser=number(least=1, most=86_400), show_default="30"
    ),
]
Repetitions = Annotated[
    int | None,
    option(
        *("--repetitions", "N", "Of each rate in each arm: three are the fewest that an interval needs.", PANEL),
        parser=whole_number(least=1, most=100),
        show_default="5",
    ),
]
TtftMs = Annotated[
    float | None,
    option(
        *("--ttft-ms", "MS", "Budget of the first token; with --tpot-ms. Without them both follow from an idle arm."),
        PANEL,
        parser=milliseconds,
        show_default=False,
    ),
]
SloTpotMs = Annotated[
    float | None,
    option(
        *("--tpot-ms", "MS", "Budget of a further token, on average over a request.", PANEL),
        parser=milliseconds,
        show_default=False,
    ),
]
MaxPrompt = Annotated[
    int,
    option(
        *("--max-prompt-tokens", "N", "Longer prompts are clipped, and the report says how many.", PANEL),
        parser=whole_number(least=1, most=MOST_TOKENS),
    ),
]
MaxOutput = Annotated[
    int,
    option(
        *("--max-output-tokens", "N", "The same of answers.", PANEL), parser=whole_number(least=2, most=MOST_TOKENS)
    ),
]
Seed = Annotated[int, option("--seed", "N", "Of all that is drawn.", PANEL, parser=whole_number(least=0))]
Chunks = Annotated[
    Numbers,
    option(
        *("--chunks", "LIST", "Chunk sizes of the colocated arms; the best is the rival.", ARMS_PANEL),
        parser=number_list(least=1, most=MOST_TOKENS, is_whole=True),
        show_default="64,128,256,512",
    ),
]
Prefillers = Annotated[
    Numbers,
    option(
        *("--prefillers", "LIST", "Of the split arms; the other devices decode.", ARMS_PANEL),
        parser=number_list(least=1, most=64, is_whole=True),
        show_default="the evenest split",
    ),
]
LinkText = Annotated[
    str | None,
    option(
        *("--link", "RATE", "Put the two pools into network namespaces with a link such as 100mbit between them."),
        ARMS_PANEL,
        show_default=False,
    ),
]
Targets = Annotated[
    list[str] | None,
    option(
        *(
            "--target",
            "URL,MODEL[,DEVICES]",
            "A server that runs already, as one more arm; may be given several times.",
        ),
        ARMS_PANEL,
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    option(
        *("--out", "DIR", "Where records and report go.", REPORT_PANEL), show_default="comparisons/TIME in this folder"
    ),
]
Resume = Annotated[
    bool, option("--resume", None, "Go on with the comparison in --out: with the same options.", REPORT_PANEL)
]
Recheck = Annotated[
    Path | None,
    option(
        *("--recheck", "DIR", "Run nothing: compute every figure and the verdict there again from the records."),
        REPORT_PANEL,
        show_default=False,
    ),
]
Against = Annotated[
    tuple[Path, Path] | None,
    option(
        *("--against", "DIR DIR", "Run nothing: what differs between two comparisons.", REPORT_PANEL),
        show_default=False,
    ),
]
