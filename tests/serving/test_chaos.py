"""`headrace chaos` against a deployment: some faults, each in a transfer. All of them in all states: `make chaos`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served import Served

pytestmark = [pytest.mark.serving, pytest.mark.timeout(240)]

TRANSPORT = "tcp"
FAULTS = ("link-cut", "page-corrupted", "write-lost", "prefiller-killed")
OPTIONS = ("--kv-memory", "48MiB", "--require-provider", TRANSPORT)


def test_links_memory_and_processes_fail_in_a_transfer_and_nobody_notices(smollm2: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    with Served(smollm2, *OPTIONS, log_level="debug") as served:
        command = [sys.executable, "-m", "headrace", "chaos", "--control", served.control, "--json", str(found)]
        command += ["--faults", ",".join(FAULTS), "--states", "transferring", "--rate", "2", "--prompt-tokens", "600"]
        chaos = subprocess.run(command, capture_output=True, text=True, timeout=200)
        print(chaos.stdout, chaos.stderr)
        assert chaos.returncode == 0, "something is wrong"
        cells = json.loads(found.read_text())["cells"]
        assert [cell["fault"] for cell in cells] == list(FAULTS)
        assert [cell["note"] for cell in cells] == [""] * len(FAULTS), "every one of them was made and noticed"
