"""Bit by bit, over several ranks too: a row's results are its own, whatever is computed beside it, and groups that
share experts compute what one rank does."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import saved
from llama_oracle import Oracle, PagedLlama, random_tokens
from native_worlds import needs_kernels, zeros
from thread_ranks import in_ranks

from headrace.model import _cpu
from headrace.model.checkpoint import read_shape
from headrace.model.native_ops import NativeOps
from headrace.model.parallel import ALONE, Parallel
from headrace.model.weights import load_model

pytestmark = needs_kernels

ONE, OTHER = random_tokens(30, seed=1), random_tokens(40, seed=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    oracle = Oracle("Qwen3-MoE: a dense layer among sparse ones", head_dim=32)
    return saved(oracle, tmp_path_factory.mktemp("experts"))


@contextmanager
def native(directory: Path, parallel: Parallel) -> Iterator[PagedLlama]:
    with closing(_cpu.Kernels(_cpu.instruction_sets()[0], (), 1)) as kernels:
        ops = NativeOps(parallel.shard.of(read_shape(directory)), kernels, zeros)
        yield PagedLlama(load_model(directory, dtype="bf16", ops=ops, parallel=parallel), dtype="bf16")


def test_a_row_of_a_group_is_alone_with_its_results(directory: Path) -> None:
    def act(parallel: Parallel) -> bool:
        with native(directory, parallel) as paged:
            alone, beside, other = paged.sequence(ONE), paged.sequence(ONE), paged.sequence(OTHER)
            paged.step((alone, 29))
            paged.step((other, 21), (beside, 12))
            paged.step((beside, 17), (other, 18))
            return torch.equal(paged.step((alone, 1))[0], paged.step((other, 1), (beside, 1))[1])

    assert in_ranks(act, tp=4) == [True] * 4


@pytest.mark.parametrize("tp", [1, 2])
def test_groups_compute_bit_by_bit_what_one_does(tp: int, directory: Path) -> None:
    """Of one rank where it has no others; the second has three steps without tokens."""

    def logits_of(paged: PagedLlama, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
        sequence = paged.sequence(token_ids)
        return torch.cat([paged.step(*([(sequence, chunk)] if chunk else [])) for chunk in chunks])

    def act(parallel: Parallel) -> torch.Tensor:
        with native(directory, parallel) as paged:
            if parallel.shard.rank < tp:
                return logits_of(paged, ONE, [9, 19, 1, 1])
            return logits_of(paged, OTHER, [0, 40, 0, 0])

    def alone(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        with native(directory, parallel) as paged:
            return logits_of(paged, ONE, [28, 1, 1]), logits_of(paged, OTHER, [40])

    one, other = alone(ALONE)
    for rank, logits in enumerate(in_ranks(act, dp=2, tp=tp)):
        expected = one if rank < tp else other
        if tp == 1:
            assert torch.equal(logits[-len(expected) :], expected)
        else:  # sums over two ranks round otherwise
            torch.testing.assert_close(logits[-len(expected) :], expected, rtol=0.1, atol=0.1)
