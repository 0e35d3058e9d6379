"""A run: what is right is learned in quiet, then cell after cell, or for some minutes one drawn cell after another.

Owns the loop, and what is told while it runs. A deployment that does not become whole again ends the run: what would
come after it says nothing.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headrace.cli.chaos.asking import Client
from headrace.cli.chaos.catalogue import NoAnswers, learn, long_asks, short_asks
from headrace.cli.chaos.cell import CROWD, Cell, World, run_cell
from headrace.cli.chaos.evidence import gather, left_over
from headrace.cli.chaos.faults import FAULTS
from headrace.cli.chaos.load import Load
from headrace.cli.chaos.sight import Sight
from headrace.cli.chaos.states import STATES, State
from headrace.errors import HeadraceError, InputError
from headrace.protocol.operator import Deployment

NUM_SHORT, FEW_SHORT, FEW_CELLS = 12, 6, 8
"""Twelve have every combination of what makes one differ; to learn twelve for a few cells takes longer than they do."""

TOKENS_PER_WORD = 1.35
LONGEST_SHARE = 0.4
"""Of the longest sequence that is served: a crowd must not be too long to be asked at all."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """`minutes`: drawn cells for so long, instead of every one once."""

    control: str
    faults: Sequence[str]  # none: all
    states: Sequence[State]
    prompt_tokens: int
    rate: float
    seed: int
    minutes: float | None = None


@dataclass(slots=True, kw_only=True)
class Run:
    """All that came of it."""

    deployment: str
    num_left_out: int
    cells: list[Cell] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)  # of the run as a whole

    @property
    def is_right(self) -> bool:
        return not self.wrongs and not any(cell.wrongs for cell in self.cells)


class NotWhole(HeadraceError):
    """The deployment that chaos is to be made of is not there."""


def run_chaos(options: ChaosOptions, tell: Callable[[Cell], object]) -> Run:
    """`tell` hears of every cell when it is over. Raises InputError, NotWhole, NoAnswers."""
    _require_known("faults", options.faults, FAULTS)
    _require_known("states", options.states, STATES)
    with Sight(options.control) as sight:
        return asyncio.run(_run(options, sight, tell))


def _require_known(field: str, names: Sequence[str], known: Collection[str]) -> None:
    if strange := [name for name in names if name not in known]:
        raise InputError(field, f"must be some of {', '.join(known)}, {strange[0]} is none")


async def _run(options: ChaosOptions, sight: Sight, tell: Callable[[Cell], object]) -> Run:
    at_start = await _at_start(sight)
    address = urlsplit(at_start.gateway.url)
    client = Client(address.hostname or "", address.port or 80, at_start.gateway.model)
    _log.info("asking in quiet what is right")
    catalogue = await learn(
        client,
        short_asks(_num_short(options), options.seed),
        long_asks(_num_long(options), _num_words(options, at_start), options.seed),
    )
    if not catalogue.short or not catalogue.long:
        raise NoAnswers("no request has an answer that does not depend on its company")
    load = Load(client, catalogue, rate=options.rate, seed=options.seed)
    world = World(sight, load, at_start=at_start)
    run = Run(deployment=_described(at_start), num_left_out=catalogue.num_left_out)
    deployment, run.wrongs = await world.settled()
    before = gather(deployment)
    for name, state in _planned(options):
        try:
            cell = await run_cell(world, name, FAULTS[name], state)
        except TimeoutError:
            run.wrongs.append(f"after {name} while {state} the deployment did not become whole again")
            break
        run.cells.append(cell)
        tell(cell)
    else:
        deployment, _ = await world.settled()
        run.wrongs += left_over(before, gather(deployment))
    return run


async def _at_start(sight: Sight) -> Deployment:
    deployment = await sight.look()
    if deployment is None:
        raise NotWhole("no gateway answers at the control socket")
    here = {one.name for one in deployment.instances if one.standing == "serving"}
    absent = {one.name for one in deployment.instances} - here
    if absent or not here:
        raise NotWhole(f"the deployment must be whole, {', '.join(sorted(absent)) or 'every instance'} is not there")
    return deployment


def _num_words(options: ChaosOptions, deployment: Deployment) -> int:
    longest = min(min(one.limits.max_model_len, one.limits.pool_tokens) for one in deployment.instances)
    return round(min(options.prompt_tokens, LONGEST_SHARE * longest) / TOKENS_PER_WORD)


def _num_short(options: ChaosOptions) -> int:
    return FEW_SHORT if options.minutes is None and len(_pairs(options)) <= FEW_CELLS else NUM_SHORT


def _num_long(options: ChaosOptions) -> int:
    """A crowd, or enough for one to have left the prefix indexes when its turn comes again."""
    return CROWD if "waiting" in (options.states or STATES) else CROWD // 2


def _described(deployment: Deployment) -> str:
    names = ", ".join(sorted(one.name for one in deployment.instances if one.standing == "serving"))
    return f"{deployment.gateway.model}: {names}"


def _pairs(options: ChaosOptions) -> list[tuple[str, State]]:
    return [
        (name, state)
        for state in options.states or STATES
        for name in options.faults or FAULTS
        if state in FAULTS[name].states
    ]


def _planned(options: ChaosOptions) -> Iterator[tuple[str, State]]:
    pairs = _pairs(options)
    if options.minutes is None:
        yield from pairs
        return
    draw, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    while time.monotonic() < until:
        yield draw.choice(pairs)
