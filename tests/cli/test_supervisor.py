"""The supervisor's rules, with scripted children; what must hold when it is killed itself, in a process of its own."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from supervised import is_running, noted, scripted, wait_until

from headrace.cli.child import Child
from headrace.cli.supervisor import ChildEnded, Supervisor, Timing

Act = Callable[[], Awaitable[None]]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@dataclass
class Stage:
    """Scripted children under a supervisor in this process, and what they leave behind."""

    directory: Path
    children: list[Child] = field(default_factory=list)
    timing: Timing = field(default_factory=lambda: Timing(grace_s=30))

    def child(self, name: str, behaviour: str) -> None:
        self.children.append(scripted(self.directory, name, behaviour))

    def lives(self, name: str) -> list[str]:
        return noted(self.directory, name, "pids")

    def signals(self, name: str) -> list[str]:
        return noted(self.directory, name, "signals")

    def all_pids(self) -> list[str]:
        return [pid for path in self.directory.glob("*.pids") for pid in path.read_text().split()] + [
            pid for path in self.directory.glob("*.grandchildren") for pid in path.read_text().split()
        ]

    def run(self, bring_up: Act, then: Act | None = None) -> bool:
        """`then` runs beside the supervisor once it is up. No process may be left, whatever happens."""

        async def play() -> bool:
            supervisor = Supervisor(self.children, self.directory, self.timing)
            is_up = asyncio.Event()

            async def all_up() -> None:
                await bring_up()
                is_up.set()

            async def go_on() -> None:
                await is_up.wait()
                assert then is not None
                await then()

            beside = asyncio.create_task(go_on()) if then else None
            try:
                return await supervisor.run(all_up)
            finally:
                if beside is not None and not beside.done():
                    beside.cancel()
                elif beside is not None:
                    beside.result()

        try:
            return asyncio.run(play())
        finally:
            wait_until(lambda: not [pid for pid in self.all_pids() if is_running(pid)])

    async def all_started(self) -> None:
        for child in self.children:
            await until(lambda child=child: self.lives(child.name))

    async def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """SIGHUP as in a terminal, also where nohup has these tests ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield Stage(tmp_path)
    signal.signal(signal.SIGHUP, before)


async def nothing() -> None: ...


def test_a_signal_ends_all_children_by_sigterm(stage: Stage) -> None:
    stage.child("a", "stay")
    stage.child("b", "stay")
    assert stage.run(stage.all_started, stage.stop) is True
    assert stage.signals("a") == stage.signals("b") == ["SIGTERM"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_children_start_ends_them_too(stage: Stage, number: signal.Signals) -> None:
    stage.child("a", "stay")

    async def never_up() -> None:
        await stage.all_started()
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    assert stage.run(never_up) is True
    assert stage.signals("a") == ["SIGTERM"]


def test_a_child_that_ignores_sigterm_is_killed_and_named(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.timing = replace(stage.timing, grace_s=0.2)
    stage.child("deaf", "ignore_sigterm")
    stage.child("quick", "stay")
    assert stage.run(stage.all_started, stage.stop) is False
    gc.collect()  # what was left behind would tell now
    assert [each.message for each in caplog.records if each.levelname in ("WARNING", "ERROR")] == [
        "still running, so killed: deaf"
    ]


def test_a_stopped_child_is_killed(stage: Stage) -> None:
    stage.timing = replace(stage.timing, grace_s=0.2)
    stage.child("a", "stay")

    async def stop_it_and_all() -> None:
        os.kill(int(stage.lives("a")[0]), signal.SIGSTOP)
        await stage.stop()

    assert stage.run(stage.all_started, stop_it_and_all) is False


def test_a_second_signal_kills_at_once(stage: Stage) -> None:
    times = iter(range(100))
    stage.timing = Timing(grace_s=100, clock=lambda: float(next(times)))  # a second between any two looks
    stage.child("deaf", "ignore_sigterm")

    async def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    assert stage.run(stage.all_started, twice) is False
    assert time.monotonic() - began < 20


def test_one_event_that_comes_as_two_signals_is_one(stage: Stage) -> None:
    stage.timing = Timing(grace_s=100, clock=lambda: 0.0)  # no time passes
    stage.child("slow", "linger")

    async def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    assert stage.run(stage.all_started, twice) is True
    assert stage.signals("slow") == ["SIGTERM"]


def test_what_children_have_started_ends_with_them(stage: Stage) -> None:
    stage.child("a", "have_grandchild")
    assert stage.run(stage.all_started, stage.stop) is True  # and `run` looks for what is left
    assert noted(stage.directory, "a", "grandchildren")


def test_children_are_in_a_group_that_no_terminal_signals(stage: Stage) -> None:
    stage.child("a", "stay")
    stage.child("b", "stay")
    groups = []

    async def look() -> None:
        groups.extend(os.getpgid(int(stage.lives(name)[0])) for name in "ab")
        await stage.stop()

    stage.run(stage.all_started, look)
    assert groups[0] == groups[1] != os.getpgid(0)


# ---- children that end by themselves ---------------------------------------------------------------------------


def test_a_child_that_fails_before_all_are_up_ends_everything_in_its_own_words(stage: Stage) -> None:
    stage.child("a", "stay")
    stage.child("prefiller-0", "fail_with_words")
    with pytest.raises(ChildEnded, match="^prefiller-0: --page-size: must be small$") as raised:
        stage.run(asyncio.Event().wait)
    assert raised.value.status == 2


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [("fail_first:9", "a ended with status 3"), ("kill_itself", "a was ended by SIGKILL")],
)
def test_a_child_without_words_is_described(stage: Stage, behaviour: str, text: str) -> None:
    stage.child("a", behaviour)
    with pytest.raises(ChildEnded, match=f"^{text}$") as raised:
        stage.run(asyncio.Event().wait)
    assert raised.value.status == 1


def test_a_child_comes_back_after_waits_that_double_up_to_a_limit(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []

    async def skip(seconds: float) -> None:
        waits.append(seconds)

    stage.timing = Timing(sleep=skip, longest_delay_s=5)
    stage.child("decoder-0", "fail_first:5")

    async def until_it_stays() -> None:
        await until(lambda: len(stage.lives("decoder-0")) == 6)
        await stage.stop()

    assert stage.run(nothing, until_it_stays) is True
    assert waits == [1, 2, 4, 5, 5]
    assert "decoder-0 ended with status 3; it starts again in 1 s" in caplog.messages


def test_a_child_that_was_drained_is_not_started_again_and_ends_nobody(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stage.child("decoder-0", "be_drained")
    stage.child("decoder-1", "stay")

    async def until_it_has_left() -> None:
        await until(lambda: "decoder-0 has left: it was drained" in caplog.messages)
        await asyncio.sleep(0.1)
        await stage.stop()

    assert stage.run(nothing, until_it_has_left) is True
    assert len(stage.lives("decoder-0")) == 1 and stage.signals("decoder-1") == ["SIGTERM"]


def test_a_child_that_leaves_word_who_comes_after_it_is_followed_by_that_at_once_and_again(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []

    async def skip(seconds: float) -> None:
        waits.append(seconds)

    caplog.set_level("INFO")
    stage.timing = Timing(sleep=skip)
    stage.child("decoder-0", "become_another")

    async def twice() -> None:
        await until(lambda: len(stage.lives("decoder-0-after")) >= 2)
        await stage.stop()

    stage.run(nothing, twice)
    assert len(stage.lives("decoder-0")) == 1 and waits[:1] == [1]
    assert "decoder-0 was drained; it goes on as decoder-0-after" in caplog.messages
    assert "decoder-0-after was ended by SIGKILL; it starts again in 1 s" in caplog.messages


def test_waits_begin_anew_after_a_long_life(stage: Stage) -> None:
    waits: list[float] = []

    async def skip(seconds: float) -> None:
        waits.append(seconds)

    # Between the third life's beginning and its end lie 60 seconds.
    stage.timing = Timing(sleep=skip, clock=lambda: 60.0 * (len(stage.lives("a")) >= 3), forgiven_after_s=60)
    stage.child("a", "kill_itself")

    async def five_lives() -> None:
        await until(lambda: len(waits) >= 5)
        await stage.stop()

    stage.run(nothing, five_lives)
    assert waits[:5] == [1, 2, 1, 2, 4]


def test_the_wait_stays_at_its_limit_however_often_a_child_ends() -> None:
    assert [Timing().delay_s(number) for number in (1, 5, 6, 10_000)] == [1, 16, 30, 30]


def test_what_a_child_says_at_its_restart_is_logged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async def skip(seconds: float) -> None: ...

    stage.timing = Timing(sleep=skip)
    stage.child("a", "fail_with_words")

    async def twice() -> None:
        await until(lambda: len(stage.lives("a")) >= 2)
        await stage.stop()

    stage.run(nothing, twice)
    assert "a: --page-size: must be small; it starts again in 1 s" in caplog.messages


def test_words_of_an_earlier_life_are_not_said_again(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async def skip(seconds: float) -> None: ...

    stage.timing = Timing(sleep=skip)
    stage.child("a", "fail_with_words_once")

    async def twice() -> None:
        await until(lambda: len(caplog.messages) >= 2)
        await stage.stop()

    stage.run(nothing, twice)
    assert caplog.messages[:2] == [
        "a: --page-size: must be small; it starts again in 1 s",
        "a was ended by SIGKILL; it starts again in 2 s",
    ]


def test_a_signal_while_a_child_waits_to_come_back_ends_at_once(stage: Stage) -> None:
    stage.timing = Timing(first_delay_s=1000, longest_delay_s=1000)
    stage.child("a", "kill_itself")

    async def after_its_death() -> None:
        await until(lambda: stage.lives("a") and not is_running(stage.lives("a")[0]))
        await asyncio.sleep(0.05)
        await stage.stop()

    assert stage.run(nothing, after_its_death) is True


# ---- the supervisor's own end ----------------------------------------------------------------------------------


def test_an_error_while_coming_up_leaves_no_child(stage: Stage) -> None:
    stage.child("a", "stay")

    async def fail() -> None:
        await stage.all_started()
        raise RuntimeError("no way up")

    with pytest.raises(ExceptionGroup) as raised:
        stage.run(fail)
    assert raised.group_contains(RuntimeError, match="no way up")


def test_without_its_guard_everything_ends(stage: Stage) -> None:
    stage.child("a", "stay")

    async def kill_guard() -> None:
        guard = os.getpgid(int(stage.lives("a")[0]))
        assert guard != os.getpgid(0)
        os.kill(guard, signal.SIGKILL)

    with pytest.raises(ChildEnded, match="guard of the processes was ended by SIGKILL"):
        stage.run(stage.all_started, kill_guard)
    assert stage.signals("a") == ["SIGTERM"]


@contextmanager
def own_process(tmp_path: Path, *children: str, prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    script = str(Path(__file__).with_name("scripted_supervisor.py"))
    command = [*prefix, sys.executable, script, str(tmp_path), str(run_directory), *children]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            wait_until((tmp_path / "up").exists)
            yield process
        finally:
            process.kill()


def test_when_it_is_killed_nobody_is_left_and_nothing(tmp_path: Path) -> None:
    with own_process(tmp_path, "a=have_grandchild", "b=ignore_sigterm") as supervisor:
        pids = [*noted(tmp_path, "a", "pids"), *noted(tmp_path, "b", "pids"), *noted(tmp_path, "a", "grandchildren")]
        pids.append(str(os.getpgid(int(pids[0]))))  # the guard
        assert len(pids) == 4 and all(map(is_running, pids))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # an init system signals all that it finds
            os.kill(int(pids[-1]), number)
        supervisor.kill()
        wait_until(lambda: not any(map(is_running, pids)))
        wait_until(lambda: not (tmp_path / "run").exists())


def test_with_nohup_it_outlives_its_terminal(tmp_path: Path) -> None:
    with own_process(tmp_path, "a=stay", prefix=("nohup",)) as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert noted(tmp_path, "a", "signals") == ["SIGTERM"]


def test_ctrl_c_on_a_terminal_reaches_children_once_as_sigterm(tmp_path: Path) -> None:
    terminal = (sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)")
    with own_process(tmp_path, "a=stay", "b=stay", prefix=terminal) as process:
        assert process.stdin is not None
        process.stdin.write(b"\x03")
        process.stdin.flush()
        assert process.wait(10) == 0
    assert noted(tmp_path, "a", "signals") == noted(tmp_path, "b", "signals") == ["SIGTERM"]
