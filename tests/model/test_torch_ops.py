"""Each operation against its formula; attention against a loop over tokens, heads and keys, for any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_oracle import TORCH_DTYPES

from headrace.kvcache.layout import KVDtype
from headrace.model import torch_attention
from headrace.model.batch import Batch, Row
from headrace.model.ops import HeadNorms
from headrace.model.shape import ModelShape
from headrace.model.torch_ops import TorchOps

NUM_PAGES = 24
HEAD_DIM = 6
SCALE = 0.3  # of head_dim it would be 0.41

DTYPES = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
TOLERANCE: dict[KVDtype, float] = {"fp32": 1e-5, "bf16": 2e-2}


def ops_of(dtype: KVDtype, *, num_heads: int = 6, num_kv_heads: int = 2) -> TorchOps:
    shape = ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=1,
        hidden_size=16,
        intermediate_size=10,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=50,
        rope_theta=100.0,
        rms_norm_eps=1e-5,
        attention_scale=SCALE,
        max_model_len=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
    )
    return TorchOps(shape, dtype)


def drawn(*size: int, seed: int = 0, dtype: KVDtype = "fp32") -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[dtype])


def require_near(result: torch.Tensor, expected: torch.Tensor, dtype: KVDtype) -> None:
    assert result.shape == expected.shape
    torch.testing.assert_close(result.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


# ---- linear layers and the norm ------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_weights_are_stacked_and_the_result_is_fp32(dtype: KVDtype, num_tokens: int) -> None:
    weights = [drawn(rows, 16, seed=rows, dtype=dtype) for rows in (5, 3, 2)]
    inputs = drawn(num_tokens, 16, dtype=dtype)
    result = ops_of(dtype).linear(*weights).apply(inputs)
    assert result.dtype == torch.float32
    require_near(result, torch.cat([inputs.float() @ weight.float().T for weight in weights], dim=1), dtype)


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_a_residual_is_added_to_in_place_and_stays_fp32(dtype: KVDtype, num_tokens: int) -> None:
    weight, inputs, x = (
        drawn(8, 16, seed=1, dtype=dtype),
        drawn(num_tokens, 16, seed=2, dtype=dtype),
        drawn(num_tokens, 8),
    )
    expected = x + inputs.float() @ weight.float().T
    ops_of(dtype).linear(weight).add_to(x, inputs)
    assert x.dtype == torch.float32
    require_near(x, expected, dtype)


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_a_bias_is_added_after_the_product(dtype: KVDtype, num_tokens: int) -> None:
    weights = [drawn(rows, 16, seed=rows, dtype=dtype) for rows in (5, 3)]
    inputs, bias, x = drawn(num_tokens, 16, dtype=dtype), 3 * drawn(8, seed=9), drawn(num_tokens, 8, seed=4)
    expected = torch.cat([inputs.float() @ weight.float().T for weight in weights], dim=1) + bias
    linear = ops_of(dtype).linear(*weights, bias=bias)
    result = linear.apply(inputs)
    assert result.dtype == torch.float32
    require_near(result, expected, dtype)
    expected += x
    linear.add_to(x, inputs)
    assert x.dtype == torch.float32
    require_near(x, expected, dtype)


def test_a_single_weight_is_not_copied() -> None:
    weight = drawn(8, 16)
    assert ops_of("fp32").linear(weight).weight.data_ptr() == weight.data_ptr()


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_the_gate_passes_through_silu_and_multiplies_up(dtype: KVDtype, num_tokens: int) -> None:
    gate, up, inputs = (drawn(n, 16, seed=n, dtype=dtype) / 4 for n in (10, 10, num_tokens))
    up = up.flip(0)
    result = ops_of(dtype).gated_linear(gate, up).apply(inputs)
    assert result.dtype == TORCH_DTYPES[dtype]
    gated, raised = inputs.float() @ gate.float().T, inputs.float() @ up.float().T
    require_near(result, gated / (1 + torch.exp(-gated)) * raised, dtype)


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_the_gate_passes_through_the_tanh_formula_of_gelu_when_asked(dtype: KVDtype, num_tokens: int) -> None:
    gate, up, inputs = (drawn(n, 16, seed=n, dtype=dtype) / 4 for n in (10, 10, num_tokens))
    up = up.flip(0)
    result = ops_of(dtype).gated_linear(gate, up, "gelu_tanh").apply(inputs)
    assert result.dtype == TORCH_DTYPES[dtype]
    gated, raised = inputs.float() @ gate.float().T, inputs.float() @ up.float().T
    gelu = gated / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gated + 0.044715 * gated**3)))
    require_near(result, gelu * raised, dtype)


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_the_norm_divides_by_the_root_of_the_mean_square(dtype: KVDtype, num_tokens: int) -> None:
    x, weight = 30 * drawn(num_tokens, 16), drawn(16, seed=1)
    result = ops_of(dtype).rms_norm(x, weight, 0.5)
    assert result.dtype == TORCH_DTYPES[dtype]
    require_near(result, normed(x, weight, 0.5), dtype)


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_the_norm_of_values_is_added_in_place_and_never_rounded(dtype: KVDtype, num_tokens: int) -> None:
    x, values, weight = drawn(num_tokens, 16, seed=2), 30 * drawn(num_tokens, 16), drawn(16, seed=1)
    expected, before = x + normed(values, weight, 0.5), values.clone()
    ops_of(dtype).add_rms_norm(x, values, weight, 0.5)
    assert x.dtype == torch.float32
    require_near(x, expected, "fp32")
    assert torch.equal(values, before)


# ---- attention -----------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, int]:
    """Up to five rows over pages that are all different, in random order."""
    page_size = draw(st.sampled_from([1, 2, 3, 8]))
    free = draw(st.permutations(range(NUM_PAGES)))
    rows: list[Row] = []
    for num_pages in draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)):
        table, free = free[:num_pages], free[num_pages:]
        if not table:
            break
        kv_len = draw(st.integers((len(table) - 1) * page_size + 1, len(table) * page_size))
        qo_len = draw(st.one_of(st.just(1), st.integers(1, kv_len)))
        rows.append(Row(token_ids=[0] * qo_len, begin=kv_len - qo_len, page_table=table, wants_logits=False))
    return Batch.of(rows, page_size=page_size, num_pages=NUM_PAGES, vocab_size=1), page_size


def view_of(batch: Batch, page_size: int, num_kv_heads: int, dtype: KVDtype) -> torch.Tensor:
    """Seeded keys and values where the batch's rows have some already, NaN everywhere else."""
    view = torch.full((NUM_PAGES, num_kv_heads, 2, page_size, HEAD_DIM), torch.nan, dtype=TORCH_DTYPES[dtype])
    for row in range(batch.num_rows):
        pages = batch.page_indices[batch.page_indptr[row] : batch.page_indptr[row + 1]]
        for position in range(batch.positions[batch.qo_indptr[row]]):
            page, offset = pages[position // page_size], position % page_size
            view[page, :, :, offset] = drawn(num_kv_heads, 2, HEAD_DIM, seed=int(page) * 100 + offset, dtype=dtype)
    return view


def turned(head: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Dimension i and i + D/2 are a point in the plane, turned by angle i."""
    half = len(head) // 2
    return torch.tensor(
        [float(head[i] * cos[i] - head[i + half] * sin[i]) for i in range(half)]
        + [float(head[i + half] * cos[i] + head[i] * sin[i]) for i in range(half)]
    )


def slow_attention(batch: Batch, q: torch.Tensor, view: torch.Tensor, window: int | None) -> torch.Tensor:
    page_size, num_heads, num_kv_heads = view.shape[3], q.shape[1], view.shape[1]
    out = torch.zeros(batch.num_tokens, num_heads, HEAD_DIM)
    for row in range(batch.num_rows):
        pages = batch.page_indices[batch.page_indptr[row] : batch.page_indptr[row + 1]]
        for token in range(batch.qo_indptr[row], batch.qo_indptr[row + 1]):
            position = int(batch.positions[token])
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            entries = torch.stack([view[pages[at // page_size], :, :, at % page_size].float() for at in seen])
            for head in range(num_heads):
                keys, values = entries[:, head * num_kv_heads // num_heads].unbind(1)
                weights = torch.softmax(keys @ q[token, head].float() * SCALE, dim=0)
                out[token, head] = weights @ values
    return out.view(batch.num_tokens, -1)


@DTYPES
@pytest.mark.parametrize("group", [1, 3, 4])
@settings(max_examples=25)
@given(drawn_batch=batches(), window=st.none() | st.integers(1, 12), is_normed=st.booleans())
def test_attention_is_what_a_loop_over_tokens_heads_and_keys_yields(
    dtype: KVDtype, group: int, drawn_batch: tuple[Batch, int], window: int | None, is_normed: bool
) -> None:
    batch, page_size = drawn_batch
    num_tokens, num_heads = batch.num_tokens, 2 * group
    angles = drawn(num_tokens, HEAD_DIM // 2, seed=3)
    cos, sin = angles.cos(), angles.sin()
    attention = ops_of(dtype, num_heads=num_heads).attention(batch, page_size, cos, sin, window=window)
    norms = HeadNorms(q=drawn(HEAD_DIM, seed=5), k=drawn(HEAD_DIM, seed=6), eps=0.5) if is_normed else None
    view = view_of(batch, page_size, 2, dtype)
    before = view.clone()

    qkv = drawn(num_tokens, (num_heads + 4) * HEAD_DIM, seed=4)
    raw = qkv.clone()
    q = attention.append(qkv, view, norms)
    assert torch.equal(qkv, raw)
    heads = qkv.view(num_tokens, num_heads + 4, HEAD_DIM)
    for token in range(num_tokens):
        page, offset = divmod(int(batch.slots[token]), page_size)
        for head in range(num_heads + 2):
            is_key = head >= num_heads
            found = view[page, head - num_heads, 0, offset] if is_key else q[token, head]
            entry = heads[token, head]
            if norms is not None:
                entry = normed(entry, norms.k if is_key else norms.q, norms.eps)
            require_near(found, turned(entry, cos[token], sin[token]), dtype)
        assert torch.equal(view[page, :, 1, offset], heads[token, num_heads + 2 :].to(view.dtype))
        view_without = before[page, :, :, offset]
        assert bool(view_without.isnan().all())  # the slot was free: nothing but its own token is in it now
        before[page, :, :, offset] = view[page, :, :, offset]
    assert torch.equal(before.nan_to_num(7.0), view.nan_to_num(7.0))  # and nothing else was written

    result = attention.attend(q, view)
    assert result.dtype == TORCH_DTYPES[dtype]
    require_near(result, slow_attention(batch, q, view, window), dtype)
    assert torch.equal(before.nan_to_num(7.0), view.nan_to_num(7.0))  # reading writes nothing


@given(drawn_batch=batches(), block=st.integers(1, 9))
def test_every_token_is_attended_once_and_only_beside_rows_of_like_length(
    drawn_batch: tuple[Batch, int], block: int
) -> None:
    batch, _ = drawn_batch
    num_pages = [int(batch.page_indptr[row + 1] - batch.page_indptr[row]) for row in range(batch.num_rows)]
    attended: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "QUERY_BLOCK", block)
        for rows, tokens in torch_attention._query_blocks(batch):
            assert tokens.shape[0] == len(rows)
            assert tokens.shape[1] <= block
            assert len(rows) == 1 or tokens.shape[1] == 1
            assert max(num_pages[row] for row in rows) <= 2 * min(num_pages[row] for row in rows)
            for row, of_row in zip(rows, tokens, strict=True):
                assert batch.qo_indptr[row] <= of_row.min() <= of_row.max() < batch.qo_indptr[row + 1]
            attended += tokens.reshape(-1).tolist()
    assert sorted(attended) == list(range(batch.num_tokens))


@pytest.mark.parametrize("window", [None, 1, 8, 30, 57])
def test_the_size_of_a_query_block_changes_nothing(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    row = Row(token_ids=[0] * 40, begin=17, page_table=list(range(20)), wants_logits=False)
    batch = Batch.of([row], page_size=3, num_pages=NUM_PAGES, vocab_size=1)
    q, results = drawn(40, 6, HEAD_DIM), []
    for block in (1, 7, 40, 256):
        monkeypatch.setattr(torch_attention, "QUERY_BLOCK", block)
        view = drawn(NUM_PAGES, 2, 2, 3, HEAD_DIM, seed=1)
        turn = torch.ones(40, HEAD_DIM // 2)
        results.append(ops_of("fp32").attention(batch, 3, turn, 0 * turn, window=window).attend(q, view))
    for result in results[1:]:
        require_near(result, results[0], "fp32")


def test_pages_before_the_window_are_not_read() -> None:
    """What a window costs does not grow with the text before it."""
    rows = [
        Row(token_ids=[0] * qo_len, begin=kv_len - qo_len, page_table=list(range(20)), wants_logits=False)
        for qo_len, kv_len in ((1, 58), (1, 40), (9, 60))
    ]
    batch = Batch.of(rows, page_size=3, num_pages=NUM_PAGES, vocab_size=1)
    turn = torch.ones(batch.num_tokens, HEAD_DIM // 2)
    view, results = drawn(NUM_PAGES, 2, 2, 3, HEAD_DIM, seed=1), []
    q = drawn(batch.num_tokens, 6, HEAD_DIM)
    for poison in (0.0, torch.nan):
        view[:11] = poison  # the row of 40 sees [33, 40) with a window of 7
        results.append(ops_of("fp32").attention(batch, 3, turn, 0 * turn, window=7).attend(q, view))
    assert bool(results[0].isfinite().all()) and torch.equal(results[0], results[1])
