"""Instances of several ranks in whole deployments: KV travels between any degrees, and a lost rank costs only time.

In fp32; what is written is transformers' text. Over four ranks each of the tiny Qwen3's two KV heads is on two of them;
the tiny DeepSeek's latents are on all ranks of a prefiller, and each group of its decoder takes them from one.
"""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from oracle import Oracle
from served import Served
from tiny_deepseek import write_deepseek
from tiny_qwen import write_qwen

pytestmark = [pytest.mark.serving, pytest.mark.timeout(120)]

OPTIONS = ("--dtype", "fp32", "--chunk-tokens", "64", "--kv-memory", "16MiB", "--page-size", "8")
LENGTHS = (2, 60, 100, 180)
NUM_TOKENS = 24


Degrees = tuple[int, int, int]
"""tp of the prefiller, tp of the decoder, and its dp."""

OF_QWEN: list[Degrees] = [(1, 2, 1), (2, 1, 1), (4, 2, 1)]
OF_DEEPSEEK: list[Degrees] = [(2, 1, 2)]
if os.environ.get("HEADRACE_TRANSPORTS"):  # the whole matrix, which takes minutes
    OF_QWEN = [(here, there, 1) for here in (1, 2, 4) for there in (1, 2, 4)]
    OF_DEEPSEEK = [(here, 1, there) for here in (1, 2, 4) for there in (1, 2)]


@pytest.mark.parametrize(
    ("write", "degrees"),
    [
        *(pytest.param(write_qwen, degrees, id=f"heads {degrees}") for degrees in OF_QWEN),
        *(pytest.param(write_deepseek, degrees, id=f"latents {degrees}") for degrees in OF_DEEPSEEK),
    ],
)
def test_text_is_transformers_whatever_the_degrees(
    write: Callable[[Path], Path], degrees: Degrees, tmp_path: Path, transport: str
) -> None:
    directory = write(tmp_path)
    prefiller_tp, decoder_tp, decoder_dp = map(str, degrees)
    ranks = ("--prefiller-tp", prefiller_tp, "--decoder-tp", decoder_tp, "--decoder-dp", decoder_dp)
    prompts = [random.Random(length).choices(range(256), k=length) for length in LENGTHS]
    with Served(directory, *OPTIONS, *ranks, "--require-provider", transport) as served:
        texts = served.complete_all(prompts, NUM_TOKENS, at_once=len(prompts))
        again = served.complete(prompts[-1], NUM_TOKENS)
        served.wait_idle()
        gauges = served.gauges()
    judged = Oracle(directory).judge_all(prompts, [text.token_ids for text in texts])
    assert [length for length, each in zip(LENGTHS, judged, strict=True) if each.is_clear and not each.is_right] == []
    assert sum(each.is_clear for each in judged) >= 3, "too many prompts were left out"
    assert again.token_ids == texts[-1].token_ids
    assert gauges["decoder-0", "prefill_tokens_total"] == 0
    assert gauges["decoder-0", "tickets_ready_total"] >= len(LENGTHS)
    assert gauges["decoder-0", "wrong_bytes_total"] == 0
    sent = [gauges["prefiller-0", f"kv_bytes_sent_rank{rank}_total"] for rank in range(degrees[0])]
    print(f"{degrees} over {transport}: bytes by rank {sent}")
    if write is write_qwen and degrees[0] <= 2:  # without replicas, which take turns by request
        assert len(set(sent)) == 1 and sent[0] > 0, sent


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
