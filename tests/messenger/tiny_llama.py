"""A tiny Llama in torch over the paged KV cache: seeded random weights, fp32, a few layers. The model of the tests.

Shapes: T tokens of this chunk, S keys visible, H query heads, G KV heads, D head_dim, C hidden.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from headrace.kvcache.layout import KVLayout

VOCABULARY = 512
THETA = 10_000.0

LLAMA_KV = KVLayout(num_layers=4, num_kv_heads=2, page_size=8, head_dim=16, dtype="fp32")


class TinyLlama:
    """Grouped-query attention with rotary positions, rms-norm, silu-gated MLP, tied embeddings."""

    def __init__(self, kv: KVLayout = LLAMA_KV, *, seed: int = 0, group: int = 2) -> None:
        self.kv = kv
        self.num_heads = kv.num_kv_heads * group
        hidden = self.num_heads * kv.head_dim
        draw = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=draw) / columns**0.5

        self.embedding = weight(VOCABULARY, hidden)
        kv_width = kv.num_kv_heads * kv.head_dim
        self.layers = [
            {
                "q": weight(hidden, hidden),
                "k": weight(kv_width, hidden),
                "v": weight(kv_width, hidden),
                "o": weight(hidden, hidden),
                "gate": weight(2 * hidden, hidden),
                "up": weight(2 * hidden, hidden),
                "down": weight(hidden, 2 * hidden),
            }
            for _ in range(kv.num_layers)
        ]

    def forward(
        self,
        token_ids: Sequence[int],
        begin: int,
        page_table: Sequence[int],
        views: Sequence[torch.Tensor],
        after_attention: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor:
        """Compute positions [begin, begin + T) -> logits of the last, `[VOCABULARY]`. Their K and V go into `views`
        (per layer `[num_pages, G, 2, page_size, D]`); those of [0, begin) are read from there. `after_attention` is
        called when a layer's KV is in its pages and its output projection is done."""
        positions = torch.arange(begin, begin + len(token_ids))
        x = self.embedding[torch.tensor(token_ids)]  # [T, C]
        for number, (layer, view) in enumerate(zip(self.layers, views, strict=True)):
            x = x + self._attention(layer, _norm(x), positions, page_table, view) @ layer["o"].T
            after_attention(number)
            y = _norm(x)
            x = x + (functional.silu(y @ layer["gate"].T) * (y @ layer["up"].T)) @ layer["down"].T
        return _norm(x[-1]) @ self.embedding.T

    def _attention(
        self,
        layer: dict[str, torch.Tensor],
        x: torch.Tensor,
        positions: torch.Tensor,
        page_table: Sequence[int],
        view: torch.Tensor,
    ) -> torch.Tensor:
        kv, num_tokens = self.kv, len(positions)
        q = _rotate((x @ layer["q"].T).view(num_tokens, self.num_heads, kv.head_dim), positions)
        k = _rotate((x @ layer["k"].T).view(num_tokens, kv.num_kv_heads, kv.head_dim), positions)
        v = (x @ layer["v"].T).view(num_tokens, kv.num_kv_heads, kv.head_dim)
        table = torch.tensor(page_table)
        pages, offsets = table[positions // kv.page_size], positions % kv.page_size
        view[pages, :, 0, offsets] = k
        view[pages, :, 1, offsets] = v
        num_keys = int(positions[-1]) + 1
        keys = torch.arange(num_keys)
        seen = view[table[keys // kv.page_size], :, :, keys % kv.page_size]  # [S, G, 2, D]
        group = self.num_heads // kv.num_kv_heads
        k_all = seen[:, :, 0].repeat_interleave(group, dim=1)  # [S, H, D]
        v_all = seen[:, :, 1].repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", q, k_all) / kv.head_dim**0.5
        scores.masked_fill_(keys[None, None] > positions[None, :, None], float("-inf"))
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v_all).reshape(num_tokens, -1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `[T, heads, D]`, halves rotated against each other."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) / half)  # [T, D/2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
