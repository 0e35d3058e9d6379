"""Ranks in processes of their own: what each hears, in every dtype and for no rows too, and what a dead one does."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import rank_process
import torch
from checkpoints import saved
from llama_oracle import Oracle

from headrace.model.gloo_ranks import GlooRanks
from headrace.model.parallel import ALONE


@dataclass(frozen=True, kw_only=True)
class Two:
    """What came of the acts of two processes, of which this is one."""

    exchanged: list[dict[str, object]]
    computed: list[torch.Tensor]
    expected: torch.Tensor


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    directory = tmp_path_factory.mktemp("model")
    saved(Oracle("Qwen3-MoE: a dense layer among sparse ones"), directory)
    with rank_process.start(directory / "meet", 1, 2, str(directory)) as other:
        expected = rank_process.computed(ALONE, directory)
        ranks = GlooRanks(directory / "meet", rank=0, size=2, timeout_s=60)
        own = rank_process.exchanged(ranks)
        computed = rank_process.computed_both_ways(ranks, directory)
        others = json.loads(other.communicate(timeout=60)[0])
    return Two(exchanged=[own, others], computed=computed, expected=expected)


def test_every_call_brings_each_rank_what_the_others_had_for_it(two: Two) -> None:
    for rank, told in enumerate(two.exchanged):
        for dtype in ("torch.bfloat16", "torch.float32", "torch.int64"):
            assert told[f"gathered {dtype} 3"] == [[[10, 10]] * 3, [[11, 11]] * 3]
            assert told[f"gathered {dtype} 0"] == [[], []]
            assert told[f"summed {dtype} 3"] == [[21, 21]] * 3
            assert told[f"summed {dtype} 0"] == []
            assert told[f"dealt {dtype} 2"] == [[], [[10 + rank] * 3] * 2]
            assert told[f"dealt {dtype} 0"] == [[], []]
            assert told[f"dealt flat {dtype}"] == [list(range(rank)), list(range(1 + rank))]


def test_a_model_over_processes_computes_what_one_does(two: Two) -> None:
    """Its heads cut, then its experts alone, with a rank that has no tokens."""
    for logits in two.computed:
        assert float((logits - two.expected).abs().max()) < 1e-4 * float(two.expected.abs().max())


def test_a_rank_that_dies_ends_what_the_others_wait_for(tmp_path: Path) -> None:
    with rank_process.start(tmp_path / "meet", 1, 2, "meet") as other:
        ranks = GlooRanks(tmp_path / "meet", rank=0, size=2, timeout_s=60)
        ranks.all_reduce(torch.ones(4))
        other.kill()
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            ranks.all_reduce(torch.ones(4))
    assert time.monotonic() - begin < 30


def test_a_rank_that_leaves_ends_it_too(tmp_path: Path) -> None:
    def met(rank: int) -> GlooRanks:
        return GlooRanks(tmp_path / "meet", rank=rank, size=2, timeout_s=60)

    with ThreadPoolExecutor(2) as threads:
        stays, leaves = threads.map(met, range(2))
    leaves.close()
    leaves.close()
    with pytest.raises(RuntimeError):
        stays.all_gather(torch.ones(4))


def test_ranks_that_do_not_come_are_an_error_after_the_time_out(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        GlooRanks(tmp_path / "meet", rank=0, size=2, timeout_s=0.2)
    assert time.monotonic() - begin < 30


def test_an_element_is_summed_in_order_of_rank_wherever_it_stands(tmp_path: Path) -> None:
    """In fp32 the order of three shows."""
    torch.manual_seed(0)
    parts = torch.randn(3, 1000)
    expected = parts[0] + parts[1] + parts[2]
    assert not torch.equal(expected, parts[0] + (parts[1] + parts[2]))

    def summed(rank: int) -> torch.Tensor:
        ranks = GlooRanks(tmp_path / "meet", rank=rank, size=3, timeout_s=60)
        x = parts[rank].clone()
        ranks.all_reduce(x)
        return x

    with ThreadPoolExecutor(3) as threads:
        assert all(torch.equal(x, expected) for x in threads.map(summed, range(3)))
