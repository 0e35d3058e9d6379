"""The longest pause of a stream that was hit, from the fault on."""

import asyncio

import pytest

from headrace.cli.chaos.asking import Answer, Ask
from headrace.cli.chaos.catalogue import Known, long_asks, short_asks
from headrace.cli.chaos.load import Running, pauses_s

ASK = Ask(prompt="water", max_tokens=8)


def pauses(*times: float) -> list[float]:
    async def measured() -> list[float]:
        task = asyncio.create_task(asyncio.sleep(0))
        await task
        answer = Answer(ask=ASK, times=list(times), end="whole")
        return list(pauses_s([Running(known=Known(ask=ASK, right=answer), answer=answer, task=task)], 10.0))

    return asyncio.run(measured())


def test_a_token_that_was_on_its_way_ends_no_pause() -> None:
    assert pauses(9.0, 9.9, 10.01, 12.5, 12.6) == [pytest.approx(2.49)]


def test_of_one_that_waited_it_is_the_time_to_its_first_token() -> None:
    assert pauses(13.0, 13.1) == [pytest.approx(3.0)]
    assert pauses() == pauses(9.0) == [], "no token came, and none was missing"


def test_twelve_short_requests_are_of_every_kind_and_long_ones_a_length_each() -> None:
    short = short_asks(12, seed=1)
    assert len({(ask.temperature > 0, ask.stop is None, ask.streams) for ask in short}) == 8
    assert len({ask.tier for ask in short}) == 2 and len({ask.prompt for ask in short}) == 12
    long = long_asks(6, 200, seed=1)
    assert len({len(ask.prompt.split()) for ask in long}) == 6
    assert all(ask.streams for ask in long) and {ask.temperature > 0 for ask in long} == {True, False}
    assert short == short_asks(12, seed=1) != short_asks(12, seed=2)
