"""A rank process by itself, whose lead is the test."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import CONFIG

from headrace.engine.step_memory import StepLimits
from headrace.model.shape import ModelShape
from headrace.roles.options import InstanceOptions
from headrace.roles.pool_plan import plan_pool
from headrace.roles.ranks.messages import Failed, RankTask, receive, send


def test_what_the_system_refuses_a_rank_its_lead_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = InstanceOptions(role="decoder", name="d", gateways=(), model_dir=tmp_path, model="m", tp=2)
    layout, longest = plan_pool(ModelShape.from_config(CONFIG), options)
    limits = StepLimits.of(chunk_tokens=1, max_running=1, max_model_len=longest, page_size=options.page_size)
    task = RankTask(
        options=options, rank=1, fingerprint="f", layout=layout, limits=limits, meeting_points=str(tmp_path)
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heard, beaten = os.pipe()
    no_memory = os.open("/dev/null", os.O_RDWR)
    descriptors = {"--lead-fd": theirs.fileno(), "--pulse-fd": beaten, "--steps-fd": no_memory}
    words = [word for name, number in descriptors.items() for word in (name, str(number))]
    command = (sys.executable, "-P", "-m", "headrace", "rank", "--name", "d/1", "--log-level", "info", *words)
    with subprocess.Popen((*command, "--lead-pid", str(os.getpid())), pass_fds=descriptors.values()) as process:
        with theirs, ours:
            send(ours, task)
            theirs.close()
            told = receive(ours)
            process.kill()
        for each in (heard, beaten, no_memory):
            os.close(each)
    assert isinstance(told, Failed) and "No such device" in told.text, told
    assert capfd.readouterr() == ("", "")
