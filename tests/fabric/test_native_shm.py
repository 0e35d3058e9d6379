"""What is shm's alone: ends of a pair that are stopped or killed where libfabric holds a lock, what is under way when
access or a process ends, and its files in /dev/shm."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from native_reader import LENGTH, ReaderProcess
from native_side import POISON, NativeSide, closing, link, shm_files

from headrace.fabric.interface import Imm, PeerLost, Reached

PAGE = 64 << 10
FOLDER = Path("/dev/shm")


def run_python(source: str, *command: str) -> subprocess.CompletedProcess[str]:
    python = [*command, sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(source)]
    return subprocess.run(python, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(autouse=True)
def _no_file_is_left() -> Iterator[None]:
    yield
    assert shm_files() == []


@pytest.fixture
def side() -> Iterator[NativeSide]:
    with closing(made := NativeSide(LENGTH, transports=("shm",))):
        yield made


@contextmanager
def stopped(process: ReaderProcess) -> Iterator[None]:
    """For 5 seconds at most, or what it holds up would hang instead of failing."""
    process.stop()
    over = threading.Timer(5.0, process.process.send_signal, (signal.SIGCONT,))
    over.start()
    try:
        yield
    finally:
        over.cancel()
        over.join()
        process.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("who", ["reader", "writer"])
def test_whoever_is_stopped_in_the_middle_of_a_write_holds_up_neither_us_nor_another_peer(
    side: NativeSide, who: str
) -> None:
    """libfabric guards a pair by spin locks that both ends hold as they work: the other one would never come back.
    Short writes complete as they are posted, so that both ends work at once."""
    rng = random.Random(7)
    with closing(other := NativeSide(LENGTH, transports=("shm",))), ReaderProcess("shm") as process:
        there, _ = link(side, other)
        peer = side.knows(process)
        side.enter(process, peer)
        side.admit(process, peer)
        for attempt in range(12):
            if who == "reader":
                streamed = side.write_pages(peer, 100 + attempt, LENGTH // 4096, 4096)
            else:
                process.ask("write", side.fabric.address.hex(), 100 + attempt, LENGTH // 4096, 4096)
            time.sleep(rng.uniform(0.001, 0.004))
            with stopped(process):
                time.sleep(0.01)
                begun = time.monotonic()
                other.fabric.arm(Imm(2), 100)
                assert side.done(side.write_pages(there, 2, 100, PAGE), 2.0)
                assert other.waits(lambda: bool(other.told(Reached)), 2.0)
                assert time.monotonic() - begun < 1.0
            other.fabric.disarm(Imm(2))
            other.events.clear()
            assert who == "writer" or side.done(streamed)


def test_what_a_stopped_writer_has_under_way_lands_nowhere_after_a_revoke(side: NativeSide) -> None:
    with ReaderProcess("shm") as writer:
        writer.ask("fill", 0xAA)
        peer = side.knows(writer)
        for attempt in range(5):
            side.admit(writer, peer)
            side.fabric.arm(Imm(100 + attempt), LENGTH // PAGE)
            transfer = writer.ask("write", side.fabric.address.hex(), 100 + attempt, LENGTH // PAGE, PAGE)
            time.sleep(0.001 + attempt * 0.001)
            with stopped(writer):
                assert side.fabric.revoke(peer), "at once"
                side.memory[:] = POISON
                num_before = side.fabric.statistics().num_arrivals
            num_posted, num_failed = map(int, writer.ask("done", transfer).split())
            assert num_failed <= num_posted <= LENGTH // PAGE
            assert side.fabric.statistics().num_arrivals == num_before
            assert (side.memory == POISON).all()
        side.admit(writer, peer)
        side.fabric.arm(Imm(1), 1)
        writer.ask("write", side.fabric.address.hex(), 1, 1, PAGE)
        assert side.waits(lambda: any(event.imm == 1 for event in side.told(Reached)))
        assert (side.memory[:PAGE] == 0xAA).all() and (side.memory[PAGE:] == POISON).all()


def test_what_is_under_way_to_a_process_that_is_killed_completes_in_error(side: NativeSide) -> None:
    with ReaderProcess("shm") as reader:
        peer = side.knows(reader)
        side.enter(reader, peer)
        reader.ask("arm", 1, 1)
        side.write(peer, 1, PAGE)
        reader.ask("reached", 1)
        reader.stop()
        transfer = side.write_pages(peer, 2, 100, PAGE)
        assert side.done(transfer, 0.2) is None
        reader.process.kill()
        done = side.done(transfer, 1.0)
        assert done is not None and not done.complete and done.code == errno.ECONNRESET
        assert 0 < done.num_failed == done.num_posted < 100
        assert side.waits(lambda: [event.peer for event in side.told(PeerLost)] == [peer], 1.0)


def test_a_long_write_is_cut_where_libfabric_may_not_read_the_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers without ptrace: pieces go through /dev/shm, each by another visit of both."""
    monkeypatch.setenv("FI_SHM_DISABLE_CMA", "1")
    with ReaderProcess("shm") as writer, ReaderProcess("shm") as reader:
        writer.ask("fill", 0xAA)
        writer.ask("connect", reader.ask("address"), reader.ask("grant", writer.ask("address")))
        reader.ask("arm", 1, 1)
        transfer = writer.ask("write_once", reader.ask("address"), 1, LENGTH)
        reader.ask("reached", 1)
        assert writer.ask("done", transfer) == "1 0"
        assert reader.ask("hash", 0, LENGTH) == writer.ask("hash", 0, LENGTH)


def test_both_ends_of_one_process_may_be_closed_in_any_order_in_the_middle_of_writes() -> None:
    ended = run_python(
        f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from native_side import NativeSide, link
        for attempt in range(24):
            writer, reader = (NativeSide(8 << 20, transports=("shm",)) for _ in range(2))
            there, here = link(writer, reader)
            writer.write_pages(there, 1, 128, 65536)
            time.sleep(attempt % 8 * 0.0003)
            if attempt % 4 == 0:
                reader.fabric.remove_peer(here)
            for side in (writer, reader) if attempt % 2 else (reader, writer):
                side.fabric.close()
        print("unharmed")
        """
    )
    assert (ended.returncode, ended.stdout) == (0, "unharmed\n"), ended.stderr


def test_a_pair_that_knows_each_other_has_no_file_and_what_a_killed_process_left_is_swept(side: NativeSide) -> None:
    with ReaderProcess("shm") as reader, ReaderProcess("shm") as writer:
        address = reader.ask("address")
        writer.ask("connect", address, reader.ask("grant", writer.ask("address")))
        reader.ask("arm", 2, 1)
        writer.ask("write", address, 2, 1, PAGE)
        reader.ask("reached", 2)
        assert shm_files(writer, reader) == []
        descriptor = reader.ask("grant", writer.ask("address"))
        with stopped(reader):  # it cannot answer: the writer's file stays
            writer.ask("connect", address, descriptor)
            deadline = time.monotonic() + 5.0
            while not shm_files(writer, reader) and time.monotonic() < deadline:
                time.sleep(0.01)
            (left,) = shm_files(writer, reader)
            assert f"-{writer.process.pid}-" in left
            with closing(NativeSide(transports=("shm",))):
                assert shm_files(writer, reader) == [left], "its process lives"
            writer.process.kill()
            writer.process.wait()
            with closing(NativeSide(transports=("shm",))):
                assert shm_files(writer, reader) == []
        peer = side.knows(reader)
        side.enter(reader, peer)
        reader.ask("arm", 1, 1)
        side.write(peer, 1, PAGE)
        reader.ask("reached", 1)


def test_the_files_of_others_are_left_alone() -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    start = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    ours, reused, elsewhere, odd = made = [
        FOLDER / f"headrace-shm-{rest}"
        for rest in (
            f"{namespace}-{os.getpid()}-{start}-0123456789abcdef",
            f"{namespace}-{os.getpid()}-{int(start) - 1}-0123456789abcdef",
            f"{namespace + 1}-{2**22 + 1}-1-0123456789abcdef",
            f"{namespace}-what-is-this",
        )
    ]
    try:
        for path in made:
            path.touch()
        with closing(NativeSide(transports=("shm",))):
            assert ours.exists() and elsewhere.exists() and odd.exists()
            assert not reused.exists()
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def test_a_small_dev_shm_is_told_with_what_it_must_have() -> None:
    unshare = shutil.which("unshare")
    alone = [str(unshare), "--user", "--map-root-user", "--mount", "--"]
    if unshare is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespace of our own here")
    ended = run_python(
        """
        import os, subprocess
        from headrace.errors import FabricError
        from headrace.fabric.native import NativeFabric, available_transports
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", "/dev/shm"], check=True)
        fd = os.memfd_create("m"); os.ftruncate(fd, 4096)
        try:
            NativeFabric(fd, 4096, transports=("shm",))
        except FabricError as error:
            print(error.code, error)
        print("shm" in available_transports())
        """,
        *alone,
    )
    told, _, available = ended.stdout.strip().rpartition("\n")
    assert told.startswith(f"{errno.ENOSPC} ") and "/dev/shm has 8 MiB free, must have" in told, ended.stderr
    assert available == "False"


def test_no_signal_is_caught_for_libfabric() -> None:
    """Its shm takes SIGINT, SIGTERM, SIGSEGV and SIGBUS with its first endpoint, and forgets all names at the first."""
    ended = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        def caught():  # but for those above 31, which the C library keeps for threads
            return [int(line.split()[1], 16) & 0x7fffffff for line in open("/proc/self/status") if "SigCgt" in line]
        before = caught()
        from native_side import NativeSide, link
        writer, reader = (NativeSide(transports=("shm",)) for _ in range(2))
        there, _ = link(writer, reader)
        assert writer.done(writer.write(there, 1, 65536))
        assert caught() == before, (caught(), before)
        writer.fabric.close()
        reader.fabric.close()
        print("ours")
        """
    )
    assert (ended.returncode, ended.stdout) == (0, "ours\n"), ended.stderr
