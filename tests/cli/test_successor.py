"""Who comes after a drained instance: word for a supervisor, or a process; and the command line of the same options."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli import commands, successor
from headrace.cli.app import run
from headrace.cli.child import HEADRACE
from headrace.cli.successor import SUCCESSOR_FILE, Word, arguments_of, read_word, succeed
from headrace.protocol.control import Successor
from headrace.roles.draining import Drained
from headrace.roles.options import InstanceOptions

PLAIN = InstanceOptions(
    role="decoder",
    name="decoder-1",
    gateways=("ipc:///tmp/control.sock",),
    model_dir=Path("/models/tiny"),
    model="tiny",
    tpot_s=0.05,
)
OTHERWISE = replace(
    PLAIN,
    gateways=("tcp://127.0.0.1:5001", "tcp://127.0.0.1:5002"),
    dtype="fp32",
    tp=2,
    page_size=32,
    chunk_tokens=64,
    max_running=7,
    tpot_s=0.0125,
    max_stall_s=0.1,
    kv_memory_bytes=1 << 24,
    max_model_len=512,
    kernels="torch",
    verify_kv=False,
    transports=("tcp",),
    fabric_hosts=("127.0.0.1", "127.0.0.2"),
)
AS_PREFILLER = Successor(role="prefiller", name="prefiller-1", tpot_s=None, max_stall_s=None)


@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        OTHERWISE,
        replace(PLAIN, role="prefiller", tpot_s=None, transports=("mapped",)),
        replace(OTHERWISE, role="prefiller", tpot_s=None, max_stall_s=None, verify_kv=True, transfer="whole"),
    ],
)
def test_the_command_line_makes_the_same_options(options: InstanceOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def capture(options: InstanceOptions) -> None:
        made.append(options)

    for role in ("decoder", "prefiller"):
        monkeypatch.setitem(sys.modules, f"headrace.roles.{role}", SimpleNamespace(**{f"run_{role}": capture}))
    monkeypatch.setattr(commands, "fetch_model", Path)
    monkeypatch.setattr(commands, "configure_logging", lambda level, name: None)
    monkeypatch.setattr(commands, "shared_weights_directory", lambda: None)
    assert run(arguments_of(options, insecure=True, log_level="debug")) == 0
    assert made == [options]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    commands: list[tuple[str, ...]] = []

    def popen(command: tuple[str, ...]) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(pid=1, returncode=None)

    monkeypatch.setattr(successor, "subprocess", SimpleNamespace(Popen=popen))
    monkeypatch.delenv(SUCCESSOR_FILE, raising=False)
    return commands


def test_a_supervisor_is_left_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[tuple[str, ...]]
) -> None:
    file = tmp_path / "decoder-1.successor"
    monkeypatch.setenv(SUCCESSOR_FILE, str(file))
    succeed(None, PLAIN, insecure=False, log_level="info")
    assert read_word(file) is None, "it was told to end, and is started again"
    succeed(Drained(None), PLAIN, insecure=False, log_level="info")
    assert read_word(file) == Word(name="decoder-1", command=None)
    succeed(Drained(AS_PREFILLER), PLAIN, insecure=False, log_level="info")
    word = read_word(file)
    assert word is not None and word.name == "prefiller-1" and word.command is not None
    assert word.command[: len(HEADRACE) + 3] == (*HEADRACE, "prefiller", "--name", "prefiller-1")
    assert "--tpot-ms" not in word.command
    assert started == []


def test_alone_it_starts_its_successor_itself(started: list[tuple[str, ...]]) -> None:
    succeed(None, PLAIN, insecure=False, log_level="info")
    succeed(Drained(None), PLAIN, insecure=False, log_level="info")
    assert started == []
    succeed(Drained(AS_PREFILLER), PLAIN, insecure=True, log_level="info")
    ((*command,),) = started
    assert command[len(HEADRACE)] == "prefiller" and "--insecure" in command


def test_that_process_outlives_it(tmp_path: Path) -> None:
    """And no warning is written about it."""
    script = (
        "import subprocess; from headrace.cli import successor\n"
        "from headrace.roles.draining import Drained; from headrace.protocol.control import Successor\n"
        "from headrace.roles.options import InstanceOptions; from pathlib import Path\n"
        f"successor.HEADRACE = ({sys.executable!r}, '-c', 'import sys, time; time.sleep(0.2); print(sys.argv[1])')\n"
        "options = InstanceOptions(role='decoder', name='d', gateways=(), model_dir=Path(), model='m')\n"
        "after = Successor(role='prefiller', name='p', tpot_s=None, max_stall_s=None)\n"
        "successor.succeed(Drained(after), options, insecure=False, log_level='info')\n"
    )
    answer = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert (answer.stdout, answer.stderr, answer.returncode) == ("prefiller\n", "", 0)
