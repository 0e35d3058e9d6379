"""Who a process is: its pid, and when it started, which tells it from the next one with that pid."""

import errno
import os
import select
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.messenger.process import ProcessName, _start_ticks


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def name_of(process: subprocess.Popen[bytes]) -> ProcessName:
    return replace(ProcessName.own(), pid=process.pid, started=_start_ticks(process.pid))


def open_once(name: ProcessName) -> bool:
    pidfd = name.try_open()
    if pidfd is not None:
        os.close(pidfd)
    return pidfd is not None


def has_exited(pidfd: int, timeout_s: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def test_a_process_knows_its_own_name_and_it_stays_the_same() -> None:
    assert ProcessName.own() == ProcessName.own()
    assert ProcessName.own().pid == os.getpid()
    assert open_once(ProcessName.own())


def test_a_pidfd_is_silent_while_the_process_runs_and_readable_once_it_was_killed(
    child: subprocess.Popen[bytes],
) -> None:
    pidfd = name_of(child).try_open()
    assert pidfd is not None
    try:
        assert not has_exited(pidfd, 0.0)
        child.kill()
        assert has_exited(pidfd, 5.0)
    finally:
        os.close(pidfd)


def test_a_process_that_exited_cannot_be_opened(child: subprocess.Popen[bytes]) -> None:
    name = name_of(child)
    child.kill()
    child.wait()
    assert not open_once(name)


def test_a_process_that_exited_and_was_not_waited_for_is_seen_as_exited(child: subprocess.Popen[bytes]) -> None:
    name = name_of(child)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    pidfd = name.try_open()
    if pidfd is not None:
        assert has_exited(pidfd, 0.0)
        os.close(pidfd)


@pytest.mark.parametrize("difference", [-1, 1])
def test_another_process_with_the_same_pid_is_not_taken_for_it(difference: int, child: subprocess.Popen[bytes]) -> None:
    name = name_of(child)
    num_fds = len(os.listdir("/proc/self/fd"))
    assert not open_once(replace(name, started=name.started + difference))
    assert len(os.listdir("/proc/self/fd")) == num_fds, "the other's pidfd leaks"


def test_a_thread_that_has_the_pid_now_is_not_taken_for_it() -> None:
    started, done = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    started.wait()
    try:
        assert thread.native_id is not None
        assert not open_once(replace(ProcessName.own(), pid=thread.native_id))
    finally:
        done.set()
        thread.join()


def test_a_name_with_blanks_and_parentheses_hides_no_start_time(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as process:
        try:
            assert abs(_start_ticks(process.pid) - _start_ticks(os.getpid())) < 100 * 3600 * 24
            assert open_once(name_of(process))
        finally:
            process.kill()


def test_where_proc_is_hidden_the_pidfd_itself_says_whether_a_process_lives(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_of(child)

    def hidden(pid: int) -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"/proc/{pid}/stat")  # as hidepid=2 does

    monkeypatch.setattr("headrace.messenger.process._start_ticks", hidden)
    pidfd = name.try_open()
    assert pidfd is not None, "another user's process is taken for one that has exited"
    num_fds = len(os.listdir("/proc/self/fd"))
    child.kill()
    assert has_exited(pidfd, 5.0)
    os.close(pidfd)
    assert not open_once(name), "killed, not waited for: its pidfd can be opened, and is readable"
    assert len(os.listdir("/proc/self/fd")) == num_fds - 1, "the exited one's pidfd leaks"


def test_a_failure_of_our_own_is_not_taken_for_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", full)
    with pytest.raises(OSError, match="Too many open files"):
        ProcessName.own().try_open()
