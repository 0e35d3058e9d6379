"""`headrace compare`, with all of its processes, as short as it can be."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = pytest.mark.serving

COMMAND = [sys.executable, "-P", "-m", "headrace", "compare"]
SHORT = [
    *("--workload", "short", "--rates", "4", "--seconds", "2", "--repetitions", "1", "--chunks", "64"),
    *("--ttft-ms", "2000", "--tpot-ms", "500", "--max-output-tokens", "8", "--kv-memory", "64MiB"),
]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def left_of(directory: Path) -> list[str]:
    """Processes that still serve from there."""
    told = [Path(f"/proc/{pid}/environ") for pid in os.listdir("/proc") if pid.isdecimal()]
    mine = f"XDG_RUNTIME_DIR={directory}".encode()
    return [str(file) for file in told if _has(file, mine)]


def _has(file: Path, mine: bytes) -> bool:
    try:
        return mine in file.read_bytes()
    except OSError:
        return False


def test_a_comparison_that_is_interrupted_goes_on_where_it_was(tmp_path: Path, stack: ExitStack) -> None:
    runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-"))  # a socket's path has a most
    environment = {**os.environ, "XDG_RUNTIME_DIR": runtime}
    out = tmp_path / "out"
    words = [*COMMAND, *SHORT, "--out", str(out)]
    running = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 90
    while not list(out.rglob("runs/**/*.jsonl")) and time.monotonic() < until and running.poll() is None:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130 and "interrupted; to go on: headrace compare" in said and "--resume" in said
    assert left_of(Path(runtime)) == []
    kept = {file: file.stat().st_mtime_ns for file in out.rglob("runs/**/*.jsonl")}
    assert len(kept) == 1
    done = subprocess.run(
        [*words, "--resume"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(file.stat().st_mtime_ns == told for file, told in kept.items())  # read, not made again
    report = json.loads((out / "report.json").read_text())
    names = [arm["name"] for arm in report["comparison"]["arms"]]
    assert (
        names == ["colocated, chunk 64", "split 1:1, local prefill", "split 1:1"] and report["comparison"]["is_whole"]
    )
    runs = report["evidence"]["runs"]
    assert {run["arm"] for run in runs} == set(names) and len({run["digest"] for run in runs}) == 1
    assert all(run["classes"]["all"]["num_failed"] == 0 for run in runs)
    split = next(run for run in runs if run["arm"] == "split 1:1")
    assert split["facts"]["kv_bytes"] > 0 and split["classes"]["all"]["waterfall"]["prefill_s"] > 0
    assert left_of(Path(runtime)) == []
    other = subprocess.run(
        [*words, "--resume", "--seed", "7"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert other.returncode == 2 and "whose seed is another one" in other.stderr
    again = subprocess.run([*COMMAND, "--recheck", str(out)], capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0 and "what the records say" in again.stdout
