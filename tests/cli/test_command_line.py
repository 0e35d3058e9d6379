"""The command as a person runs it: what it says, where, how quickly, and with which exit status."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.cli import commands
from headrace.cli.app import run
from headrace.cli.supervisor import ChildEnded
from headrace.errors import FabricError, InputError

QUICK_S = 2.0

HEADRACE = (sys.executable, "-P", "-m", "headrace")


@pytest.fixture
def headrace(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # The stray module shows that the folder one stands in is not searched.
        (tmp_path / "typer.py").write_text("raise SystemExit('the wrong typer')")
        return subprocess.run(
            [*HEADRACE, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    return run


WRONG = [
    ("serve --page-size 0", "--page-size: must be a whole number from 1 to 1048576, is '0'"),
    ("serve --page-size=x", "--page-size: must be a whole number from 1 to 1048576, is 'x'"),
    ("serve --page-size", "option '--page-size' requires an argument"),
    ("serve --pagesize 16", "no such option: --pagesize; did you mean --page-size?"),
    ("serve --zzz", "no such option: --zzz"),
    ("serve now", "got unexpected extra argument(s) (now)"),
    ("server", "no such command 'server'. Did you mean 'serve'?"),
    ("serve --kv-memory lots", "--kv-memory: must be a size such as 512MiB, 2GB or 1073741824, is 'lots'"),
    ("serve --dtype fp16", "--dtype: must be bf16 or fp32, is 'fp16'"),
    ("serve --transfer some", "--transfer: must be layers or whole, is 'some'"),
    ("serve --port 65536", "--port: must be a whole number from 0 to 65535, is '65536'"),
    ("serve --host 192.0.2.1", "--host: must be an address of this machine, is '192.0.2.1'"),
    ("serve --prefillers 0", "--prefillers: must be a whole number from 1 to 256, is '0'"),
    ("serve --decoders -1", "--decoders: must be a whole number from 1 to 256, is '-1'"),
    ("serve --colocated --prefillers 2", "--prefillers: must be left out with --colocated"),
    ("serve --colocated --no-verify-kv", "--verify-kv: must be left out with --colocated"),
    ("serve --verify-kv=yes", "option '--verify-kv' does not take a value"),
    ("serve --transports mapped,sm2", "--transports: must be auto or a list such as mapped,tcp of mapped, shm, efa,"),
    ("serve --transports efa,tcp", "--transports: must be of what stays at 127.0.0.1 (mapped, shm, tcp), is efa"),
    ("serve --require-provider sm2", "--require-provider: must be mapped, shm, efa, verbs or tcp, is 'sm2'"),
    ("serve --transports tcp --require-provider mapped", "--require-provider: must be one of --transports (tcp), is"),
    ("serve --colocated --transports auto", "--transports: must be left out with --colocated"),
    (
        "serve --model nothing-here",
        "--model: must be an existing directory, a hub id (org/name), smollm2-135m-instruct or",
    ),
    ("serve --model ./nothing/here", "--model: must be an existing directory"),
    ("serve --model /dev/null", "--model: must be a directory in Hugging Face's form"),
    ("serve --log-level loud", "--log-level: must be debug, info, warning or error, is 'loud'"),
    ("gateway --model nothing-here", "--model: must be an existing directory"),
    ("gateway --control tcp://127.0.0.1:5555", "--control: tcp://127.0.0.1:5555 can be reached by others"),
    ("gateway --max-queued none", "--max-queued: must be a whole number from 1 to"),
    ("prefiller --model nothing-here", "--model: must be an existing directory"),
    ("prefiller --gateway nowhere", "--gateway: must be ipc://FILE or tcp://HOST:PORT, is 'nowhere'"),
    ("prefiller --fabric-host 0.0.0.0", "--fabric-host: must be the one address"),
    ("prefiller --fabric-host 127.0.0.1 --fabric-host 127.0.0.1", "--fabric-host: must name each address once"),
    ("prefiller --fabric-host ::1 --transports mapped", "--fabric-host: must be left out where mapped is all: no"),
    (
        "prefiller --require-provider verbs",
        "--require-provider: must be of what stays at 127.0.0.1 (mapped, shm, tcp), is",
    ),
    ("prefiller --verify-kv", "no such option: --verify-kv"),
    ("decoder --fabric-host 192.0.2.1", "--fabric-host: 192.0.2.1 can be reached by others"),
    ("decoder --colocated --verify-kv", "--verify-kv: must be left out with --colocated"),
    ("decoder --colocated --fabric-host ::1", "--fabric-host: must be left out with --colocated"),
    ("decoder --colocated --require-provider tcp", "--require-provider: must be left out with --colocated"),
    ("decoder --transports tcp,tcp", "--transports: must name each transport once, is 'tcp,tcp'"),
    ("decoder --transfer layers", "no such option: --transfer"),
    ("serve --tpot-ms 0", "--tpot-ms: must be a number of milliseconds, at most 600,000, is '0'"),
    ("decoder --tpot-ms soon", "--tpot-ms: must be a number of milliseconds, at most 600,000, is 'soon'"),
    ("serve --max-stall-ms=-5", "--max-stall-ms: must be a number of milliseconds, at most 600,000, is '-5'"),
    ("decoder --max-stall-ms nan", "--max-stall-ms: must be a number of milliseconds, at most 600,000, is 'nan'"),
    ("prefiller --tpot-ms 50", "no such option: --tpot-ms"),
    ("prefiller --max-stall-ms 50", "no such option: --max-stall-ms"),
    ("drain", "instance: must be given"),
    ("role decoder-1", "role: must be given"),
]


@pytest.mark.parametrize(("arguments", "line"), WRONG)
def test_a_wrong_option_is_one_line_and_status_2(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(commands, "configure_logging", lambda level, name: None)
    assert run(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headrace: error: {line}"), err
    assert err.count("\n") == 1 and err.endswith("\n")


@pytest.mark.parametrize(("arguments", "line"), WRONG[::8])
def test_the_process_says_and_ends_the_same(
    headrace: Callable[..., subprocess.CompletedProcess[str]], arguments: str, line: str
) -> None:
    answer = headrace(*arguments.split())
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"headrace: error: {line}"), answer.stderr
    assert answer.stderr.count("\n") == 1 and answer.stderr.endswith("\n")


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_a_port_in_use_is_one_line_before_anything_is_started_or_fetched(
    headrace: Callable[..., subprocess.CompletedProcess[str]], command: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answer = headrace(command, "--port", str(port))
    assert answer.returncode == 2
    assert answer.stderr == (
        f"headrace: error: --port: 127.0.0.1:{port} is in use; another one, or 0 for any that is free\n"
    )


@pytest.mark.timing
@pytest.mark.parametrize("arguments", ["serve --model nothing-here", "decoder --help"])
def test_errors_and_help_are_quick(headrace: Callable[..., subprocess.CompletedProcess[str]], arguments: str) -> None:
    headrace(*arguments.split())  # reads the files once
    began = time.monotonic()
    headrace(*arguments.split())
    assert time.monotonic() - began < QUICK_S


def test_the_command_line_loads_neither_torch_nor_a_role() -> None:
    heavy = ["torch", "transformers", "zmq", "starlette", "numpy", "headrace.fabric._native", "headrace.roles.decoder"]
    script = f"import sys, headrace.cli.app; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


@pytest.mark.parametrize("arguments", ["--help", "gateway -h", "prefiller --help"])
def test_help_goes_to_stdout(headrace: Callable[..., subprocess.CompletedProcess[str]], arguments: str) -> None:
    answer = headrace(*arguments.split())
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "Usage: headrace" in answer.stdout


def test_help_names_every_option_of_serve_with_its_default(
    headrace: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    text = " ".join(headrace("serve", "--help").stdout.replace("│", " ").split())
    options = (
        "model prefillers decoders colocated transfer page-size chunk-tokens max-running tpot-ms max-stall-ms "
        "kv-memory threads transports require-provider host port"
    )
    for option in options.split():
        assert f"--{option} " in text
    assert "--verify-kv --no-verify-kv" in text
    for default in ("smollm2-135m-instruct", "(512MiB)", "(layers)", "8000", "bf16"):
        assert f"[default: {default}]" in text


def test_without_a_command_its_help_is_shown(headrace: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    answer = headrace()
    assert (answer.returncode, answer.stderr) == (2, "")
    assert "Usage: headrace" in answer.stdout


def test_the_version_is_the_packages(headrace: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    answer = headrace("--version")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "headrace 0.1.0\n", "")


def test_the_installed_command_is_the_same() -> None:
    script = Path(sys.executable).with_name("headrace")
    answer = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout == "headrace 0.1.0\n"


# ---- errors from inside ----------------------------------------------------------------------------------------


class Failing:
    """`serve` raises what the test puts here."""

    error: BaseException = KeyboardInterrupt()

    def __call__(self, options: object) -> bool:
        raise self.error


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    failing = Failing()
    monkeypatch.setattr(commands, "serve", failing)
    monkeypatch.setattr(commands, "configure_logging", lambda level, name: None)
    return failing


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("page_size", "must be 16"), 2, "--page-size: must be 16"),
        (InputError("kv_memory", "must hold a page"), 2, "--kv-memory: must hold a page"),
        (InputError("XDG_RUNTIME_DIR", "must be a folder"), 2, "XDG_RUNTIME_DIR: must be a folder"),
        (InputError("model", "two\nlines"), 2, "--model: two lines"),
        (FabricError("fi_getinfo", 61, "No data available"), 1, "fi_getinfo: No data available (61)"),
        (OSError(12, "Cannot allocate memory"), 1, "[Errno 12] Cannot allocate memory"),
        (ChildEnded("decoder-0: --threads: must be few", status=2), 2, "decoder-0: --threads: must be few"),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [InputError("port", "is in use")])]), 2, "--port: is in use"),
    ],
)
def test_an_expected_error_is_one_line(
    failing: Failing, capsys: pytest.CaptureFixture[str], error: Exception, status: int, line: str
) -> None:
    failing.error = error
    assert run(["serve"]) == status
    assert capsys.readouterr() == ("", f"headrace: error: {line}\n")


@pytest.mark.parametrize(
    "error", [RuntimeError("a mistake"), ExceptionGroup("tasks", [InputError("port", "x"), RuntimeError("a mistake")])]
)
def test_our_own_mistake_keeps_its_traceback(failing: Failing, error: Exception) -> None:
    failing.error = error
    with pytest.raises(type(error)):
        run(["serve"])


def test_at_debug_the_traceback_is_logged(
    failing: Failing, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    failing.error = InputError("port", "is in use")
    with caplog.at_level("DEBUG", "headrace"):
        run(["serve"])
    assert caplog.records[0].exc_info is not None
    assert capsys.readouterr().err == "headrace: error: --port: is in use\n"


def test_ctrl_c_before_anything_runs_is_130_and_silent(failing: Failing, capsys: pytest.CaptureFixture[str]) -> None:
    failing.error = KeyboardInterrupt()
    assert run(["serve"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_supervised_process_leaves_its_last_words_to_the_supervisor(
    failing: Failing, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_ERROR_FILE", str(tmp_path / "words"))
    failing.error = InputError("page_size", "must be 16")
    assert run(["serve"]) == 2
    assert (tmp_path / "words").read_text() == "--page-size: must be 16"
    assert capsys.readouterr() == ("", "")
