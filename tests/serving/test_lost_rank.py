"""Instances of several ranks in whole deployments: a lost rank costs only time. In fp32, text is transformers'."""

import os
import random
import signal
from pathlib import Path

import pytest
from oracle import Oracle
from served import Served
from tiny_qwen import write_qwen

pytestmark = [pytest.mark.serving, pytest.mark.timeout(120)]

OPTIONS = ("--dtype", "fp32", "--chunk-tokens", "64", "--kv-memory", "16MiB", "--page-size", "8")


def ranks_of(pid: int) -> list[int]:
    """The processes that an instance has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_stream_whose_decoder_loses_a_rank_goes_on_elsewhere_and_the_instance_starts_again(tmp_path: Path) -> None:
    prompt = random.Random(61).choices(range(256), k=20)
    directory = write_qwen(tmp_path)
    with Served(directory, *OPTIONS, "--colocated", "--decoders", "2", "--decoder-tp", "2") as served:
        pids = {name: pid for name, pid in served.pids().items() if name != "gateway"}
        ranks = {name: ranks_of(pid) for name, pid in pids.items()}
        assert all(len(others) == 1 for others in ranks.values())
        token_ids: list[int] = []
        with served.client() as client:
            for chunk in client.completions.create(**served.request(prompt, 120), stream=True):
                if not token_ids:  # nobody goes on until it is known who serves it
                    for (rank,) in ranks.values():
                        os.kill(rank, signal.SIGSTOP)
                    busy = kill_the_busy_one(served, ranks)
                token_ids += [] if not chunk.choices else chunk.choices[0].model_extra["token_ids"]
        assert len(token_ids) == 120
        judged = Oracle(directory).judge(prompt, token_ids)
        assert judged.is_clear and judged.is_right
        said = f"{busy}: rank 1 of 2 (process {ranks[busy][0]}) was ended by SIGKILL; it starts again in 1 s"
        served.wait_until(lambda: said in served.log(), "it was said")
        served.wait_until(lambda: served.log().count(f"{busy} is here") == 2, "it is back", 30)


def kill_the_busy_one(served: Served, ranks: dict[str, list[int]]) -> str:
    """-> which instance that was."""
    running = {name: (name, "running") for name in ranks}
    served.wait_until(lambda: sum(served.gauges()[key] for key in running.values()) == 1, "it runs on one of them")
    gauges = served.gauges()
    busy = max(running, key=lambda name: gauges[running[name]])
    for name, (rank,) in ranks.items():
        os.kill(rank, signal.SIGKILL if name == busy else signal.SIGCONT)
    return busy
