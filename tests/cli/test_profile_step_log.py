"""What an instance logs of its steps, and what is read of that."""

import io
import logging
from collections.abc import Iterator

import pytest

from headrace.cli.logs import LogLine
from headrace.cli.profile.step_log import Timed, begin_to_begin, read_steps
from headrace.engine.cost import StepSize
from headrace.roles.step_log import StepLog

ONE = StepSize(rows=1, keys=40)
MIXED = StepSize(rows=1, keys=41).with_chunk(0, 64)


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    stream, logger = io.StringIO(), logging.getLogger("headrace.test_profile_step_log")
    lines = logging.StreamHandler(stream)
    lines.setFormatter(LogLine("decoder-0", coloured=False))
    logger.addHandler(lines)
    logger.propagate = False
    yield logger, stream
    logger.removeHandler(lines)


def test_what_is_logged_is_read(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.setLevel("DEBUG")
    told = StepLog(logger)
    told.waits()
    told.tell(ONE, began_at=10.0, ended_at=10.02)
    told.tell(MIXED, began_at=10.025, ended_at=10.1)
    told.waits()
    told.tell(ONE, began_at=11.0, ended_at=11.01)
    steps = read_steps(f"noise\n{stream.getvalue()}2026-01-01 10:00:00.000 gateway debug cmpl-1: stop\n")
    assert list(steps) == ["decoder-0"]
    assert [step.size for step in steps["decoder-0"]] == [ONE, MIXED, ONE]
    assert [step.follows for step in steps["decoder-0"]] == [False, True, False]
    # From begin to begin where one follows; else as long as it was computed.
    assert begin_to_begin(steps["decoder-0"]) == [
        Timed(size=ONE, seconds=pytest.approx(0.025)),
        Timed(size=MIXED, seconds=pytest.approx(0.075)),
        Timed(size=ONE, seconds=pytest.approx(0.01)),
    ]
    assert begin_to_begin(steps["decoder-0"], since_s=10.5) == [Timed(size=ONE, seconds=pytest.approx(0.01))]


def test_nothing_is_logged_above_debug(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    logger.setLevel("INFO")
    StepLog(logger).tell(ONE, began_at=10.0, ended_at=10.02)
    assert stream.getvalue() == "" and read_steps("") == {} and begin_to_begin([]) == []
