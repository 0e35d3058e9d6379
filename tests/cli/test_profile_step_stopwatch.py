"""Stopwatches: what a call takes is told, what it does is unchanged, and afterwards none is left."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli.profile_step import stopwatch
from headrace.cli.profile_step.stopwatch import cost_ns, replaced, watched


class Room:
    def double(self, number: int, *, plus: int = 0) -> int:
        if number < 0:
            raise ValueError(number)
        return 2 * number + plus


def test_a_call_is_told_with_its_begin_its_end_and_what_it_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100, 130])
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(monotonic_ns=lambda: next(moments)))
    notes: list[Any] = []
    with watched(Room, "double", lambda *note: notes.append(note)):
        assert Room().double(4, plus=1) == 9
    assert notes == [(100, 130, 9)]


def test_a_call_that_raises_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[Any] = []
    with watched(Room, "double", lambda *note: notes.append(note)), pytest.raises(ValueError, match="-1"):
        Room().double(-1)
    assert notes == []


def test_afterwards_everything_is_as_before_also_after_an_error() -> None:
    former = Room.double
    with pytest.raises(ValueError, match="-1"), watched(Room, "double", lambda *note: None):
        Room().double(-1)
    with watched(Room, "double", lambda *note: None):
        assert Room.double is not former
    with replaced(Room, "double", None):
        assert Room.double is None
    assert Room.double is former


def test_a_stopwatch_costs_what_a_call_takes_longer_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by 10 ns when it is read: a stopwatch reads it twice."""
    moments = itertools.count(0, 10)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(monotonic_ns=lambda: next(moments)))
    assert cost_ns(num_calls=3) == 20
