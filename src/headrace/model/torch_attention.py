"""Attention in plain torch, over heads of keys and values or over latents.

Owns a step's indices. What varies per step (which pages, which mask) is worked out once, before the first layer; a
layer then costs some thirty torch calls. Runs on the model thread, within its inference mode.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from headrace.kvcache.layout import num_pages_for
from headrace.model.batch import Batch, Int64s
from headrace.model.latent_fields import LatentAttention
from headrace.model.ops import HeadNorms
from headrace.model.shape import ModelShape

QUERY_BLOCK = 256
"""Tokens of a chunk that are attended in one call. They do not look at keys behind their block, so of a long chunk
nearly half is never computed, and a mask has at most this many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """What a step knows of the views before it has one. A page is N runs of one entry per token: K and V of each head,
    or latents."""

    page_size: int
    num_runs: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """R rows with Q queries each, attended in one call over M pages each, from the first that a query of the row sees.
    Rows with fewer repeat their first page, and their keys behind the end are zeroed: a page's unused part may hold
    NaN, which no mask stops."""

    tokens: torch.Tensor  # [R * Q] places among the step's tokens
    blocks: torch.Tensor  # [R * N * M] places among the view's runs
    num_rows: int
    num_keys: int  # of the row with most
    unused: torch.Tensor  # places among the gathered entries, [R * N * M * S], that lie behind a row's end
    mask: torch.Tensor | None  # [R, 1, Q, num_keys] 0 or -inf; None: everything is seen


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """Where a step reads and writes in any layer's view."""

    parts: Sequence[_Part]
    num_runs: int
    entries: torch.Tensor  # [T * N] places among the view's entries

    def gathered(self, part: _Part, view: torch.Tensor) -> torch.Tensor:
        """The entries of the part's pages, those behind each row's end zeroed, `[R, N, M * S, D]`."""
        page_size, head_dim = view.shape[-2:]
        entries = view.view(-1, page_size * head_dim).index_select(0, part.blocks).view(-1, head_dim)
        if part.unused.numel():
            entries.index_fill_(0, part.unused, 0)
        return entries.view(part.num_rows, self.num_runs, -1, head_dim)


def planned(batch: Batch, page_size: int, num_runs: int, dtype: torch.dtype, window: int | None = None) -> PlannedStep:
    """For views whose pages are `num_runs` runs of entries."""
    pool = _Pool(page_size=page_size, num_runs=num_runs, dtype=dtype)
    parts = [_part(batch, rows, tokens, pool, window) for rows, tokens in _query_blocks(batch)]
    return PlannedStep(parts=parts, num_runs=num_runs, entries=_entries(batch, pool))


class TorchAttention:
    """One step's attention: a gather of whole pages and one product per part and layer."""

    def __init__(self, shape: ModelShape, step: PlannedStep, rotation: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._num_heads, self._num_kv_heads, self._head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self._scale = shape.attention_scale
        self._step = step
        self._rotation = rotation

    def append(self, qkv: torch.Tensor, view: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if norms is not None:
            q, k = qk[:, :num_heads], qk[:, num_heads:]
            each = ((q, norms.q), (k, norms.k))
            qk = torch.cat([functional.rms_norm(x, (head_dim,), weight, norms.eps) for x, weight in each], dim=1)
        turned = _turned(qk, self._rotation).to(view.dtype)
        kv = torch.stack((turned[:, num_heads:], v.to(view.dtype)), dim=2)  # [T, G, 2, D]
        view.view(-1, head_dim).index_copy_(0, self._step.entries, kv.view(-1, head_dim))
        return turned[:, :num_heads]

    def attend(self, q: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        for part in self._step.parts:
            kv = self._step.gathered(part, view)[:, :, : part.num_keys]
            k, v = kv[:, 0::2], kv[:, 1::2]  # K and V of a head are neighbours
            out.index_copy_(0, part.tokens, _seen(part, q, k, v, self._scale))
        return out.flatten(1)


class TorchLatentAttention:
    """The same over latents: one KV head, whose values are its keys without the part that turns. Queries are given in
    latent space, and what was seen comes back there: `[T, (H + 1) * D] fp32` -> `[T, H, D]` -> `[T, H * R]`."""

    def __init__(
        self,
        num_heads: int,
        latent: LatentAttention,
        scale: float,
        step: PlannedStep,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._num_heads, self._latent, self._scale = num_heads, latent, scale
        self._step = step
        self._rotation = rotation

    def append(self, qkv: torch.Tensor, view: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        assert norms is None, "the norms of latents are before, those of heads in no model"
        entries = qkv.view(-1, self._num_heads + 1, self._latent.width)
        stays, turns = entries.tensor_split([self._latent.kv_rank], dim=-1)
        turned = torch.cat((stays, _turned(turns, self._rotation)), dim=-1).to(view.dtype)
        view.view(-1, self._latent.width).index_copy_(0, self._step.entries, turned[:, -1])
        return turned[:, :-1]

    def attend(self, q: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        # Values as wide as keys: a part that nobody asks for is added up, and torch's kernel for equal widths runs.
        out = torch.empty(q.shape, dtype=q.dtype)
        for part in self._step.parts:
            kv = self._step.gathered(part, view)[:, :, : part.num_keys]
            out.index_copy_(0, part.tokens, _seen(part, q, kv, kv, self._scale))
        return out[..., : self._latent.kv_rank].flatten(1)


def _turned(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`[T, heads, D]`, by cos and sin `[T, D / 2]`."""
    cos, sin = (turn[:, None] for turn in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _seen(part: _Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """By the part's tokens of `q` `[T, H, D]`, over its `k` and `v` `[R, G, num_keys, D]`, `[R * Q, H, D]`."""
    queries = q.index_select(0, part.tokens).view(part.num_rows, -1, *q.shape[1:]).transpose(1, 2)
    seen = functional.scaled_dot_product_attention(queries, k, v, attn_mask=part.mask, scale=scale, enable_gqa=True)
    return seen.transpose(1, 2).reshape(-1, *q.shape[1:])


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
    page_size, num_runs = pool.page_size, pool.num_runs
    positions = batch.positions[tokens]  # [R, Q]
    kv_lens = positions[:, -1] + 1
    first_pages = _first_seen(positions[:, 0], window) // page_size
    num_keys = int((kv_lens - first_pages * page_size).max())
    num_pages = num_pages_for(num_keys, page_size)
    tables = np.empty((len(rows), num_pages), dtype=np.int64)
    for table, row, first, kv_len in zip(tables, rows, first_pages.tolist(), kv_lens.tolist(), strict=True):
        own = batch.page_indices[batch.page_indptr[row] :][first : num_pages_for(kv_len, page_size)]
        table[: len(own)], table[len(own) :] = own, own[0]
    blocks = tables[:, None] * num_runs + np.arange(num_runs)[:, None]  # [R, N, M]
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
    runs = pages[:, None] * pool.num_runs + np.arange(pool.num_runs)  # [T, N]
    return torch.from_numpy((runs * pool.page_size + offsets[:, None]).reshape(-1))
