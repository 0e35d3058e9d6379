"""One fault in one state: load, a request seen in the state, the fault, and everything looked at afterwards.

Runs on the loop of `run_matrix`. The life of a cell:

    hunt       load comes; a long request is asked, and watched until it is in the state (again, where it was too fast)
    strike     the fault acts, and ends
    end        no load comes any more; every request ends
    settle     as many instances of each role serve as at the start, idle within the bound; then the evidence
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.cli.chaos.evidence import (
    counted,
    first_seen,
    gather,
    is_idle,
    late_writes,
    left_over,
    num_leaked_pages,
    told,
)
from headrace.cli.chaos.faults import Fault
from headrace.cli.chaos.judge import DIFFERENT, Kind, Verdict, judge
from headrace.cli.chaos.load import Load, Running, pauses_s
from headrace.cli.chaos.scene import NotPossible, Scene
from headrace.cli.chaos.sight import Sight
from headrace.cli.chaos.states import State
from headrace.protocol.operator import Deployment, InstanceFacts

WARM_S = 0.7
AFTER_S = 1.5
TRIES, TRIES_WITHIN_S = 6, 75.0
CROWD = 8
"""So many long ones at once that some wait."""

SEEN_WITHIN_S = 20.0
IDLE_WITHIN_S = 15.0
WHOLE_WITHIN_S = 120.0
"""Processes that ended are started anew after 1 s, 2 s, 4 s, ..; and load their model."""


@dataclass(slots=True, kw_only=True)
class Cell:
    """What came of it. `note`: why it did not happen, empty where it did; `wrongs`: what is not as it should be."""

    fault: str
    state: State
    note: str = ""
    num_requests: int = 0
    kinds: Mapping[Kind, int] = field(default_factory=dict)
    num_broken: int = 0  # connections, of requests that were asked again
    recovery_s: float | None = None  # the longest pause of a stream that was hit
    num_hit: int = 0
    leaked_pages: int = 0
    wrongs: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def num_different(self) -> int:
        return sum(self.kinds.get(kind, 0) for kind in DIFFERENT)

    @property
    def num_errors(self) -> int:
        return sum(self.kinds.get(kind, 0) for kind in ("refused", "unavailable", "failed", "never"))


class World:
    """The deployment that chaos is made of: as it was at the start, and as it should be again after every cell."""

    def __init__(self, sight: Sight, load: Load, *, at_start: Deployment) -> None:
        self.sight = sight
        self.load = load
        self.first = gather(at_start)
        self._roles = Counter(one.role for one in _serving(at_start))

    async def settled(self) -> tuple[Deployment, list[str]]:
        """-> how it stands, and what is wrong with that. Raises TimeoutError where it is not whole again."""
        async with asyncio.timeout(WHOLE_WITHIN_S):
            deployment = await self.whole()
        until = time.monotonic() + IDLE_WITHIN_S
        num_idle = 0
        while num_idle < 3:  # a Status is half a second old at most: two later ones say the same
            deployment = await self.whole()
            num_idle = num_idle + 1 if is_idle(_serving(deployment)) and not deployment.requests else 0
            if time.monotonic() > until:
                return deployment, [f"not idle within {IDLE_WITHIN_S:g} s", *told(_serving(deployment))]
            await asyncio.sleep(0.3)
        return deployment, []

    async def whole(self) -> Deployment:
        """When as many instances serve as at the start."""
        while True:
            deployment = await self.sight.look()
            if deployment is not None:
                serving = _serving(deployment)
                is_told = all(one.status is not None for one in serving)
                if is_told and Counter(one.role for one in serving) >= self._roles:
                    return deployment
            await asyncio.sleep(0.1)


def _serving(deployment: Deployment) -> list[InstanceFacts]:
    return [one for one in deployment.instances if one.standing == "serving"]


async def run_cell(world: World, name: str, fault: Fault, state: State) -> Cell:
    """Raises TimeoutError where the deployment does not become whole again."""
    began = time.monotonic()
    cell = Cell(fault=name, state=state)
    deployment = await world.whole()
    noticed_before = counted(_serving(deployment), fault.counter or "")
    coming = None if fault.is_quiet else asyncio.create_task(world.load.come())
    try:
        await asyncio.sleep(WARM_S)
        scene = await _hunt(world, state)
        if scene is None:
            cell.note = "not hit: too short to be seen"
        else:
            await _strike(fault, scene, cell)
            await asyncio.sleep(AFTER_S)
    finally:
        if coming is not None:
            coming.cancel()
    await world.load.all_ended()
    _judge(cell, fault, world.load.take(), scene)
    deployment = await _look_around(world, cell)
    if fault.counter is not None and counted(_serving(deployment), fault.counter) == noticed_before and not cell.note:
        cell.note = "not hit: no instance noticed"  # it came too late to be compared: what came of it says nothing
        cell.wrongs = [text for text in cell.wrongs if not text.startswith(tuple(DIFFERENT))]
    cell.took_s = time.monotonic() - began
    return cell


async def _hunt(world: World, state: State) -> Scene | None:
    load = world.load
    load.is_held = True
    try:
        num_tries, until = 0, time.monotonic() + TRIES_WITHIN_S
        while num_tries < TRIES and time.monotonic() < until:
            asked = [load.start(known) for known in load.next_long(CROWD if state == "waiting" else 1)]
            by_length = {one.known.right.num_prompt_tokens: one for one in asked}
            sighting, search = await world.sight.watch(state, by_length, SEEN_WITHIN_S)
            # One that its decoder computed by itself is no try: a pair that failed before is avoided for a while.
            num_tries += search.has_travelled
            if sighting is not None:
                target = by_length[sighting.request.num_prompt_tokens]
                return Scene(sighting=sighting, target=target, load=load, sight=world.sight)
            await load.all_ended()
    finally:
        load.is_held = False
    return None


async def _strike(fault: Fault, scene: Scene, cell: Cell) -> None:
    try:
        await fault.act(scene)
    except NotPossible as reason:
        cell.note = f"not done: {reason}"
    except ProcessLookupError:
        cell.note = "not done: its victim was gone"
    except TimeoutError:
        cell.wrongs.append("what was killed did not come back")


# ---- afterwards ------------------------------------------------------------------------------------------------


def _judge(cell: Cell, fault: Fault, ended: Sequence[Running], scene: Scene | None) -> None:
    verdicts = [(one, judge(one.answer, one.known.right)) for one in ended]
    cell.num_requests = len(verdicts)
    cell.kinds = dict(Counter(verdict.kind for _, verdict in verdicts))
    cell.num_broken = sum(len(one.answer.broken_at) for one in ended)
    if scene is not None and scene.struck_at is not None:
        cell.num_hit = len(scene.hit)
        cell.recovery_s = max(pauses_s(scene.hit, scene.struck_at), default=None)
    cell.wrongs += [_said(one, verdict) for one, verdict in verdicts if verdict.kind not in _allowed(fault)]
    if cell.num_broken and not fault.breaks:
        cell.wrongs.append(f"{cell.num_broken} connections broke")


def _allowed(fault: Fault) -> frozenset[Kind]:
    return fault.allowed | {"right", "left"}


def _said(one: Running, verdict: Verdict) -> str:
    ids = ", ".join(one.answer.request_ids) or "no id"
    return f"{verdict.kind}: {verdict.text} ({ids}; {one.known.right.num_prompt_tokens} prompt tokens)"


async def _look_around(world: World, cell: Cell) -> Deployment:
    deployment, wrongs = await world.settled()
    cell.wrongs += wrongs
    serving = _serving(deployment)
    cell.leaked_pages = num_leaked_pages(serving)
    if cell.leaked_pages:
        cell.wrongs.append(f"{cell.leaked_pages} pages leaked")
    if not wrongs:
        cell.wrongs += await asyncio.to_thread(late_writes, serving)
    evidence = gather(deployment)
    cell.wrongs += left_over(world.first, evidence)
    world.first = first_seen(world.first, evidence)
    return deployment
