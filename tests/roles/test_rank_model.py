"""Ranks that wait for others who do not come."""

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import RankLost
from headrace.roles.options import InstanceOptions
from headrace.roles.ranks import model as rank_model
from headrace.roles.ranks.model import meet

OPTIONS = InstanceOptions(role="decoder", name="d", gateways=(), model_dir=Path(), model="tiny", tp=2)


def test_a_rank_that_nobody_meets_is_lost_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_model, "COLLECTIVE_S", 0.3)
    with (
        pytest.raises(RankLost, match="^the ranks have not met: "),
        meet(replace(OPTIONS, dp=2), rank=1, meeting_points=tmp_path),
    ):
        raise AssertionError("they have met")


def test_what_else_keeps_it_from_meeting_is_raised_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(rank_model, "GlooRanks", fail)
    with pytest.raises(OSError, match="no such device"), meet(OPTIONS, rank=0, meeting_points=tmp_path):
        raise AssertionError("they have met")


class _Heard(Exception):
    pass


def test_a_signal_is_heard_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_model, "COLLECTIVE_S", 4.0)

    def hear(*_: object) -> None:
        raise _Heard

    former = signal.signal(signal.SIGALRM, hear)
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(_Heard), meet(OPTIONS, rank=0, meeting_points=tmp_path):
            raise AssertionError("they have met")
    finally:
        signal.signal(signal.SIGALRM, former)
    assert time.monotonic() - began < 3
