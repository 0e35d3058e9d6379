"""The command as a person runs it, on a tiny model: real processes, real streams, and no process left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from profiled_model import weight_bytes, write_model

from headrace.cli.profile_step.report import NAMES

Started = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("profiled"))


@pytest.fixture
def started(model: Path, short_path: Path) -> Started:
    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace", "profile-step", "--model", str(model), *words],
            env={**os.environ, "XDG_RUNTIME_DIR": str(short_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def processes_of(directory: Path) -> list[str]:
    """Command lines that name the run directory."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue  # it has ended
        if str(directory) in line:
            found.append(line)
    return found


@pytest.mark.timing
def test_a_profile_tells_where_the_time_of_its_steps_went(started: Started, tmp_path: Path, short_path: Path) -> None:
    file = tmp_path / "profile.json"
    process = started("--streams", "1,3", "--kv-len", "50", "--steps", "12", "--json", str(file))
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert "| linear layers " in out and "from step to step" in out
    profile = json.loads(file.read_text())
    assert profile["weight_bytes"] == weight_bytes()
    assert [one["num_streams"] for one in profile["streams"]] == [1, 3]
    for one in profile["streams"]:
        assert set(one["parts"]) == set(NAMES) and one["num_steps"] == 12
        assert sum(part["share"] for part in one["parts"].values()) == pytest.approx(1)
        assert all(part["ms"]["median"] > 0 for part in one["parts"].values())
        # A client's tokens come as often as steps are made; the median of a few steps on a busy machine is rough.
        assert one["itl_ms"]["median"] == pytest.approx(one["step_ms"]["median"], rel=0.8)
        assert one["gateway_cpu_ms"] > 0
    token_bytes = 2 * 2 * 32 * 2
    first, second = (one["key_bytes"] / one["num_streams"] / token_bytes for one in profile["streams"])
    assert 50 < first < 90 and 50 < second < 150
    assert processes_of(short_path) == []


def test_ctrl_c_ends_it_and_all_that_it_started(started: Started, short_path: Path) -> None:
    process = started("--streams", "2", "--kv-len", "50", "--steps", "700")
    until = time.monotonic() + 40
    while not any("profile_step.client" in line for line in processes_of(short_path)):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert process.returncode == 130
    assert error == ""
    assert processes_of(short_path) == [] and not list(short_path.rglob("*.sock"))
