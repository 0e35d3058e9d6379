"""Models over several ranks compute what one rank does, which is what transformers does: heads, MLP and vocabulary cut
in a group, experts over all ranks, groups with tokens of their own or none. Loaded from a checkpoint, each its part."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from checkpoints import saved
from fp8_blocks import quantise
from gemma3_oracle import Gemma3Oracle
from llama_oracle import VARIANTS, Oracle, PagedLlama, random_tokens
from safetensors import safe_open
from thread_ranks import Meeting, ThreadRanks, in_ranks

from headrace.model import qwen3_moe, weights
from headrace.model.checkpoint import read_shape
from headrace.model.expert_fields import Experts
from headrace.model.expert_mlp import SoftmaxRouter
from headrace.model.expert_ranks import expert_mlp
from headrace.model.llama import GatedMlp
from headrace.model.parallel import ALONE, Parallel
from headrace.model.torch_ops import TorchGatedLinear, TorchLinear
from headrace.model.weights import load_model

MOE = "Qwen3-MoE: a dense layer among sparse ones"
V2 = "DeepSeek-V2: queries from the hidden state, any expert"
V3 = "DeepSeek-V3: short queries, groups of experts, a rope of yarn"
NUM_GENERATED = 12

CASES = [
    ("group of 4", {}, 2),  # tied, and a vocabulary that nothing divides
    ("group of 4", {}, 4),  # of 2 KV heads
    ("Qwen2: biases", {}, 2),
    ("Qwen3: normed heads, untied, a rope of yarn", {}, 4),  # of 1 KV head
    (MOE, {}, 2),
    (MOE, {"mlp_only_layers": []}, 4),
    (V2, {}, 2),
    (V3, {}, 2),
    (V3, {}, 4),
    ("one KV head, head_dim of its own", {}, 2),
    ("local in every layer", {}, 4),
]


def checkpoint(variant: str, directory: Path, **changes: Any) -> Path:
    oracle = Oracle(variant, **changes) if variant in VARIANTS else Gemma3Oracle(variant, **changes)
    return saved(oracle, directory)  # type: ignore[arg-type]


def generated(paged: PagedLlama, seed: int, num_tokens: int = NUM_GENERATED) -> torch.Tensor:
    """A prompt in two chunks beside another sequence, then the likeliest token, again and again -> `[n, V]` logits."""
    sequence = paged.sequence(random_tokens(30 + num_tokens, seed=seed))
    other = paged.sequence(random_tokens(9, seed=seed + 1))
    paged.step((sequence, 17))
    logits = [paged.step((sequence, 13), (other, 9))[0]]
    while len(logits) < num_tokens:
        sequence.token_ids[sequence.num_computed] = int(logits[-1].argmax())
        logits.append(paged.step((sequence, 1))[0])
    return torch.stack(logits)


def require_alike(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("variant", "changes", "tp"), CASES, ids=[f"{variant} over {tp}" for variant, _, tp in CASES])
def test_a_group_computes_what_one_rank_does(variant: str, changes: dict[str, Any], tp: int, tmp_path: Path) -> None:
    checkpoint(variant, tmp_path, **changes)

    def act(parallel: Parallel) -> torch.Tensor:
        return generated(PagedLlama(load_model(tmp_path, dtype="fp32", parallel=parallel)), seed=3)

    expected = act(ALONE)
    for logits in in_ranks(act, tp=tp):
        require_alike(logits, expected)


@pytest.mark.parametrize("variant", [MOE, V3])
@pytest.mark.parametrize("tp", [1, 2])
def test_groups_with_tokens_of_their_own_share_the_experts(tp: int, variant: str, tmp_path: Path) -> None:
    """The second is done first, and then computes for the other alone."""
    checkpoint(variant, tmp_path)

    def act(parallel: Parallel) -> torch.Tensor:
        paged = PagedLlama(load_model(tmp_path, dtype="fp32", parallel=parallel))
        if parallel.shard.rank // tp == 0:
            return generated(paged, seed=3)
        logits = generated(paged, seed=5, num_tokens=4)
        for _ in range(NUM_GENERATED - 4):
            assert paged.step().shape == (0, logits.shape[1])
        return logits

    expected = {seed: generated(PagedLlama(load_model(tmp_path, dtype="fp32")), seed) for seed in (3, 5)}
    for rank, logits in enumerate(in_ranks(act, dp=2, tp=tp)):
        require_alike(logits, expected[5][:4] if rank >= tp else expected[3])


@pytest.mark.parametrize("variant", ["group of 4", MOE, V3])
def test_blocks_of_fp8_may_be_cut_anywhere(variant: str, tmp_path: Path) -> None:
    """Heads of 16, an MLP of 20 a rank; blocks of 12 by 28."""
    whole, twin = tmp_path / "whole", tmp_path / "twin"
    whole.mkdir()
    checkpoint(variant, whole, num_hidden_layers=2)
    quantise(whole, twin, (12, 28))

    def act_in(directory: Path) -> Callable[[Parallel], torch.Tensor]:
        def act(parallel: Parallel) -> torch.Tensor:
            paged = PagedLlama(load_model(directory, dtype="fp32", parallel=parallel), num_pages=10)
            return paged.step((paged.sequence(random_tokens(21)), 21))[0]

        return act

    in_blocks, as_values = (in_ranks(act_in(directory), tp=2) for directory in (whole, twin))
    for own, expected in zip(in_blocks, as_values, strict=True):
        assert torch.equal(own, expected)


class RecordedFile:
    """As safetensors opens one; counts what is read of each tensor."""

    def __init__(self, read: Counter[str], *where: Any) -> None:
        self._opened = safe_open(*where)
        self._read = read

    def __enter__(self) -> "RecordedFile":
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._counted(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        slices = MagicMock()
        slices.__getitem__ = lambda _, part: self._counted(name, self._file.get_slice(name)[part])
        return slices

    def _counted(self, name: str, read: torch.Tensor) -> torch.Tensor:
        self._read[name] += read.numel()
        return read


def test_a_rank_reads_no_more_than_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_shape(checkpoint(MOE, tmp_path))
    everyone, group = Meeting(4), Meeting(2)
    for rank in range(4):
        read: Counter[str] = Counter()
        monkeypatch.setattr(weights, "safe_open", partial(RecordedFile, read))
        parallel = Parallel(group=ThreadRanks(group, rank % 2), everyone=ThreadRanks(everyone, rank))
        load_model(tmp_path, dtype="fp32", parallel=parallel)
        own = qwen3_moe.tensor_shapes(parallel.shard.of(shape))
        assert read == {name: math.prod(size) for name, size in own.items()}


@pytest.mark.parametrize("tp", [1, 2])
def test_results_of_experts_elsewhere_are_added_in_order_of_expert(tp: int) -> None:
    """Bit by bit as on one rank: in fp32 the order shows."""
    torch.manual_seed(0)
    experts = Experts(layers=(0,), num_experts=8, num_chosen=8, intermediate_size=1, renormalised=False)
    values, tokens = torch.randn(8), torch.randn(5, 1)
    router = SoftmaxRouter(weight=TorchLinear(torch.randn(8, 1)), num_chosen=8, renormalised=False)

    def always(value: torch.Tensor) -> GatedMlp:
        gate_up = TorchGatedLinear(torch.zeros(2, 1))
        return GatedMlp(gate_up=gate_up, down=TorchLinear(torch.zeros(1, 1), bias=value[None]))

    def act(parallel: Parallel) -> torch.Tensor:
        own = parallel.shard.experts(experts)
        mlp = expert_mlp(router, [always(value) for value in values[own.own.start : own.own.stop]], own, parallel)
        x = torch.zeros(5, 1)
        mlp.add_to(x, tokens)
        return x

    expected = act(ALONE)
    assert all(torch.equal(x, expected) for x in in_ranks(act, dp=2, tp=tp))
