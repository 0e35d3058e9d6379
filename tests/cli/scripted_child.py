"""A child for the supervisor's tests, run as a script: DIRECTORY NAME BEHAVIOUR. Each life adds to NAME.pids."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DIRECTORY, NAME, BEHAVIOUR = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


def note(suffix: str, text: str) -> None:
    with (DIRECTORY / f"{NAME}.{suffix}").open("a") as file:
        file.write(f"{text}\n")


def end(number: int, _frame: object) -> None:
    note("signals", signal.Signals(number).name)
    sys.exit(0)


def stay() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    note("pids", str(os.getpid()))
    while True:
        time.sleep(60)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("pids", str(os.getpid()))
    time.sleep(60)


def linger() -> None:
    """Takes a while to end, and does so cleanly."""

    def end_slowly(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(0.3)
        end(number, frame)

    signal.signal(signal.SIGTERM, end_slowly)
    note("pids", str(os.getpid()))
    time.sleep(60)


def have_grandchild() -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)"
    grandchild = subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep(60)"], stdout=subprocess.PIPE)
    assert grandchild.stdout is not None
    grandchild.stdout.readline()
    note("grandchildren", str(grandchild.pid))
    stay()


def leave_word(command: list[str] | None, name: str = NAME) -> None:
    """As a drained instance does."""
    note("pids", str(os.getpid()))
    Path(os.environ["HEADRACE_SUCCESSOR_FILE"]).write_text(json.dumps({"name": name, "command": command}))


def be_drained() -> None:
    leave_word(None)


def become_another() -> None:
    leave_word([sys.executable, "-S", __file__, str(DIRECTORY), f"{NAME}-after", "kill_itself"], f"{NAME}-after")


def fail_with_words() -> None:
    note("pids", str(os.getpid()))
    Path(os.environ["HEADRACE_ERROR_FILE"]).write_text("--page-size: must be small")
    sys.exit(2)


def fail_with_words_once() -> None:
    if (DIRECTORY / f"{NAME}.pids").exists():
        kill_itself()
    fail_with_words()


def fail_first(num_failures: int) -> None:
    """Ends with 3 in its first lives."""
    pids = DIRECTORY / f"{NAME}.pids"
    if pids.exists() and len(pids.read_text().split()) >= num_failures:
        stay()
    note("pids", str(os.getpid()))
    sys.exit(3)


def kill_itself() -> None:
    note("pids", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


match BEHAVIOUR.partition(":"):
    case ("fail_first", _, number):
        fail_first(int(number))
    case (name, _, _):
        globals()[name]()
