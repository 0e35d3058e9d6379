"""`headrace fabric selftest`, `bench`, `serve` as a person meets them: options, exit status, Ctrl-C, two machines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace.cli.app import run
from headrace.cli.fabric import selftest
from headrace.cli.fabric.measure_options import TOKEN_VARIABLE, Far, far, place_of, share, size_list
from headrace.errors import InputError
from headrace.fabric.measure.plan import KIB, MIB, Plan
from headrace.fabric.measure.session import Place

TINY = Plan(transports=("mapped",), page_sizes=(4096,), num_bytes=64 * KIB, num_pairs=2, num_rounds=0, rest_s=0.0)
BENCH = ["fabric", "bench", "--bytes", "64KiB", "--sizes", "4KiB,8KiB", "--runs", "2", "--imms", "0"]

# ---- options


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("local", Far()),
        ("10.0.0.7:4000", Far("10.0.0.7", 4000)),
        ("node-3:1", Far("node-3", 1)),
        ("[fd00::7]:65535", Far("fd00::7", 65535)),
    ],
)
def test_a_peer_is_this_machine_or_a_place(text: str, value: Far) -> None:
    assert far(text) == value == far(value)


@pytest.mark.parametrize("text", ["", "there", ":4000", "host:", "host:0", "host:65536", "host:x", "[]:1"])
def test_what_is_no_peer_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="must be local, or HOST:PORT"):
        far(text)


def test_sizes_and_shares_are_read_or_refused() -> None:
    assert size_list("16KiB,1MiB").num_bytes == (16 * KIB, MIB)
    assert size_list(size_list("5")).num_bytes == (5,)
    with pytest.raises(typer.BadParameter, match="once"):
        size_list("1KiB,1024")
    assert share("0.25") == 0.25 == share(0.25)
    for wrong in ("-0.1", "1.1", "half", "nan"):
        with pytest.raises(typer.BadParameter, match="from 0 to 1"):
            share(wrong)


def test_another_machine_needs_a_token_and_this_one_has_none() -> None:
    assert place_of(Far(), None) is None
    assert place_of(Far("h", 1), "t") == Place(host="h", port=1, token="t")
    for peer, token in ((Far(), "t"), (Far("h", 1), None), (Far("h", 1), "")):
        with pytest.raises(InputError) as refused:
            place_of(peer, token)
        assert refused.value.field == "token"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["selftest", "somewhere"], "must be local, or HOST:PORT"),
        (["selftest", "10.0.0.7:4000"], "--token: must be given for another machine"),
        (["selftest", "--token", "x"], "--token: must be left out"),
        (["selftest", "--floor", "2"], "--floor: must be a number from 0 to 1"),
        (["bench", "--sizes", "8KiB", "--bytes", "4KiB"], "--bytes: must be from 8192, the largest page"),
        (["bench", "--sizes", "8 stones"], "--sizes: must be a size such as"),
        (["bench", "--transports", "pigeons"], "--transports: must be auto or a list"),
        (["bench", "--transports", "efa"], "--transports: must be of what this machine has"),
        (["bench", "--runs", "0"], "--runs: must be a whole number from 1"),
        (["bench", "--imms", "-1"], "--imms: must be a whole number from 0"),
        (["serve", "--host", "192.0.2.7"], "--host: must be an address of this machine"),
        (["serve", "--port", "70000"], "--port: must be a whole number from 0 to 65535"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_said_in_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fabric", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and told in shown.err
    assert shown.err.count("\n") == 1


# ---- whole commands


def test_a_bench_shows_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BENCH, "--transports", "mapped"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "## mapped" in shown.out and "## tcp" not in shown.out
    (sizes,) = [line.split() for line in shown.out.splitlines() if line.startswith("| GB/s")]
    assert sizes == ["|", "GB/s", "|", "4KiB", "|", "8KiB", "|"]
    assert "At rest" not in shown.out and "message" not in shown.out


@pytest.mark.parametrize(("floor", "status"), [("0", 0), ("1", 1)])
def test_the_exit_status_of_a_selftest_is_its_verdict(
    floor: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A floor of all is now and then reached by chance, of a hundred times that never.
    judge = selftest.judge
    monkeypatch.setattr(selftest, "judge", lambda measured, floor: judge(measured, 100 * floor))
    monkeypatch.setattr(selftest, "QUICK", replace(TINY, num_bytes=4096))
    assert run(["fabric", "selftest", "--quick", "--json", "--floor", floor]) == status
    told = json.loads(capsys.readouterr().out)
    assert told["is_ok"] is (status == 0) and told["floor"] == float(floor)
    assert bool(told["verdicts"][0]["problems"]) is (status == 1)


def command(*arguments: str, **how: Any) -> "subprocess.Popen[str]":
    """It hears Ctrl-C, also where the tests run in the background of a shell that taught them not to."""
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", "fabric", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **how,
    )


def processes_of(session: int) -> list[int]:
    """Of a session, as the kernel means it: what a command has started, and itself."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(words[3]) == session and words[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for_processes(session: int, count: int) -> None:
    until = time.monotonic() + 30
    while len(processes_of(session)) < count:
        assert time.monotonic() < until
        time.sleep(0.02)


def wait_until_gone(session: int) -> None:
    until = time.monotonic() + 10
    while processes_of(session):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_ctrl_c_ends_a_selftest_and_all_that_it_started() -> None:
    with command("selftest") as process:
        wait_for_processes(process.pid, 4)  # itself, two sides, and bare loops
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in errors
    wait_until_gone(process.pid)


def test_a_selftest_that_is_killed_leaves_no_process() -> None:
    with command("selftest") as process:
        wait_for_processes(process.pid, 4)
        process.kill()
        process.communicate(timeout=20)
    wait_until_gone(process.pid)


@contextmanager
def served() -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """-> the process, and what it says that the other side is to type."""
    with command("serve", "--log-level", "warning") as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        try:
            yield process, words
        finally:
            process.kill()


def test_another_machine_is_measured_by_the_line_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as (process, words):
        assert words[:3] == ["headrace", "fabric", "selftest"] and words[3].startswith("127.0.0.1:")
        assert words[4] == "--token" and len(words[5]) >= 22
        place, token = words[3], words[5]
        assert run([*BENCH, place, "--token", token, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["peer"] == place and token not in json.dumps(told)
        assert "verdicts" not in told
        assert [transport["transport"] for transport in told["transports"]] == ["tcp"]
        assert run([*BENCH, place, "--token", "guessed"]) == 2
        assert "--token: must be the one" in capsys.readouterr().err
        assert run([*BENCH, place, "--token", token, "--transports", "mapped"]) == 2
        assert "--transports: must be of what both machines have" in capsys.readouterr().err
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    wait_until_gone(process.pid)


def test_the_token_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "of the environment")
    assert run(["fabric", "selftest", "127.0.0.1:1"]) == 1
    assert "fabric serve at 127.0.0.1:1: Connection refused" in capsys.readouterr().err
