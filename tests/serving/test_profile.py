"""`headrace profile`, with all of its processes, as short as it can be."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from headrace.planner.profile import read_profile, scenario_of

pytestmark = pytest.mark.serving

COMMAND = [sys.executable, "-P", "-m", "headrace", "profile"]


def test_a_profile_tells_what_steps_take_that_it_was_not_fitted_to(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    words = [*COMMAND, "--seconds", "8", "--kv-memory", "128MiB", "--out", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert f"written to {file}" in done.stdout and "split 1:1: 8 s of load" in done.stderr
    profile = read_profile(file)
    assert set(profile.steps) == {"colocated", "prefiller", "decoder"}
    for steps in profile.steps.values():
        assert steps.num_steps >= 10 and steps.error_p50 < 0.5  # loose: machines are noisy
    assert all(steps.token_s + steps.pair_s > 0 for steps in profile.steps.values())
    assert 0 < profile.gateway_s < 0.1 and profile.hand_over_s < 0.5
    assert len(scenario_of(profile, prefillers=1, decoders=1).instances) == 2


def test_ctrl_c_ends_it_and_writes_nothing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-") as runtime:  # a socket's path has a most
        environment = {**os.environ, "XDG_RUNTIME_DIR": runtime}
        words = [*COMMAND, "--out", str(tmp_path / "profile.json")]
        running = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 60
        while not list(Path(runtime).rglob("log")) and time.monotonic() < until and running.poll() is None:
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
        assert running.returncode == 130 and "interrupted; nothing was written" in said
        assert not list(tmp_path.iterdir()) and not list(Path(runtime).rglob("log"))
