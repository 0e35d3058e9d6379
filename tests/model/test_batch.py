"""A step's flat arrays against a slow obvious model, and whatever would leave the pool or the model refused by row."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InputError
from headrace.model.batch import Batch, Row

NUM_PAGES, VOCABULARY = 30, 50


def row(token_ids: Sequence[int], begin: int, page_table: Sequence[int], *, wants_logits: bool = True) -> Row:
    return Row(token_ids=token_ids, begin=begin, page_table=page_table, wants_logits=wants_logits)


def batch_of(*rows: Row, page_size: int = 4) -> Batch:
    return Batch.of(rows, page_size=page_size, num_pages=NUM_PAGES, vocab_size=VOCABULARY)


def test_a_chunk_and_a_decode_are_laid_out_row_after_row() -> None:
    batch = batch_of(row([7, 8, 9], 3, [5, 2, 11], wants_logits=False), row([1], 4, (6, 0)))
    assert (batch.num_rows, batch.num_tokens) == (2, 4)
    assert batch.token_ids.tolist() == [7, 8, 9, 1]
    assert batch.positions.tolist() == [3, 4, 5, 4]
    assert batch.slots.tolist() == [5 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 0 * 4 + 0]
    assert batch.qo_indptr.tolist() == [0, 3, 4]
    assert batch.page_indptr.tolist() == [0, 2, 4]
    assert batch.page_indices.tolist() == [5, 2, 6, 0]  # page 11 holds no token yet
    assert batch.kv_lens.tolist() == [6, 5]
    assert batch.logit_rows.tolist() == [3]


def test_a_batch_may_want_no_logits() -> None:
    assert batch_of(row([1], 0, [0], wants_logits=False)).logit_rows.tolist() == []


def test_every_array_is_int64() -> None:
    batch = batch_of(row([1], 0, [0], wants_logits=False))
    assert {getattr(batch, field).dtype for field in Batch.__slots__} == {np.dtype(np.int64)}


@st.composite
def rows(draw: st.DrawFn, page_size: int) -> Row:
    begin = draw(st.integers(0, 3 * page_size))
    token_ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3 * page_size))
    needed = -(-(begin + len(token_ids)) // page_size)
    # Pages behind the last token may be of any kind: nobody looks at them.
    table = draw(st.lists(st.integers(0, NUM_PAGES - 1), min_size=needed, max_size=needed)) + draw(
        st.lists(st.integers(-5, NUM_PAGES + 5), max_size=2)
    )
    return row(token_ids, begin, table, wants_logits=draw(st.booleans()))


@given(data=st.data(), page_size=st.integers(1, 7))
def test_every_array_is_what_a_loop_over_tokens_writes_down(data: st.DataObject, page_size: int) -> None:
    drawn = data.draw(st.lists(rows(page_size), min_size=1, max_size=5))
    batch = batch_of(*drawn, page_size=page_size)
    token = 0
    logit_rows, pages = [], []
    for number, each in enumerate(drawn):
        assert batch.qo_indptr[number] == token
        assert batch.page_indptr[number] == len(pages)
        position = each.begin
        for token_id in each.token_ids:
            page = each.page_table[position // page_size]
            assert (batch.token_ids[token], batch.positions[token]) == (token_id, position)
            assert batch.slots[token] == page * page_size + position % page_size
            token, position = token + 1, position + 1
        assert batch.kv_lens[number] == position
        pages += [page for at, page in enumerate(each.page_table) if at * page_size < position]
        logit_rows += [token - 1] if each.wants_logits else []
    assert (batch.num_rows, batch.num_tokens) == (len(drawn), token)
    assert (batch.qo_indptr[-1], batch.page_indptr[-1]) == (token, len(pages))
    assert (batch.page_indices.tolist(), batch.logit_rows.tolist()) == (pages, logit_rows)
    assert [len(batch.token_ids), len(batch.positions), len(batch.slots)] == [token] * 3


GOOD: dict[str, Any] = {"token_ids": [1, 2, 3], "begin": 4, "page_table": [0, 1]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"token_ids": []}, "row 1 must have at least one token", id="no tokens"),
        pytest.param({"begin": -1}, "row 1 must begin at 0 or later, begins at -1", id="before the beginning"),
        pytest.param({"token_ids": [1, -1]}, "row 1 must have token ids in 0..49", id="a negative token"),
        pytest.param({"token_ids": [50, 1]}, "row 1 must have token ids in 0..49", id="an unknown token"),
        pytest.param({"page_table": [0]}, "row 1 must have at least 2 pages, has 1", id="a page too few"),
        pytest.param({"page_table": []}, "row 1 must have at least 2 pages, has 0", id="no pages"),
        pytest.param({"page_table": [0, 30]}, "row 1 must have page ids in 0..29", id="a page of a larger pool"),
        pytest.param({"page_table": [-1, 3]}, "row 1 must have page ids in 0..29", id="a negative page"),
        pytest.param({"begin": 6}, "row 1 must have at least 3 pages, has 2", id="too far"),
    ],
)
def test_what_would_leave_the_pool_or_the_model_is_refused_by_row(wrong: dict[str, Any], message: str) -> None:
    good = row(**GOOD)
    assert batch_of(good, good).num_rows == 2
    with pytest.raises(InputError, match=f"rows: {message}"):
        batch_of(good, row(**{**GOOD, **wrong}))


def test_a_batch_may_have_no_rows() -> None:
    batch = batch_of()
    assert (batch.num_rows, batch.num_tokens) == (0, 0)
    assert batch.qo_indptr.tolist() == batch.page_indptr.tolist() == [0]
    arrays = (batch.token_ids, batch.positions, batch.slots, batch.page_indices, batch.kv_lens, batch.logit_rows)
    assert all(array.shape == (0,) and array.dtype == np.int64 for array in arrays)


@pytest.mark.parametrize("make", [tuple, list, np.array], ids=["tuple", "list", "array"])
def test_any_sequence_of_integers_will_do(make: Callable[[list[int]], Sequence[int]]) -> None:
    batch = batch_of(row(make([3, 4]), 3, make([9, 2])))
    assert batch.slots.tolist() == [39, 8]
