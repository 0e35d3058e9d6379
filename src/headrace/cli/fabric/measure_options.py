"""What `selftest`, `serve` and `bench` take on the command line. Texts to values are pure."""

from dataclasses import dataclass
from typing import Annotated, Final

import typer

from headrace.cli.values import TransportNames, in_units, size_in_bytes, transport_list, whole_number
from headrace.errors import InputError
from headrace.fabric.measure.plan import FULL
from headrace.fabric.measure.session import Place

PANEL = "Measurement"
LOCAL = "local"
TOKEN_VARIABLE = "HEADRACE_FABRIC_TOKEN"
MOST_PAIRS, MOST_ROUNDS = 1000, 50_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Not a plain tuple, which typer would take for an option of several words."""

    num_bytes: tuple[int, ...]


def size_list(value: object) -> Sizes:
    """`16KiB,1MiB`, none twice."""
    if isinstance(value, Sizes):
        return value
    sizes = tuple(size_in_bytes(word) for word in str(value).split(","))
    if len(set(sizes)) < len(sizes):
        raise typer.BadParameter(f"must name each size once, is {str(value)!r}")
    return Sizes(sizes)


def share(value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise typer.BadParameter(f"must be a number from 0 to 1, is {str(value)!r}")
    return number


@dataclass(frozen=True, slots=True)
class Far:
    """The other machine; None in both: this one is both sides."""

    host: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        return LOCAL if self.host is None else f"{self.host}:{self.port}"


def far(value: object) -> Far:
    """`local` or HOST:PORT; IPv6 addresses in brackets."""
    if isinstance(value, Far):
        return value
    text = str(value)
    if text == LOCAL:
        return Far()
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise typer.BadParameter(f"must be local, or HOST:PORT of `headrace fabric serve`, is {text!r}")
    return Far(host, int(port))


def place_of(peer: Far, token: str | None) -> Place | None:
    """None: both sides are here."""
    if peer.host is None or peer.port is None:
        if token is not None:
            raise InputError("token", "must be left out where no other machine is asked")
        return None
    if not token:
        raise InputError("token", "must be given for another machine: `headrace fabric serve` prints it there")
    return Place(host=peer.host, port=peer.port, token=token)


DEFAULT_SIZES: Final = Sizes(FULL.page_sizes)

Peer = Annotated[
    Far,
    typer.Argument(
        metavar="[local|HOST:PORT]",
        help="Both sides on this machine, or one where `headrace fabric serve` runs.",
        show_default=False,
        parser=far,
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TEXT",
        help="What `headrace fabric serve` printed on the other machine.",
        envvar=TOKEN_VARIABLE,
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines, instead of tables.", rich_help_panel=PANEL)]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Seconds instead of a minute or two; medians of fewer runs.", rich_help_panel=PANEL),
]
Floor = Annotated[
    float,
    typer.Option(
        "--floor",
        metavar="SHARE",
        help="Of the bare loop's rate that each page size must reach. Low, so that neighbours on a shared machine do "
        "not fail it; a link that is set up wrongly loses more.",
        rich_help_panel=PANEL,
        parser=share,
    ),
]
PageSizes = Annotated[
    Sizes,
    typer.Option(
        "--sizes",
        metavar="LIST",
        help=f"Page sizes [default: {','.join(in_units(size) for size in FULL.page_sizes)}]",
        rich_help_panel=PANEL,
        show_default=False,
        parser=size_list,
    ),
]
Transports = Annotated[
    TransportNames,
    typer.Option(
        "--transports",
        metavar="auto|LIST",
        help="mapped, shm, efa, verbs, tcp; auto: all that both sides have.",
        rich_help_panel=PANEL,
        show_default=False,
        parser=transport_list,
    ),
]
BytesPerRun = Annotated[
    int,
    typer.Option(
        "--bytes",
        metavar="SIZE",
        help=f"Of pages in each run, out of four times as much memory [default: {in_units(FULL.num_bytes)}]",
        rich_help_panel=PANEL,
        show_default=False,
        parser=size_in_bytes,
    ),
]
Runs = Annotated[
    int,
    typer.Option(
        "--runs",
        metavar="N",
        help="Of the engine and of each bare loop, in turn.",
        rich_help_panel=PANEL,
        parser=whole_number(least=1, most=MOST_PAIRS),
    ),
]
Imms = Annotated[
    int,
    typer.Option(
        "--imms",
        metavar="N",
        help="Round trips of a small write with an imm in each run; 0: pages only.",
        rich_help_panel=PANEL,
        parser=whole_number(least=0, most=MOST_ROUNDS),
    ),
]
ListenHost = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Where to listen. Whoever reaches it and has the token can keep cores busy and fill memory here.",
        rich_help_panel=PANEL,
    ),
]
ListenPort = Annotated[
    int,
    typer.Option(
        "--port",
        metavar="PORT",
        help="0: any that is free.",
        rich_help_panel=PANEL,
        parser=whole_number(least=0, most=65535),
    ),
]
