"""A run: what is right is learned in quiet, then cell after cell, or for some minutes one drawn cell after another.

Owns the loop, and what is told while it runs. A deployment that does not become whole again ends the run: what would
come after it says nothing.
"""

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headrace.cli.chaos.asking import Client
from headrace.cli.chaos.catalogue import NoAnswers, learn, long_asks, short_asks
from headrace.cli.chaos.cell import CROWD, Cell, World, run_cell
from headrace.cli.chaos.faults import FAULTS
from headrace.cli.chaos.load import Load
from headrace.cli.chaos.sight import Sight
from headrace.cli.chaos.states import STATES, State, serving
from headrace.errors import HeadraceError, InputError
from headrace.protocol.operator import Deployment

NUM_SHORT, FEW_SHORT, FEW_CELLS = 12, 6, 8
"""Twelve are of every kind; to learn twelve for a few cells takes longer than they do."""

TRIES_TO_HIT = 3
TOKENS_PER_WORD = 1.03
MOST_LONG, POOL_SHARE = 24, 1.25
"""So many long prompts that together they are more than all pools of a role hold: one that comes again has left every
prefix index, and travels anew."""

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
        long_asks(_num_long(options, at_start), _num_words(options, at_start), options.seed),
    )
    if not catalogue.short or not catalogue.long:
        raise NoAnswers("no request has an answer that does not depend on its company")
    load = Load(client, catalogue, rate=options.rate, seed=options.seed)
    world = World(sight, load, at_start=at_start)
    run = Run(deployment=_described(at_start), num_left_out=catalogue.num_left_out)
    _, run.wrongs = await world.settled()
    for name, state in _planned(options):
        try:
            cell = await _run_until_noticed(world, name, state)
        except TimeoutError:
            run.wrongs.append(f"after {name} while {state} the deployment did not become whole again")
            break
        run.cells.append(cell)
        tell(cell)
    return run


async def _run_until_noticed(world: World, name: str, state: State) -> Cell:
    """A fault that may miss has some tries. Raises TimeoutError."""
    for _ in range(TRIES_TO_HIT if FAULTS[name].counter else 1):
        cell = await run_cell(world, name, FAULTS[name], state)
        if not cell.note or cell.wrongs:
            break
    return cell


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


def _num_long(options: ChaosOptions, deployment: Deployment) -> int:
    """Raises InputError."""
    pools = Counter[str]()
    for one in serving(deployment, "prefiller", "decoder", "colocated"):
        pools[one.role] += one.limits.pool_tokens
    pool_tokens = POOL_SHARE * max(pools.values())
    wanted = 1 + math.ceil(pool_tokens / (TOKENS_PER_WORD * _num_words(options, deployment)))
    if wanted > MOST_LONG:
        raise InputError(
            "prompt_tokens",
            f"must be at least {pool_tokens / (MOST_LONG - 1):.0f} for pools of this size (`serve --kv-memory` makes "
            f"smaller ones), is {options.prompt_tokens}: what is asked again would be found there",
        )
    return max(wanted, CROWD if "waiting" in (options.states or STATES) else 1)


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
