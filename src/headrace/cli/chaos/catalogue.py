"""The requests of a run and their right answers, drawn by a seed: short ones that come all the time, long ones to hit.

Pure but for `learn`, which asks for the answers in quiet. Every request is asked twice, alone and in company: one whose
answer depends on that has no right answer here (kernels that do not compute a row as if it were alone, narrow margins),
and is left out and counted.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli.chaos.asking import Answer, Ask, Client
from headrace.errors import HeadraceError

AT_ONCE = 3
STOPS = (" the", ".", "\n", " of")
LONG_OUTPUT = 48
WORDS = (
    *("water", "wheel", "stone", "river", "mill", "grain", "miller", "sluice", "channel", "gate", "spring", "winter"),
    *("flood", "dry", "bank", "bridge", "village", "road", "carpenter", "oak", "iron", "axle", "turn", "slow", "fast"),
    *(
        "heavy",
        "light",
        "morning",
        "evening",
        "rain",
        "cloud",
        "field",
        "barley",
        "rye",
        "flour",
        "sack",
        "cart",
        "horse",
    ),
    *("market", "town", "bell", "church", "child", "mother", "father", "story", "letter", "lamp", "window", "door"),
    *("garden", "apple", "bread", "fire", "smoke", "because", "although", "when", "under", "above", "between"),
    *("carried", "opened", "closed", "measured", "repaired", "remembered", "promised", "nobody", "everybody"),
    *("another", "first", "last", "seven", "twelve", "hundred"),
)
"""A hundred English words: what is drawn from them is no text, and every prompt begins differently."""


class NoAnswers(HeadraceError):
    """The deployment does not answer as it should before anything was done to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A request and its right answer."""

    ask: Ask
    right: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    short: Sequence[Known]
    long: Sequence[Known]
    num_left_out: int


def short_asks(number: int, seed: int) -> list[Ask]:
    """Greedy and sampled, with and without stop strings, as streams and whole, of both tiers."""
    draw = random.Random(f"short {seed}")
    return [
        Ask(
            prompt=_words(draw, draw.choice((6, 25, 70, 150))),
            max_tokens=draw.randint(6, 32),
            temperature=0.0 if index % 2 == 0 else 0.9,
            seed=draw.randrange(2**31),
            stop=draw.choice(STOPS) if index // 2 % 2 else None,
            streams=index // 4 % 2 == 0,
            tier="flex" if index % 3 == 2 else "interactive",
        )
        for index in range(number)
    ]


def long_asks(number: int, num_words: int, seed: int) -> list[Ask]:
    """Streams, each of a length of its own, by which it is known among others under way."""
    draw = random.Random(f"long {seed}")
    return [
        Ask(
            prompt=_words(draw, num_words - 7 * index),
            max_tokens=LONG_OUTPUT,
            temperature=0.0 if index % 3 == 0 else 0.9,
            seed=draw.randrange(2**31),
            tier="flex" if index % 4 == 3 else "interactive",
        )
        for index in range(number)
    ]


def _words(draw: random.Random, number: int) -> str:
    return " ".join(draw.choices(WORDS, k=number))


async def learn(client: Client, short: Sequence[Ask], long: Sequence[Ask]) -> Catalogue:
    """Raises NoAnswers where a request fails, or where half of them have no right answer."""
    of_short, of_long = await _known(client, short), await _known(client, long)
    num_asks, num_known = len(short) + len(long), len(of_short) + len(of_long)
    if 2 * num_known < num_asks:
        raise NoAnswers(f"{num_asks - num_known} of {num_asks} requests are answered differently in company")
    return Catalogue(short=of_short, long=of_long, num_left_out=num_asks - num_known)


async def _known(client: Client, asks: Sequence[Ask]) -> list[Known]:
    alone = await _ask_all(client, asks, at_once=1)
    together = await _ask_all(client, asks, at_once=AT_ONCE)
    return [
        Known(ask=one.ask, right=one)
        for one, other in zip(alone, together, strict=True)
        if (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
    ]


async def _ask_all(client: Client, asks: Sequence[Ask], *, at_once: int) -> list[Answer]:
    turn = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> Answer:
        async with turn:
            answer = Answer(ask=ask)
            await client.ask(ask, answer)
            if answer.end != "whole":
                raise NoAnswers(f"a request in quiet is answered with {answer.end}: {answer.error}")
            return answer

    return await asyncio.gather(*(one(ask) for ask in asks))
