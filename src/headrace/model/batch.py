"""What one step computes, as plain rows and as the flat arrays that a model reads. Pure but for numpy.

A row is one request's part of a step: a chunk of its prompt, or the one token of a decode. Rows are independent; a
model computes all of them in one forward pass. There may be none: a rank without requests computes experts for others.
In CSR form (STYLE's vocabulary), for R rows, T tokens, L logit rows:

    token_ids, positions, slots   [T]      slots: page_id * page_size + offset, where a token's KV goes
    qo_indptr                     [R + 1]  row r's tokens are [qo_indptr[r], qo_indptr[r + 1])
    page_indptr, page_indices     [R + 1], [..]  row r's pages, in order of position, up to kv_len
    kv_lens                       [R]      keys visible after the append
    logit_rows                    [L]      places in [0, T) whose logits are asked for
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.kvcache.layout import num_pages_for

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Compute `token_ids` at positions [begin, begin + len(token_ids)); the KV of [0, begin) is in its pages."""

    token_ids: Sequence[int]
    begin: int
    page_table: Sequence[int]  # page ids from position 0; those behind the row's last token are not looked at
    wants_logits: bool  # of its last token


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    token_ids: Int64s
    positions: Int64s
    slots: Int64s
    qo_indptr: Int64s
    page_indptr: Int64s
    page_indices: Int64s
    kv_lens: Int64s
    logit_rows: Int64s

    @classmethod
    def of(cls, rows: Sequence[Row], *, page_size: int, num_pages: int, vocab_size: int) -> "Batch":
        """Raises InputError, naming the row, for whatever would read or write outside of the pool or the model."""
        nothing = np.empty(0, dtype=np.int64)
        token_ids, positions, slots, pages = [nothing], [nothing], [nothing], [nothing]
        logit_rows: list[int] = []
        qo_indptr, page_indptr, kv_lens = [0], [0], []
        for number, row in enumerate(rows):
            _check(number, row, page_size=page_size, num_pages=num_pages, vocab_size=vocab_size)
            kv_len = row.begin + len(row.token_ids)
            table = np.asarray(row.page_table[: num_pages_for(kv_len, page_size)], dtype=np.int64)
            at = np.arange(row.begin, kv_len, dtype=np.int64)
            token_ids.append(np.asarray(row.token_ids, dtype=np.int64))
            positions.append(at)
            slots.append(table[at // page_size] * page_size + at % page_size)
            pages.append(table)
            qo_indptr.append(qo_indptr[-1] + len(row.token_ids))
            page_indptr.append(page_indptr[-1] + len(table))
            kv_lens.append(kv_len)
            if row.wants_logits:
                logit_rows.append(qo_indptr[-1] - 1)
        return cls(
            token_ids=np.concatenate(token_ids),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
            qo_indptr=np.array(qo_indptr, dtype=np.int64),
            page_indptr=np.array(page_indptr, dtype=np.int64),
            page_indices=np.concatenate(pages),
            kv_lens=np.array(kv_lens, dtype=np.int64),
            logit_rows=np.array(logit_rows, dtype=np.int64),
        )

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def _check(number: int, row: Row, *, page_size: int, num_pages: int, vocab_size: int) -> None:
    if not len(row.token_ids):
        raise InputError("rows", f"row {number} must have at least one token")
    if row.begin < 0:
        raise InputError("rows", f"row {number} must begin at 0 or later, begins at {row.begin}")
    if not 0 <= min(row.token_ids) <= max(row.token_ids) < vocab_size:
        raise InputError("rows", f"row {number} must have token ids in 0..{vocab_size - 1}")
    needed = num_pages_for(row.begin + len(row.token_ids), page_size)
    if len(row.page_table) < needed:
        raise InputError("rows", f"row {number} must have at least {needed} pages, has {len(row.page_table)}")
    used = row.page_table[:needed]
    if not 0 <= min(used) <= max(used) < num_pages:
        raise InputError("rows", f"row {number} must have page ids in 0..{num_pages - 1}")
