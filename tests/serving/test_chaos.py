"""`headrace chaos` against a deployment: some faults, each in a transfer. All of them in all states: `make chaos`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served import Served

pytestmark = [pytest.mark.serving, pytest.mark.timeout(300)]

TRANSPORT = "tcp"
FAULTS = ("link-cut", "page-corrupted", "write-lost")
OPTIONS = ("--kv-memory", "24MiB", "--chunk-tokens", "64", "--require-provider", TRANSPORT)


def test_links_and_memory_fail_in_a_transfer_and_clients_notice_nothing(smollm2: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    with Served(smollm2, *OPTIONS, log_level="debug") as served:
        command = [sys.executable, "-m", "headrace", "chaos", "--control", served.control, "--json", str(found)]
        command += ["--faults", ",".join(FAULTS), "--states", "transferring", "--rate", "2", "--prompt-tokens", "400"]
        chaos = subprocess.run(command, capture_output=True, text=True, timeout=240)
        print(chaos.stdout, chaos.stderr)
        assert chaos.returncode == 0, "something is wrong"
        cells = json.loads(found.read_text())["cells"]
        assert [cell["fault"] for cell in cells] == list(FAULTS)
        assert [cell["note"] for cell in cells] == [""] * len(FAULTS), "every one of them was made and noticed"
