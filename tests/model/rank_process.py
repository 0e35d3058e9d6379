"""Ranks of one instance as processes of their own: `python rank_process.py MEETING_POINT RANK SIZE ACT`.

ACT is `exchange` (every call of `Ranks`, results as JSON) or `meet`: one call, then nothing until it is killed.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

from headrace.model.gloo_ranks import GlooRanks


def start(meeting_point: Path, rank: int, size: int, act: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(meeting_point), str(rank), str(size), act]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@torch.inference_mode()
def exchanged(ranks: GlooRanks) -> dict[str, object]:
    """Numbers that tell who sent them."""
    told: dict[str, object] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        for num_rows in (3, 0):
            x = torch.full((num_rows, 2), 10 + ranks.rank, dtype=dtype)
            told[f"gathered {dtype} {num_rows}"] = [part.tolist() for part in ranks.all_gather(x)]
            ranks.all_reduce(x)
            told[f"summed {dtype} {num_rows}"] = x.tolist()
        for others in (2, 0):
            parts = [torch.full((others * ranks.rank, 3), 10 * ranks.rank + to).to(dtype) for to in range(ranks.size)]
            told[f"dealt {dtype} {others}"] = [part.tolist() for part in ranks.all_to_all(parts)]
        flat = [torch.arange(ranks.rank + to).to(dtype) for to in range(ranks.size)]
        told[f"dealt flat {dtype}"] = [part.tolist() for part in ranks.all_to_all(flat)]
    return told


def main(meeting_point: str, rank: str, size: str, act: str) -> None:
    ranks = GlooRanks(Path(meeting_point), rank=int(rank), size=int(size), timeout_s=60)
    if act == "exchange":
        print(json.dumps(exchanged(ranks)))
    else:
        ranks.all_reduce(torch.ones(4))
        input()


if __name__ == "__main__":
    main(*sys.argv[1:])
