"""The operations in plain torch: the reference that every kernel is measured against, and the way on any CPU.

Owns packed weights and a step's indices. What varies per step (which pages, which mask) is worked out once, before the
first layer; a layer then costs some thirty torch calls. Runs on the model thread, within its inference mode.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from headrace.kvcache.layout import KVDtype, num_pages_for
from headrace.kvcache.pool import TORCH_DTYPES
from headrace.model.batch import Batch, Int64s
from headrace.model.ops import Activation, HeadNorms
from headrace.model.shape import ModelShape

QUERY_BLOCK = 256
"""Tokens of a chunk that are attended in one call. They do not look at keys behind their block, so of a long chunk
nearly half is never computed, and a mask has at most this many rows."""


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """One weight as it is. torch has no bf16 product with an fp32 result on CPUs: in bf16, results carry one rounding
    more than a kernel's, logits too. The bias is added to what was rounded."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        out = functional.linear(inputs, self.weight).float()
        return out if self.bias is None else out + self.bias

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        x += functional.linear(inputs, self.weight)
        if self.bias is not None:
            x += self.bias


@dataclass(frozen=True, slots=True)
class TorchGatedLinear:
    """Gate and up, one below the other: one product for both."""

    gate_up: torch.Tensor
    activation: Activation = "silu"

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(inputs, self.gate_up).chunk(2, dim=-1)
        return ACTIVATIONS[self.activation](gate).mul_(up)


class TorchOps:
    """For the heads of `shape`, in `dtype`."""

    def __init__(self, shape: ModelShape, dtype: KVDtype) -> None:
        self.dtype = TORCH_DTYPES[dtype]
        self._heads = _Heads(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.attention_scale,
        )

    def linear(self, *weights: torch.Tensor, bias: torch.Tensor | None = None) -> TorchLinear:
        # A single weight is taken as it is: the embedding of a model with tied ones stays mapped from its file.
        return TorchLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> TorchGatedLinear:
        return TorchGatedLinear(torch.cat((gate, up)), activation)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps).to(self.dtype)

    def add_rms_norm(self, x: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        x += functional.rms_norm(values, weight.shape, weight, eps)

    def attention(
        self, batch: Batch, page_size: int, cos: torch.Tensor, sin: torch.Tensor, *, window: int | None = None
    ) -> "TorchAttention":
        pool = _Pool(page_size=page_size, num_kv_heads=self._heads.num_kv_heads, dtype=self.dtype)
        parts = [_part(batch, rows, tokens, pool, window) for rows, tokens in _query_blocks(batch)]
        return TorchAttention(self._heads, parts, _entries(batch, pool), (cos, sin))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """What a step knows of the views before it has one."""

    page_size: int
    num_kv_heads: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """R rows with Q queries each, attended in one call over M pages each, from the first that a query of the row sees.
    Rows with fewer repeat their first page, and their keys behind the end are zeroed: a page's unused part may hold
    NaN, which no mask stops."""

    tokens: torch.Tensor  # [R * Q] places among the step's tokens
    blocks: torch.Tensor  # [R * 2G * M] places among the view's runs of S entries: K and V of each page and head
    num_rows: int
    num_keys: int  # of the row with most
    unused: torch.Tensor  # places among the gathered entries, [R * 2G * M * S], that lie behind a row's end
    mask: torch.Tensor | None  # [R, 1, Q, num_keys] 0 or -inf; None: everything is seen


class TorchAttention:
    """One step's attention: a gather of whole pages and one product per part and layer."""

    def __init__(
        self,
        heads: _Heads,
        parts: Sequence[_Part],
        entries: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._heads = heads
        self._parts = parts
        self._entries = entries  # [T * 2G] places among the view's entries of D: K and V of each token and head
        self._cos, self._sin = (turn[:, None] for turn in rotation)  # [T, 1, D / 2]

    def append(self, qkv: torch.Tensor, view: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim = self._heads.num_heads, self._heads.num_kv_heads, self._heads.head_dim
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if norms is not None:
            q, k = qk[:, :num_heads], qk[:, num_heads:]
            each = ((q, norms.q), (k, norms.k))
            qk = torch.cat([functional.rms_norm(x, (head_dim,), weight, norms.eps) for x, weight in each], dim=1)
        a, b = qk.chunk(2, dim=-1)
        turned = torch.cat((a * self._cos - b * self._sin, b * self._cos + a * self._sin), dim=-1).to(view.dtype)
        kv = torch.stack((turned[:, num_heads:], v.to(view.dtype)), dim=2)  # [T, G, 2, D]
        view.view(-1, head_dim).index_copy_(0, self._entries, kv.view(-1, head_dim))
        return turned[:, :num_heads]

    def attend(self, q: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        _, num_kv_heads, _, page_size, head_dim = view.shape
        runs = view.view(-1, page_size * head_dim)
        out = torch.empty(q.shape, dtype=q.dtype)
        for part in self._parts:
            kv = runs.index_select(0, part.blocks).view(-1, head_dim)
            if part.unused.numel():
                kv.index_fill_(0, part.unused, 0)
            k, v = kv.view(part.num_rows, num_kv_heads, 2, -1, head_dim)[:, :, :, : part.num_keys].unbind(2)
            queries = q.index_select(0, part.tokens).view(part.num_rows, -1, *q.shape[1:]).transpose(1, 2)
            seen = functional.scaled_dot_product_attention(
                queries, k, v, attn_mask=part.mask, scale=self._heads.scale, enable_gqa=True
            )
            out.index_copy_(0, part.tokens, seen.transpose(1, 2).reshape(-1, *q.shape[1:]))
        return out.flatten(1)


def _query_blocks(batch: Batch) -> Iterator[tuple[list[int], Int64s]]:
    """Rows that are attended together, and their tokens, `[R, Q]`: blocks of one chunk, or decodes of like length.

    Decodes are padded to the longest of their call. Those within a factor of two in pages share one: a batch of short
    rows does not pay for a long one, and a row's result depends little on what else is decoded.
    """
    decodes: dict[int, list[int]] = {}
    for row in range(batch.num_rows):
        begin, end = int(batch.qo_indptr[row]), int(batch.qo_indptr[row + 1])
        if end - begin == 1:
            num_pages = int(batch.page_indptr[row + 1] - batch.page_indptr[row])
            decodes.setdefault((num_pages - 1).bit_length(), []).append(row)
        else:
            for block in range(begin, end, QUERY_BLOCK):
                yield [row], np.arange(block, min(block + QUERY_BLOCK, end))[None]
    for rows in decodes.values():
        yield rows, batch.qo_indptr[rows][:, None]


def _part(batch: Batch, rows: Sequence[int], tokens: Int64s, pool: _Pool, window: int | None) -> _Part:
    page_size, num_runs = pool.page_size, 2 * pool.num_kv_heads
    positions = batch.positions[tokens]  # [R, Q]
    kv_lens = positions[:, -1] + 1
    first_pages = _first_seen(positions[:, 0], window) // page_size
    num_keys = int((kv_lens - first_pages * page_size).max())
    num_pages = num_pages_for(num_keys, page_size)
    tables = np.empty((len(rows), num_pages), dtype=np.int64)
    for table, row, first, kv_len in zip(tables, rows, first_pages.tolist(), kv_lens.tolist(), strict=True):
        own = batch.page_indices[batch.page_indptr[row] :][first : num_pages_for(kv_len, page_size)]
        table[: len(own)], table[len(own) :] = own, own[0]
    blocks = tables[:, None] * num_runs + np.arange(num_runs)[:, None]  # [R, 2G, M]
    places = np.arange(num_pages * page_size)
    keys = first_pages[:, None] * page_size + places  # [R, M * S] positions
    behind = (keys >= kv_lens[:, None]) & (places < num_keys)  # what is behind the last key of all is cut off
    unused = np.flatnonzero(np.broadcast_to(behind[:, None], (len(rows), num_runs, len(places))))
    seen_keys, seeing = keys[:, None, None, :num_keys], positions[:, None, :, None]
    is_seen = seen_keys <= seeing
    if window is not None:
        is_seen &= seen_keys >= _first_seen(seeing, window)
    return _Part(
        tokens=torch.from_numpy(tokens.reshape(-1)),
        blocks=torch.from_numpy(blocks.reshape(-1)),
        num_rows=len(rows),
        num_keys=num_keys,
        unused=torch.from_numpy(unused),
        mask=_mask(is_seen, pool.dtype),
    )


def _first_seen(positions: Int64s, window: int | None) -> Int64s:
    return np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)


def _mask(is_seen: NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor | None:
    if is_seen.all():
        return None
    return torch.zeros(is_seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~is_seen), -torch.inf)


def _entries(batch: Batch, pool: _Pool) -> torch.Tensor:
    pages, offsets = np.divmod(batch.slots, pool.page_size)
    num_runs = 2 * pool.num_kv_heads
    runs = pages[:, None] * num_runs + np.arange(num_runs)  # [T, 2G]
    return torch.from_numpy((runs * pool.page_size + offsets[:, None]).reshape(-1))
