"""What `selftest` and `bench` have in common: every transport measured and shown as it comes, with a bar for whoever
waits. Runs in the command line's process, in its main thread."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.cli.fabric.measure_report import described, head, rendered
from headrace.cli.machine import describe_machine, steal_share, ticks
from headrace.fabric.measure.plan import Plan
from headrace.fabric.measure.records import TransportMeasured
from headrace.fabric.measure.session import Place

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    transports: tuple[TransportMeasured, ...]
    described: dict[str, object]


def measure_all(plan: Plan, place: Place | None, *, peer: str, as_json: bool) -> Measured:
    """Raises InputError, FabricError, KeyboardInterrupt; no process is left behind by any of them."""
    # Function-local: it loads the native fabric, which no other command of these needs to show its help.
    from headrace.fabric.measure.run import find_transports, measure, num_steps

    machine, before = describe_machine(), ticks()
    names = find_transports(plan, place)
    if not as_json:
        _show(head(plan, machine=machine, peer=peer))
    found = []
    for name in names:
        with shown(sys.stderr, name, num_steps(plan)) as tick:
            measured = measure(plan, name, place, tick)
        found.append(measured)
        if not as_json:
            _show(rendered(measured))
    told = described(plan, found, machine=machine, peer=peer, steal=steal_share(before))
    return Measured(transports=tuple(found), described=told)


def _show(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def shown(stream: TextIO, name: str, num_steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, which is gone in the end; nothing elsewhere."""
    if not stream.isatty():
        yield lambda what: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=stream), transient=True, refresh_per_second=2) as progress:
        bar = progress.add_task(name, total=num_steps)
        yield lambda what: progress.update(bar, advance=1, description=f"{name}: {what}")
