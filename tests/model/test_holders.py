"""Entries are believed of the living alone, the dead's are swept, and a turn is waited for as long as is sensible."""

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.model import holders as holders_module
from headrace.model.holders import Holder, Holders
from headrace.model.packed import PackedWeights, open_packed

DIGEST = "0123456789abcdef"
NAME = "headrace-weights"
NAMESPACE = os.stat("/proc/self/ns/pid").st_ino


def started_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def holders(directory: Path) -> Iterator[Holders]:
    holders = Holders(directory, DIGEST)
    yield holders
    holders.leave()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def entry(
    directory: Path, *, digest: str = DIGEST, pid: int | None = None, started: int | None = None, fd: int = 3
) -> Path:
    """An entry, of this process where nothing else is said."""
    pid = os.getpid() if pid is None else pid
    started = started_of(pid) if started is None else started
    path = directory / f"{NAMESPACE}-{digest}-{pid}-{started}-{fd}.holder"
    path.touch()
    return path


# ---- entries ---------------------------------------------------------------------------------------------------


def test_an_entry_says_who_holds_what_where_until_its_owner_leaves(directory: Path, holders: Holders) -> None:
    holders.enter(17)
    (found,) = Holders(directory, DIGEST).living()
    assert (found.pid, found.fd, found.started) == (os.getpid(), 17, started_of(os.getpid()))
    assert Holders(directory, "fedcba").living() == []
    holders.leave()
    holders.leave()
    assert holders.living() == []
    assert list(directory.iterdir()) == []


def test_the_longest_at_it_comes_first(directory: Path, holders: Holders, other: subprocess.Popen[bytes]) -> None:
    entry(directory, pid=other.pid, fd=3)
    entry(directory, fd=12)
    entry(directory, fd=4)
    assert [(one.pid, one.fd) for one in holders.living()] == [(os.getpid(), 4), (os.getpid(), 12), (other.pid, 3)]


def test_a_reused_pid_is_not_believed_and_its_entry_goes(
    directory: Path, holders: Holders, other: subprocess.Popen[bytes]
) -> None:
    stale = entry(directory, pid=other.pid, started=started_of(other.pid) - 1)
    assert holders.living() == []
    assert not stale.exists()


def test_entries_of_the_dead_go_reaped_or_not_and_of_any_key(
    directory: Path, holders: Holders, other: subprocess.Popen[bytes]
) -> None:
    mine, another_key = entry(directory, pid=other.pid), entry(directory, pid=other.pid, digest="fedcba")
    assert [one.pid for one in holders.living()] == [other.pid]
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie still
    assert Path(f"/proc/{other.pid}/stat").exists()
    assert holders.living() == []
    assert not mine.exists() and not another_key.exists()
    reaped = entry(directory, pid=other.pid)
    other.wait()
    assert holders.living() == []
    assert not reaped.exists()


@pytest.mark.parametrize("rest", ["", "-1-2", "-1-2-x", "-1-2-3-4", "-٣-1-1", "--1-2-3", "-1-2-3\n"])
def test_a_name_that_says_nothing_goes(directory: Path, holders: Holders, rest: str) -> None:
    (directory / f"{NAMESPACE}-{DIGEST}{rest}.holder").touch()
    assert holders.living() == []
    assert list(directory.iterdir()) == []


def test_pids_of_another_namespace_are_left_to_those_who_know_them(directory: Path, holders: Holders) -> None:
    foreign = directory / f"{NAMESPACE + 1}-{DIGEST}-{os.getpid()}-{started_of(os.getpid())}-3.holder"
    foreign.touch()
    assert holders.living() == []
    assert foreign.exists()


def test_the_folder_is_this_users_alone(directory: Path, holders: Holders) -> None:
    assert directory.stat().st_mode & 0o777 == 0o700
    holders.wait_turn()
    holders.enter(3)
    assert [path.stat().st_mode & 0o777 for path in directory.iterdir()] == [0o600, 0o600]
    directory.chmod(0o710)
    with pytest.raises(PermissionError, match="must be a folder of this user's alone"):
        Holders(directory, DIGEST)


# ---- what an entry leads to ------------------------------------------------------------------------------------


def opened_by(name: str, flags: int = os.MFD_ALLOW_SEALING) -> Callable[[], int]:
    return lambda: os.memfd_create(name, os.MFD_CLOEXEC | flags)


LIES: dict[str, tuple[Callable[[], int], str]] = {
    "an unsealed memory": (opened_by(NAME), "it is not sealed"),
    "a memory that cannot be sealed": (opened_by(NAME, 0), "it is not sealed"),
    "somebody else's memory": (opened_by("other"), "is no memfd headrace-weights"),
    "a file": (lambda: os.open("/dev/null", os.O_RDONLY), "is no memfd headrace-weights"),
    "a descriptor that is closed": (lambda: 1_000_000, "No such file"),
}


@pytest.mark.parametrize(("make", "said"), LIES.values(), ids=LIES)
def test_an_entry_that_leads_to_something_else_is_not_followed_and_goes(
    directory: Path, make: Callable[[], int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with closing(packed_weights(directory)) as first:
        (true_entry,) = directory.glob("*.holder")
    fd = make()
    lie = entry(directory, digest=true_entry.name.split("-")[1], fd=fd)
    before = len(os.listdir("/proc/self/fd"))
    with closing(packed_weights(directory)) as second:
        assert len(os.listdir("/proc/self/fd")) == before + 1
        assert not first.is_filled and not second.is_filled
        assert not lie.exists()
        (line,) = [line for line in caplog.messages if "are not used" in line]
        assert line.startswith(f"the packed weights of pid {os.getpid()} are not used: ")
        assert said in line
        with closing(packed_weights(directory)) as third:
            assert third.is_filled
    if fd != 1_000_000:
        os.close(fd)


def test_another_keys_memory_under_this_keys_name_is_refused(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with closing(packed_weights(directory, "another key")) as another:
        (its_entry,) = directory.glob("*.holder")
        with closing(packed_weights(directory)):
            digest = next(name for path in directory.glob("*.holder") if (name := path.name) != its_entry.name)
        lie = entry(directory, digest=digest.split("-")[1], fd=another._fd)
        with closing(packed_weights(directory)) as packed:
            assert not packed.is_filled
        assert not lie.exists() and its_entry.exists()
    assert [line for line in caplog.messages if "it has another key" in line]


def test_a_memory_is_opened_for_reading_alone() -> None:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    holder = Holder(entry=Path(), digest=DIGEST, pid=os.getpid(), started=started_of(os.getpid()), fd=fd)
    ours = holder.open(NAME)
    assert os.path.samestat(os.fstat(ours), os.fstat(fd))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(ours, b"x")
    assert not os.get_inheritable(ours)
    os.close(fd)
    os.close(ours)


def packed_weights(directory: Path, key: str = "a key") -> PackedWeights:
    packed = open_packed(key, capacity_bytes=1 << 20, directory=directory)
    packed.region(100)
    packed.seal()
    return packed


# ---- turns -----------------------------------------------------------------------------------------------------


class MovedClock:
    """In the place of the module `time`: sleeping moves it, and at `then_s` something happens."""

    def __init__(self, then_s: float = float("inf"), then: Callable[[], None] = lambda: None) -> None:
        self.now = 1000.0
        self.end = 1000.0 + then_s
        self.then = then

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.end:
            self.then()


def test_a_turn_is_one_processs_at_a_time(
    directory: Path, holders: Holders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    holders.wait_turn()
    clock = MovedClock(9.0, holders.end_turn)
    monkeypatch.setattr(holders_module, "time", clock)
    second = Holders(directory, DIGEST)
    second.wait_turn()
    assert clock.now == pytest.approx(1009, abs=0.1)
    assert [
        line.removeprefix("waiting for another process that packs the same weights, for ") for line in caplog.messages
    ] == [
        "2 s so far",
        "4 s so far",
        "8 s so far",
    ]
    second.leave()


def test_turns_of_other_keys_are_not_waited_for(directory: Path, holders: Holders) -> None:
    holders.wait_turn()
    second = Holders(directory, "fedcba")
    second.wait_turn()
    second.leave()


def test_nobody_waits_for_ever(
    directory: Path, holders: Holders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with closing(packed_weights(directory)):
        (lock,) = directory.glob("*.lock")
        (true_entry,) = directory.glob("*.holder")
    with lock.open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        clock = MovedClock()
        monkeypatch.setattr(holders_module, "time", clock)
        before = len(os.listdir("/proc/self/fd"))
        with closing(packed_weights(directory)) as packed:
            assert not packed.is_filled
            assert len(os.listdir("/proc/self/fd")) == before + 1
        assert clock.now == pytest.approx(1060, abs=0.1)
    assert caplog.messages[-1] == (
        f"weights are not shared with other processes: [Errno 110] still locked after 60 s: '{lock}'"
    )
    assert not true_entry.exists()
