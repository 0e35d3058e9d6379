"""What the native kernels refuse, by the field that is wrong; and what the operations over them assert of tensors."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from native_worlds import (
    Way,
    angles,
    bf16,
    drawn,
    empty_view,
    native_ops,
    needs_kernels,
    paged,
    reference_ops,
    shape_of,
    zeros,
)

from headrace.errors import InputError
from headrace.model import _cpu
from headrace.model.native_ops import NativeOps, why_not_native

FASTEST = _cpu.instruction_sets()[0] if _cpu.instruction_sets() else "none"

PAGE_SIZE = 8
ROWS = [(10, 3), (23, 1), (0, 9)]


def step_arguments() -> dict[str, Any]:
    batch, num_pages = paged(ROWS, page_size=PAGE_SIZE)
    cos, sin = angles(batch, 32)
    return {
        "heads": (4, 2, 32),
        "pool": (num_pages, PAGE_SIZE),
        "scale": 0.25,
        "window": 0,
        "positions": batch.positions.copy(),
        "slots": batch.slots.copy(),
        "qo_indptr": batch.qo_indptr.copy(),
        "page_indptr": batch.page_indptr.copy(),
        "page_indices": batch.page_indices.copy(),
        "cos": cos.numpy(),
        "sin": sin.numpy(),
    }


def put(name: str, place: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name][place] = value

    return change


def replace(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update(changes)


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update({name: np.ascontiguousarray(change(arguments[name]))})


WRONG_STEPS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "heads that KV heads do not divide": ("heads", replace(heads=(5, 2, 32))),
    "no heads": ("heads", replace(heads=(0, 2, 32))),
    "no KV heads": ("heads", replace(heads=(4, 0, 32))),
    "KV heads below zero": ("heads", replace(heads=(4, -2, 32))),
    "heads beyond counting": ("heads", replace(heads=(1 << 62, 1, 32))),
    "a head_dim between": ("heads", replace(heads=(4, 2, 48))),
    "a head_dim of zero": ("heads", replace(heads=(4, 2, 0))),
    "a head_dim too large": ("heads", replace(heads=(4, 2, 544))),
    "no pages in the pool": ("pool", replace(pool=(0, PAGE_SIZE))),
    "pages without tokens": ("pool", replace(pool=(20, 0))),
    "a pool beyond counting": ("pool", replace(pool=(10, 1 << 62))),
    "a scale of zero": ("scale", replace(scale=0.0)),
    "a scale that is no number": ("scale", replace(scale=float("nan"))),
    "a window below zero": ("window", replace(window=-1)),
    "a page behind the pool": ("page_indices", put("page_indices", 3, 100)),
    "the first page behind the pool": ("page_indices", lambda a: put("page_indices", 3, a["pool"][0])(a)),
    "a page below zero": ("page_indices", put("page_indices", -1, -1)),
    "a row with too few pages": ("page_indices", put("page_indptr", 1, 1)),
    "fewer pages than the rows say": ("page_indptr", changed("page_indices", lambda pages: pages[:-1])),
    "more pages than the rows say": ("page_indptr", changed("page_indices", lambda pages: np.append(pages, 0))),
    "page_indptr that falls": ("page_indptr", put("page_indptr", 2, 1)),
    "page_indptr that stands still": ("page_indptr", put("page_indptr", 2, 2)),
    "page_indptr that begins late": ("page_indptr", put("page_indptr", 0, 1)),
    "page_indptr of fewer rows": ("page_indptr", changed("page_indptr", lambda indptr: indptr[[0, 1, 3]])),
    "qo_indptr that falls": ("qo_indptr", put("qo_indptr", 2, 2)),
    "qo_indptr with a row of no tokens": ("qo_indptr", put("qo_indptr", 2, 3)),
    "qo_indptr that begins below zero": ("qo_indptr", put("qo_indptr", 0, -1)),
    "qo_indptr whose rises overflow": ("qo_indptr", replace(qo_indptr=np.array([0, 2**63 - 1, -(2**63), -1, 13]))),
    "qo_indptr that ends early": ("qo_indptr", put("qo_indptr", -1, 12)),
    "qo_indptr that ends late": ("qo_indptr", put("qo_indptr", -1, 14)),
    "qo_indptr of no rows": ("qo_indptr", changed("qo_indptr", lambda indptr: indptr[:1])),
    "an empty qo_indptr": ("qo_indptr", changed("qo_indptr", lambda indptr: indptr[:0])),
    "positions that leave one out": ("positions", put("positions", 2, 13)),
    "positions below zero": ("positions", put("positions", 3, -1)),
    "positions too far": ("positions", put("positions", 3, 1 << 30)),
    "a position for which there is no page": ("page_indices", put("positions", 3, 24)),
    "slots of other tokens": ("slots", changed("slots", np.flip)),
    "a slot behind the pool": ("slots", put("slots", 5, 1 << 40)),
    "a slot below zero": ("slots", put("slots", 5, -1)),
    "fewer slots than tokens": ("slots", changed("slots", lambda slots: slots[:-1])),
    "angles of too few tokens": ("cos", changed("cos", lambda cos: cos[:-1])),
    "angles of too few dimensions": ("cos", changed("cos", lambda cos: cos[:, :-1])),
    "sines of too few tokens": ("cos", changed("sin", lambda sin: sin[:-1])),
}


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_a_step_that_would_leave_its_arrays_or_the_pool_is_refused_by_field(wrong: str) -> None:
    field, change = WRONG_STEPS[wrong]
    arguments = step_arguments()
    _cpu.Step(**arguments)
    change(arguments)
    with pytest.raises(InputError) as refused:
        _cpu.Step(**arguments)
    assert refused.value.field == field


@needs_kernels
def test_a_step_keeps_copies_of_what_it_checked() -> None:
    """Arrays that change behind its back would lead a kernel out of the pool."""
    batch, num_pages = paged(ROWS, page_size=PAGE_SIZE)
    shape, cos_sin = shape_of(), angles(batch, 32)
    qkv = drawn(batch.num_tokens, 4 * 32)
    view = bf16(drawn(num_pages, 1, 2, PAGE_SIZE, 32, seed=1))
    expected = view.float()
    with native_ops(Way(FASTEST, 1), shape) as ops:
        attention = ops.attention(batch, PAGE_SIZE, *cos_sin)
        reference = reference_ops(shape).attention(batch, PAGE_SIZE, *cos_sin).append(qkv, expected)
        for array in (batch.slots, batch.page_indices, batch.positions, batch.qo_indptr, batch.page_indptr):
            array[:] = 1 << 40
        for turns in cos_sin:
            turns.fill_(torch.nan)
        q = attention.append(qkv, view)
    torch.testing.assert_close(q.float(), reference, rtol=0.01, atol=0.01)
    torch.testing.assert_close(view.float(), expected, rtol=0.01, atol=0.01)


# ---- weights -------------------------------------------------------------------------------------------------------


def test_a_packed_weight_takes_whole_panels_of_whole_steps() -> None:
    assert _cpu.packed_bytes(1, 1) == 32 * 32 * 2
    assert _cpu.packed_bytes(33, 33) == 64 * 64 * 2
    assert _cpu.packed_gated_bytes(16, 32) == 32 * 32 * 2
    assert _cpu.packed_gated_bytes(17, 33) == 64 * 64 * 2


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(0, 4), (4, 0), (-1, 4), (4, -1)])
def test_a_weight_has_outputs_and_inputs(num_outputs: int, num_inputs: int) -> None:
    for refuse in (
        lambda: _cpu.packed_bytes(num_outputs, num_inputs),
        lambda: _cpu.packed_gated_bytes(num_outputs, num_inputs),
        lambda: _cpu.Weight(zeros(4096), num_outputs, num_inputs, None),
        lambda: _cpu.GatedWeight(zeros(4096), num_outputs, num_inputs, "silu"),
    ):
        with pytest.raises(InputError) as refused:
            refuse()
        assert refused.value.field == "weight"


def off_by_two(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return zeros(num_bytes + 2)[2:]


@pytest.mark.parametrize(
    "packed", [zeros(2 * 2048 - 1), zeros(0), off_by_two(2 * 2048)], ids=["a byte too short", "empty", "unaligned"]
)
def test_packed_memory_is_large_enough_and_aligned(packed: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    for refuse in (
        lambda: _cpu.Weight(packed, 33, 7, None),
        lambda: _cpu.GatedWeight(packed, 17, 7, "silu"),
    ):
        with pytest.raises(InputError) as refused:
            refuse()
        assert refused.value.field == "packed"
    _cpu.Weight(zeros(2 * 2048), 33, 7, None)
    _cpu.GatedWeight(zeros(2 * 2048), 17, 7, "silu")


@pytest.mark.parametrize("size", [0, 32, 34])
def test_a_bias_has_a_number_for_each_output(size: int) -> None:
    with pytest.raises(InputError) as refused:
        _cpu.Weight(zeros(2 * 2048), 33, 7, np.zeros(size, np.float32))
    assert refused.value.field == "bias"


@pytest.mark.parametrize("activation", ["", "relu", "SILU", "gelu"])
def test_an_activation_is_one_of_the_known(activation: str) -> None:
    with pytest.raises(InputError) as refused:
        _cpu.GatedWeight(zeros(2048), 3, 7, activation)
    assert refused.value.field == "activation" and repr(activation) in str(refused.value)


# ---- kernels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "amx", "avx2", "AVX512_BF16"])
def test_an_instruction_set_is_one_that_the_cpu_has(name: str) -> None:
    with pytest.raises(InputError) as refused:
        _cpu.Kernels(name, (), 1)
    assert refused.value.field == "instruction_set" and repr(name) in str(refused.value)


@needs_kernels
@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_threads_are_at_least_one_and_not_absurdly_many(num_threads: int) -> None:
    with pytest.raises(InputError) as refused:
        _cpu.Kernels(FASTEST, (), num_threads)
    assert refused.value.field == "threads" and str(num_threads) in str(refused.value)


@needs_kernels
@pytest.mark.parametrize("cpu", [-1, 1023, 1024, 100_000])
def test_threads_run_on_cpus_that_are_there(cpu: int) -> None:
    with pytest.raises(InputError) as refused:
        _cpu.Kernels(FASTEST, (0, cpu), 2)
    assert refused.value.field == "cpus" and str(cpu) in str(refused.value)


def test_memory_is_read_at_least_once() -> None:
    with pytest.raises(InputError) as refused:
        _cpu.read(zeros(64), 0)
    assert refused.value.field == "passes"
    assert _cpu.read(zeros(1 << 16), 2) > 0


@pytest.mark.parametrize("head_dim", [16, 48, 544])
def test_a_model_without_native_kernels_is_told_why(head_dim: int) -> None:
    shape = shape_of(head_dim=head_dim)
    reason = why_not_native(shape)
    assert reason is not None
    if _cpu.instruction_sets():
        assert f"is {head_dim}" in reason
        with closing(_cpu.Kernels(FASTEST, (), 1)) as kernels, pytest.raises(InputError) as refused:
            NativeOps(shape, kernels, zeros)
        assert refused.value.field == "kernels"


def test_a_cpu_without_native_kernels_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu, "instruction_sets", list)
    assert why_not_native(shape_of()) == "this CPU has no avx512_bf16"


# ---- tensors -------------------------------------------------------------------------------------------------------

WRONG_CALLS: dict[str, Callable[[NativeOps], object]] = {
    "inputs of another width": lambda ops: ops.linear(bf16(drawn(5, 8))).apply(bf16(drawn(3, 7))),
    "inputs in fp32": lambda ops: ops.linear(bf16(drawn(5, 8))).apply(drawn(3, 8)),
    "inputs with gaps": lambda ops: ops.linear(bf16(drawn(5, 8))).apply(bf16(drawn(3, 16))[:, ::2]),
    "a weight in fp32": lambda ops: ops.linear(drawn(5, 8)),
    "weights of two widths": lambda ops: ops.linear(bf16(drawn(5, 8)), bf16(drawn(5, 9))),
    "a residual of another width": lambda ops: ops.linear(bf16(drawn(5, 8))).add_to(drawn(3, 6), bf16(drawn(3, 8))),
    "a residual of other rows": lambda ops: ops.linear(bf16(drawn(5, 8))).add_to(drawn(2, 5), bf16(drawn(3, 8))),
    "a residual in bf16": lambda ops: ops.linear(bf16(drawn(5, 8))).add_to(bf16(drawn(3, 5)), bf16(drawn(3, 8))),
    "a gate of other width": lambda ops: ops.gated_linear(bf16(drawn(5, 8)), bf16(drawn(5, 9))),
    "a gate of other rows": lambda ops: ops.gated_linear(bf16(drawn(5, 8)), bf16(drawn(4, 8))),
    "a gate in fp32": lambda ops: ops.gated_linear(drawn(5, 8), drawn(5, 8)),
    "gated inputs of another width": lambda ops: ops.gated_linear(*[bf16(drawn(5, 8))] * 2).apply(bf16(drawn(3, 9))),
    "a norm of another width": lambda ops: ops.rms_norm(drawn(3, 8), drawn(7), 1e-5),
    "a norm of bf16": lambda ops: ops.rms_norm(bf16(drawn(3, 8)), drawn(8), 1e-5),
    "a norm added to another width": lambda ops: ops.add_rms_norm(drawn(3, 9), drawn(3, 8), drawn(8), 1e-5),
    "a norm added to other rows": lambda ops: ops.add_rms_norm(drawn(2, 8), drawn(3, 8), drawn(8), 1e-5),
    "qkv of another width": lambda ops: appended(ops, drawn(13, 4 * 32 - 1)),
    "qkv of other tokens": lambda ops: appended(ops, drawn(12, 4 * 32)),
    "a norm's weight in bf16": lambda ops: ops.rms_norm(drawn(3, 8), bf16(drawn(8)), 1e-5),
    "an added norm's weight in bf16": lambda ops: ops.add_rms_norm(drawn(3, 8), drawn(3, 8), bf16(drawn(8)), 1e-5),
    "q in fp32": lambda ops: attended(ops, drawn(13, 2, 32)),
    "q with gaps": lambda ops: attended(ops, bf16(drawn(13, 4, 32))[:, ::2]),
    "q of other tokens": lambda ops: attended(ops, bf16(drawn(12, 2, 32))),
    "a view in fp32": lambda ops: attended(ops, bf16(drawn(13, 2, 32)), lambda view: view.float()),
    "a view with gaps": lambda ops: attended(ops, bf16(drawn(13, 2, 32)), lambda view: view.transpose(0, 1)),
    "a view of other pages": lambda ops: attended(ops, bf16(drawn(13, 2, 32)), lambda view: view[:, :, :, :4]),
    "qkv in bf16": lambda ops: appended(ops, bf16(drawn(13, 4 * 32))),
}


def appended(ops: NativeOps, qkv: torch.Tensor) -> torch.Tensor:
    batch, num_pages = paged(ROWS, page_size=PAGE_SIZE)
    view = empty_view(num_pages, shape_of(), PAGE_SIZE)
    return ops.attention(batch, PAGE_SIZE, *angles(batch, 32)).append(qkv, view)


def attended(
    ops: NativeOps, q: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor] = lambda view: view
) -> torch.Tensor:
    batch, num_pages = paged(ROWS, page_size=PAGE_SIZE)
    view = empty_view(num_pages, shape_of(), PAGE_SIZE)
    return ops.attention(batch, PAGE_SIZE, *angles(batch, 32)).attend(q, change(view))


@needs_kernels
@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_tensors_of_another_shape_or_kind_never_reach_a_kernel(wrong: str) -> None:
    with native_ops(Way(FASTEST, 1)) as ops, pytest.raises(AssertionError):
        WRONG_CALLS[wrong](ops)
