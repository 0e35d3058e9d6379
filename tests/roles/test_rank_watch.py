"""Who is lost, how that is said, and how soon; the ranks are processes that sleep, and the tests beat for them."""

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.errors import RankLost
from headrace.roles.ranks import watch as rank_watch
from headrace.roles.ranks.watch import RankWatch


class Watched:
    """Two ranks, and what is said of them. A pulse ends with its process, so it is closed where one is killed."""

    def __init__(self) -> None:
        self.processes = [subprocess.Popen(("sleep", "600")) for _ in range(2)]
        pipes = [os.pipe() for _ in range(2)]
        self.beaten = [beaten for _, beaten in pipes]
        self.losses: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
        self.watch = RankWatch(self.processes, [heard for heard, _ in pipes], on_lost=self.losses.put)

    def said(self, number: int, how: str) -> str:
        return f"rank {number} of 3 (process {self.processes[number - 1].pid}) {how}"

    def end(self, number: int, how: signal.Signals) -> None:
        self.processes[number - 1].send_signal(how)
        os.close(self.beaten[number - 1])
        self.beaten[number - 1] = -1


@contextmanager
def watched() -> Iterator[Watched]:
    one = Watched()
    try:
        yield one
    finally:
        one.watch.close()
        for beaten in one.beaten:
            if beaten >= 0:
                os.close(beaten)
        assert all(process.poll() is not None for process in one.processes), "a rank is left"


def test_a_rank_that_ends_is_named_at_once_with_how_it_ended() -> None:
    with watched() as one:
        one.end(2, signal.SIGKILL)
        assert str(one.losses.get(timeout=2)) == one.said(2, "was ended by SIGKILL")
        assert str(one.watch.loss("something else")) == one.said(2, "was ended by SIGKILL")


def test_a_rank_that_is_silent_is_named_and_one_that_beats_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "SILENCE_S", 0.6)
    monkeypatch.setattr(rank_watch, "BEAT_S", 0.05)
    with watched() as one:
        os.write(one.beaten[1], b".")
        is_over = threading.Event()

        def beat() -> None:
            while not is_over.wait(0.05):
                os.write(one.beaten[0], b".")

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            assert str(one.losses.get(timeout=5)) == one.said(2, "does nothing any more: it is stopped, or hangs")
        finally:
            is_over.set()
            beating.join()


def test_before_its_first_beat_a_rank_has_time_to_load_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "SILENCE_S", 0.1)
    monkeypatch.setattr(rank_watch, "BEAT_S", 0.05)
    with watched() as one, pytest.raises(queue.Empty):
        one.losses.get(timeout=0.5)


def test_ranks_that_it_ends_itself_are_not_lost_also_where_they_are_stopped() -> None:
    with watched() as one:
        one.processes[0].send_signal(signal.SIGSTOP)
    assert one.losses.empty()


def test_what_failed_with_all_ranks_alive_is_said_as_it_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "WORDS_S", 0.05)
    with watched() as one:
        assert str(one.watch.loss("rank 2 failed in a step: no memory")) == "rank 2 failed in a step: no memory"
