"""Ranks of one instance as processes of their own: `python rank_process.py MEETING_POINT RANK SIZE ACT`.

ACT is `meet` (one call, then nothing until it is killed) or the directory of a model: every call of `Ranks`, results as
JSON, then steps of the model, with one group of all ranks, then with a group for each.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

from headrace.model.batch import Batch, Row
from headrace.model.gloo_ranks import GlooRanks
from headrace.model.parallel import Parallel
from headrace.model.ranks import OneRank, Ranks
from headrace.model.weights import load_model

TOKENS = list(range(40, 80, 2))


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


def computed(parallel: Parallel, directory: Path) -> torch.Tensor:
    """Logits of a prompt and of two tokens more, `[3, V]`, on the ranks of the first group; others have no tokens."""
    model = load_model(directory, dtype="fp32", parallel=parallel)
    layout = model.shape.kv_layout(16, "fp32")
    views = [torch.zeros(2, *layout.page_shape) for _ in range(layout.num_layers)]
    logits = []
    for begin, end in ((0, 18), (18, 19), (19, 20)):
        row = Row(token_ids=TOKENS[begin:end], begin=begin, page_table=[1, 0], wants_logits=True)
        rows = [row] if parallel.shard.group == 0 else []
        batch = Batch.of(rows, page_size=16, num_pages=2, vocab_size=model.shape.vocab_size)
        logits.append(model.forward(batch, views))
    return torch.cat(logits)


def computed_both_ways(ranks: Ranks, directory: Path) -> list[torch.Tensor]:
    return [computed(Parallel(group=group, everyone=ranks), directory) for group in (ranks, OneRank())]


def main(meeting_point: str, rank: str, size: str, act: str) -> None:
    ranks = GlooRanks(Path(meeting_point), rank=int(rank), size=int(size), timeout_s=60)
    if act == "meet":
        ranks.all_reduce(torch.ones(4))
        input()
    else:
        print(json.dumps(exchanged(ranks)))
        computed_both_ways(ranks, Path(act))


if __name__ == "__main__":
    main(*sys.argv[1:])
