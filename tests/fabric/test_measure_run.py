"""Whole measurements, as small as they can be: here and against a server, of transports that are there and not."""

import os
from collections.abc import Iterator

import pytest
from limits_memories import endpoint_files
from measured_links import open_files, serving, side_processes

from headrace.errors import FabricError, InputError
from headrace.fabric.measure.plan import Plan
from headrace.fabric.measure.run import find_transports, measure, num_steps
from headrace.fabric.measure.session import Place, Session
from headrace.fabric.measure.verdict import judge

PLAN = Plan(page_sizes=(4096, 65536), num_bytes=256 << 10, num_pairs=2, num_rounds=5, rest_s=0.05)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = open_files()
    yield
    assert side_processes(os.getpid()) == []
    assert open_files() <= before
    assert endpoint_files() == []


def test_everything_is_measured_here_over_mapped_memory() -> None:
    ticks: list[str] = []
    measured = measure(PLAN, "mapped", None, ticks.append)
    assert measured.error is None
    assert len(ticks) == num_steps(PLAN)
    assert [rates.page_bytes for rates in measured.pages] == [4096, 65536]
    assert all(rates.is_whole and len(rates.limits) == 1 for rates in measured.pages)
    assert [each.kind for each in measured.times] == [
        *("owner", "owner_asleep", "python", "message", "submit", "coroutine")
    ]
    assert [each.limit and each.limit.name for each in measured.times][1:] == [
        *("futex", "eventfd", "eventfd", None, "eventfd one way")
    ]
    assert measured.rest is not None and measured.rest.process < 1


def test_everything_is_measured_between_machines_over_tcp() -> None:
    ticks: list[str] = []
    with serving() as place:
        assert find_transports(PLAN, place) == ("tcp",)
        measured = measure(PLAN, "tcp", place, ticks.append)
    assert measured.error is None
    assert len(ticks) == num_steps(PLAN)
    assert [[limit.name for limit in rates.limits] for rates in measured.pages] == [["tcp;ofi_rxm", "tcp"]] * 2
    assert all(rates.is_whole for rates in measured.pages)
    assert [each.limit and each.limit.name for each in measured.times] == [
        *("tcp;ofi_rxm", "tcp", "tcp", "tcp", None, None)
    ]
    assert measured.rest is not None


def test_a_transport_that_fails_is_told_with_its_call() -> None:
    measured = measure(PLAN, "efa", None, lambda what: None)
    assert measured.pages == () and measured.error is not None and "fi_getinfo" in measured.error
    assert not judge(measured).is_ok


def test_transports_are_those_that_reach_the_other_side() -> None:
    assert {"mapped", "tcp"} <= set(find_transports(PLAN, None))
    chosen = Plan(transports=("tcp",), page_sizes=(64,), num_bytes=64)
    assert find_transports(chosen, None) == ("tcp",)
    with pytest.raises(InputError, match=r"transports: must be of what this machine has \(mapped.*tcp\), has pigeons"):
        find_transports(Plan(transports=("tcp", "pigeons")), None)
    with serving() as place, pytest.raises(InputError, match="reaches from one to the other.*has mapped"):
        find_transports(Plan(transports=("mapped",)), place)


def test_a_machine_that_is_busy_or_wants_another_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.fabric.measure.run.LAST_SESSION_S", 0.0)
    with serving() as place, Session(place).open_engine():
        with pytest.raises(FabricError, match="busy"):
            find_transports(PLAN, place)
        with pytest.raises(InputError, match="token"):
            find_transports(PLAN, Place(host=place.host, port=place.port, token="guessed"))
