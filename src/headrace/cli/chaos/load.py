"""The requests of one cell: an open loop of short ones, and whatever else is started beside it.

Owns their tasks until each has ended. Arrivals are drawn, and wait for nobody; while a request is hunted that is to be
hit no other is started.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.cli.chaos.asking import PATIENCE_S, Answer, Client
from headrace.cli.chaos.catalogue import Catalogue, Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A request, and what comes of it."""

    known: Known
    answer: Answer
    task: asyncio.Task[None]

    @property
    def is_under_way(self) -> bool:
        return self.answer.end is None


class Load:
    """`rate` is in requests a second."""

    def __init__(self, client: Client, catalogue: Catalogue, *, rate: float, seed: int) -> None:
        self._client = client
        self._catalogue = catalogue
        self._rate = rate
        self._draw = random.Random(seed)
        self._long = itertools.cycle(catalogue.long)
        self.running: list[Running] = []
        self.is_held = False

    def next_long(self, number: int) -> list[Known]:
        """In turn: the one that comes again has left every prefix index meanwhile."""
        return [next(self._long) for _ in range(number)]

    def draw_short(self, number: int) -> list[Known]:
        return self._draw.choices(self._catalogue.short, k=number)

    def start(self, known: Known) -> Running:
        answer = Answer(ask=known.ask)
        running = Running(known=known, answer=answer, task=asyncio.create_task(self._client.ask(known.ask, answer)))
        self.running.append(running)
        return running

    def under_way(self) -> list[Running]:
        return [one for one in self.running if one.is_under_way]

    async def come(self) -> None:
        """Short ones, until cancelled."""
        while True:
            await asyncio.sleep(self._draw.expovariate(self._rate))
            if not self.is_held:
                self.start(self.draw_short(1)[0])

    async def all_ended(self) -> None:
        """Each ends by itself, for the client has its patience."""
        while under_way := [one.task for one in self.running if not one.task.done()]:
            await asyncio.wait(under_way, timeout=PATIENCE_S)

    def take(self) -> Sequence[Running]:
        """All of them, which have ended: the next cell begins with none."""
        taken, self.running = self.running, []
        return taken


def pauses_s(hit: Sequence[Running], struck_at: float) -> Iterator[float]:
    """Of each stream that was hit: the longest time without a token from then on. What was on its way already still
    comes, so the first token says nothing."""
    for one in hit:
        after = [struck_at, *(at for at in one.answer.times if at > struck_at)]
        if len(after) > 1:
            yield max(late - early for early, late in pairwise(after))
