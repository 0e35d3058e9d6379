"""Signals that come while a process loads, while it runs and while it ends. Sent to the test's own process."""

import asyncio
import os
import signal
import sys
import threading
import time

import pytest

from headrace.errors import RankLost
from headrace.roles.stopping import STOP_SIGNALS, Stoppable, signals_held, stoppable


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_it_loads_ends_it_quietly_and_what_it_holds_is_given_back(number: signal.Signals) -> None:
    done = []
    with stoppable() as process:
        try:
            send(number)
            done.append("loaded")
        finally:
            done.append("given back")
        process.run(never)
    assert done == ["given back"]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_it_runs_cancels_its_work_which_cleans_up_undisturbed_by_the_next(
    number: signal.Signals,
) -> None:
    done = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(send, number)
        try:
            await asyncio.sleep(60)
        finally:
            send(number)
            await asyncio.sleep(0)
            done.append("cleaned up")

    with stoppable() as process:
        process.run(work)
        send(number)
        done.append("gave back")
    assert done == ["cleaned up", "gave back"]


def test_what_is_told_where_nobody_sees_exceptions_is_heard_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = []
    monkeypatch.setattr(sys, "unraisablehook", unseen.append)

    class Told:
        def __del__(self) -> None:
            send(signal.SIGTERM)

    with stoppable() as process:
        Told()
        process.run(never)
    assert len(unseen) == 1


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_others_are_started_is_heard_when_all_are_whichever_thread_takes_it(
    number: signal.Signals,
) -> None:
    done, ends = [], threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    with stoppable():
        with signals_held():
            assert set(STOP_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())  # which a process inherits
            send(number)
            time.sleep(0.05)
            done.append("started")
        done.append("not heard")
    ends.set()
    thread.join()
    assert done == ["started"]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


async def never() -> None:
    raise AssertionError("it was told to stop before it ran")


def test_work_that_fails_fails_the_process() -> None:
    async def work() -> None:
        raise ValueError("out of order")

    with pytest.raises(ValueError, match="out of order"), stoppable() as process:
        process.run(work)


def test_work_that_ends_by_itself_is_over() -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    with stoppable() as process:
        process.run(work)


def test_an_error_in_a_timer_ends_the_process_instead_of_half_of_it() -> None:
    def expire() -> None:
        raise KeyError("of a timer")

    cleaned_up = []

    async def work() -> None:
        asyncio.get_running_loop().call_later(0, expire)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned_up.append(True)

    with pytest.raises(KeyError, match="of a timer"), stoppable() as process:
        process.run(work)
    assert cleaned_up == [True]


def fail_from_a_thread(process: Stoppable) -> None:
    """It has seen the end of what the process cannot do without."""
    failing = threading.Thread(target=process.fail, args=(RankLost("rank 1 has ended"),))
    failing.start()
    failing.join()


def test_what_is_lost_while_it_loads_interrupts_it_and_is_raised_when_all_is_given_back() -> None:
    done = []

    def load() -> None:
        with stoppable() as process:
            try:
                fail_from_a_thread(process)
                time.sleep(5)
                done.append("loaded")
            finally:
                done.append("given back")

    with pytest.raises(RankLost, match="rank 1 has ended"):
        load()
    assert done == ["given back"]


def test_what_is_lost_while_it_runs_cancels_its_work_and_is_raised() -> None:
    done = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(fail_from_a_thread, process)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    with pytest.raises(RankLost, match="rank 1 has ended"), stoppable() as process:
        process.run(work)
    assert done == ["cleaned up"]


def test_what_is_lost_by_a_process_that_was_told_to_end_is_no_failure() -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_soon(send, signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            fail_from_a_thread(process)

    with stoppable() as process:
        process.run(work)


def test_the_signals_go_where_they_went_before() -> None:
    former = [signal.getsignal(number) for number in STOP_SIGNALS]
    with stoppable():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != former
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == former
