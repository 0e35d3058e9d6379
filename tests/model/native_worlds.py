"""What the tests of the native kernels share: ways to run them, heads, and pages full of NaN but for what rows own."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.kvcache.layout import num_pages_for
from headrace.model import _cpu
from headrace.model.batch import Batch, Row
from headrace.model.native_ops import NativeOps
from headrace.model.shape import ModelShape
from headrace.model.torch_ops import TorchOps

torch.set_num_threads(1)  # the tests run on two cores, beside each other

needs_kernels = pytest.mark.skipif(not _cpu.instruction_sets(), reason="this CPU has no avx512_bf16")

BF16_ROUNDING = 2.0**-8
"""The most, relative to a number, that rounding it to bf16's 8 bits changes it."""


@dataclass(frozen=True, slots=True)
class Way:
    instruction_set: str
    num_threads: int

    def __str__(self) -> str:
        return f"{self.instruction_set}-{self.num_threads}"


WAYS = [Way(name, num_threads) for name in _cpu.instruction_sets() for num_threads in (1, 2)]

each_way = pytest.mark.parametrize("way", WAYS, ids=str)
each_set = pytest.mark.parametrize("instruction_set", _cpu.instruction_sets())


def shape_of(*, num_heads: int = 2, num_kv_heads: int = 1, head_dim: int = 32, num_layers: int = 1) -> ModelShape:
    return ModelShape.from_config({
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": num_layers,
        "hidden_size": 72,
        "intermediate_size": 104,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": 119,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": False,
    })  # fmt: skip


def zeros(num_bytes: int) -> NDArray[np.uint8]:
    """A `Region` with nothing behind its last byte."""
    memory = np.zeros(num_bytes + 63, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + num_bytes]


@contextmanager
def native_ops(way: Way, shape: ModelShape | None = None) -> Iterator[NativeOps]:
    with closing(_cpu.Kernels(way.instruction_set, (), way.num_threads)) as kernels:
        yield NativeOps(shape or shape_of(), kernels, zeros)


def reference_ops(shape: ModelShape | None = None) -> TorchOps:
    return TorchOps(shape or shape_of(), "fp32")


def drawn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def whole_numbers(*size: int, seed: int = 0) -> torch.Tensor:
    """Odd ones in -15..15. Products of up to a thousand pairs are summed exactly by fp32, in any order."""
    return torch.randint(-8, 8, size, generator=torch.Generator().manual_seed(seed)).float() * 2 + 1


def bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


# ---- rows over pages -----------------------------------------------------------------------------------------------


def paged(rows: Sequence[tuple[int, int]], *, page_size: int, seed: int = 0) -> tuple[Batch, int]:
    """Rows of (begin, num_tokens), each over pages of its own, in random order, and pages that nobody owns
    -> the batch, and the number of pages."""
    needed = [num_pages_for(begin + count, page_size) for begin, count in rows]
    num_pages = sum(needed) + 3
    free = np.random.default_rng(seed).permutation(num_pages).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    made = [
        Row(token_ids=[0] * count, begin=begin, page_table=table, wants_logits=False)
        for (begin, count), table in zip(rows, tables, strict=True)
    ]
    return Batch.of(made, page_size=page_size, num_pages=num_pages, vocab_size=1), num_pages


def empty_view(num_pages: int, shape: ModelShape, page_size: int) -> torch.Tensor:
    return torch.full((num_pages, shape.num_kv_heads, 2, page_size, shape.head_dim), torch.nan, dtype=torch.bfloat16)


def places(batch: Batch, row: int, positions: NDArray[np.int64], page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and offsets of a row's positions."""
    pages = batch.page_indices[batch.page_indptr[row] : batch.page_indptr[row + 1]]
    return torch.from_numpy(pages[positions // page_size]), torch.from_numpy(positions % page_size)


def entries_of(view: torch.Tensor, batch: Batch, row: int) -> torch.Tensor:
    """All that a row sees, `[kv_len, G, 2, D]`."""
    pages, offsets = places(batch, row, np.arange(batch.kv_lens[row]), view.shape[3])
    return view[pages, :, :, offsets]


def fill(view: torch.Tensor, batch: Batch, row: int, entries: torch.Tensor) -> None:
    """Place `[n, G, 2, D]` at a row's positions [0, n)."""
    pages, offsets = places(batch, row, np.arange(len(entries)), view.shape[3])
    view[pages, :, :, offsets] = entries.to(view.dtype)


def angles(batch: Batch, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[T, D / 2]`, by position alone."""
    turns = torch.from_numpy(batch.positions).double()[:, None] * 1000.0 ** (-torch.arange(head_dim // 2) / head_dim)
    return turns.cos().float(), turns.sin().float()
