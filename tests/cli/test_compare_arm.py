"""An arm as processes, where those are stand-ins: what the comparison hears when one of them ends."""

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.compare import running
from headrace.cli.compare.arms import ArmPlan, Served, colocated_arm
from headrace.cli.compare.running import ArmFailed, RunningArm, started

SERVED = Served(
    model_dir=Path("/models/tiny"), dtype="bf16", cpus=(0,), kv_memory_bytes=1, max_running=1, prefill_chunk_tokens=64
)
GATEWAY = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'headrace_instances_alive{role="colocated"} 1.0\\n'
                         b'headrace_instance_kv_bytes_sent_rank0_total{instance="a",role="prefiller"} 5.0\\n'
                         b'headrace_instance_kv_bytes_sent_rank0_total{instance="b",role="prefiller"} 7.0\\n')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
STAYS = "import time; time.sleep(60)"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArmPlan]:
    with tempfile.TemporaryDirectory(prefix="headrace-") as short:  # a socket's path has a most
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield from _plan(monkeypatch)


def _plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArmPlan]:
    monkeypatch.setattr(running, "gateway_command", lambda *_, port, **__: (sys.executable, "-c", GATEWAY, str(port)))
    stands_in(monkeypatch, STAYS)
    yield colocated_arm(SERVED, 64)


def stands_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(running, "instance_command", lambda *_, **__: (sys.executable, "-c", code))


async def entered(plan: ArmPlan, inside: float = 0.0) -> tuple[RunningArm, dict[str, float], dict[str, float]]:
    async with started(plan, SERVED) as arm:
        await asyncio.sleep(inside)
        return arm, await arm.counters(), arm.memory()


def test_an_arm_is_ready_when_it_is_entered_and_ended_when_it_is_left(plan: ArmPlan) -> None:
    arm, counters, memory = asyncio.run(entered(plan))
    assert counters == {"kv_bytes_sent_rank0_total": 12.0}
    assert memory["memory_unique_bytes"] > 1e6 and memory["memory_proportional_bytes"] > memory["memory_unique_bytes"]
    assert set(arm.pids) == {"gateway", "colocated-0"}
    assert not [pid for pid in arm.pids.values() if Path(f"/proc/{pid}").exists()]


def test_an_instance_that_ends_ends_the_arm_with_its_last_words(plan: ArmPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    stands_in(monkeypatch, "import time; print('out of water', flush=True); time.sleep(1.0); raise SystemExit(3)")
    with pytest.raises(ArmFailed, match="colocated-0 ended with status 3:\n  .*out of water"):
        asyncio.run(entered(plan, inside=30.0))


def test_an_instance_that_does_not_come_up_is_told_by_its_arm(plan: ArmPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "READY_S", 0.3)
    monkeypatch.setattr(running, "gateway_command", lambda *_, **__: (sys.executable, "-c", STAYS))
    with pytest.raises(ArmFailed, match="colocated, chunk 64 was not ready within 0 s"):
        asyncio.run(entered(plan))
