"""The operations by our own CPU kernels, `headrace.model._cpu`: bf16 products, fp32 sums, bit-identical rows.

Owns packed weights, in a memory that `packed` may share with other processes, and a step's indices. A row's result
depends on that row alone, neither on what is computed beside it nor on where its chunks end. Runs on the model thread;
kernels let the GIL go. Addresses are passed, which nothing checks below: what is passed has been made or checked here.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.model import _cpu
from headrace.model.batch import Batch
from headrace.model.ops import Activation, HeadNorms
from headrace.model.shape import ModelShape

Region = Callable[[int], NDArray[np.uint8]]
"""So many bytes for packed weights, 64-byte aligned: zeros, or where it is read-only what was packed there before."""

_MOST_DIMS = 512


def why_not_native(shape: ModelShape) -> str | None:
    """Why this CPU or this model has no native kernels; None where it has."""
    if not _cpu.instruction_sets():
        return "this CPU has no avx512_bf16"
    if shape.latent:
        return "attention over latents has no kernel"
    if shape.head_dim % 32 or shape.head_dim > _MOST_DIMS:
        return f"head_dim must be a multiple of 32 up to {_MOST_DIMS}, is {shape.head_dim}"
    return None


class NativeLinear:
    def __init__(self, kernels: _cpu.Kernels, weight: _cpu.Weight, num_inputs: int, num_outputs: int) -> None:
        self._kernels = kernels
        self._weight = weight
        self._num_inputs = num_inputs
        self._num_outputs = num_outputs

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        num_rows = _rows_of(inputs, self._num_inputs, torch.bfloat16)
        out = torch.empty(num_rows, self._num_outputs)
        self._kernels.linear(self._weight, inputs.data_ptr(), num_rows, out.data_ptr())
        return out

    def add_to(self, x: torch.Tensor, inputs: torch.Tensor) -> None:
        num_rows = _rows_of(inputs, self._num_inputs, torch.bfloat16)
        assert _rows_of(x, self._num_outputs, torch.float32) == num_rows, f"{x.shape} for {num_rows} rows"
        self._kernels.linear_add(self._weight, inputs.data_ptr(), num_rows, x.data_ptr())


class NativeGatedLinear:
    def __init__(self, kernels: _cpu.Kernels, weight: _cpu.GatedWeight, num_inputs: int, num_outputs: int) -> None:
        self._kernels = kernels
        self._weight = weight
        self._num_inputs = num_inputs
        self._num_outputs = num_outputs

    def apply(self, inputs: torch.Tensor) -> torch.Tensor:
        num_rows = _rows_of(inputs, self._num_inputs, torch.bfloat16)
        out = torch.empty(num_rows, self._num_outputs, dtype=torch.bfloat16)
        self._kernels.gated_linear(self._weight, inputs.data_ptr(), num_rows, out.data_ptr())
        return out


class NativeOps:
    """For the heads of `shape`, in bf16. `region` yields the memory of packed weights, in the order of packing."""

    dtype = torch.bfloat16

    def __init__(self, shape: ModelShape, kernels: _cpu.Kernels, region: Region) -> None:
        reason = why_not_native(shape)
        if reason is not None:
            raise InputError("kernels", f"native ones do not run this model here: {reason}")
        self._heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._scale = shape.attention_scale
        self._kernels = kernels
        self._region = region

    def linear(self, *weights: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
        num_inputs, num_outputs = weights[0].shape[1], sum(len(weight) for weight in weights)
        packed = self._region(_cpu.packed_bytes(num_outputs, num_inputs))
        if packed.flags.writeable:
            first = 0
            for weight in weights:
                rows = _rows_of(weight, num_inputs, torch.bfloat16)
                _cpu.pack(packed.ctypes.data, weight.data_ptr(), first, rows, num_inputs)
                first += rows
        biases = None if bias is None else bias.float().numpy()
        return NativeLinear(
            self._kernels, _cpu.Weight(packed, num_outputs, num_inputs, biases), num_inputs, num_outputs
        )

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation = "silu") -> NativeGatedLinear:
        num_outputs, num_inputs = gate.shape
        packed = self._region(_cpu.packed_gated_bytes(num_outputs, num_inputs))
        if packed.flags.writeable:
            assert _rows_of(gate, num_inputs, torch.bfloat16) == _rows_of(up, num_inputs, torch.bfloat16)
            _cpu.pack_gated(packed.ctypes.data, gate.data_ptr(), up.data_ptr(), num_outputs, num_inputs)
        weight = _cpu.GatedWeight(packed, num_outputs, num_inputs, activation)
        return NativeGatedLinear(self._kernels, weight, num_inputs, num_outputs)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = len(weight)
        num_rows = _rows_of(x, size, torch.float32)
        _require(weight, (size,), torch.float32)
        out = torch.empty(num_rows, size, dtype=torch.bfloat16)
        self._kernels.rms_norm(x.data_ptr(), weight.data_ptr(), num_rows, size, eps, out.data_ptr())
        return out

    def add_rms_norm(self, x: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        size = len(weight)
        num_rows = _rows_of(x, size, torch.float32)
        assert _rows_of(values, size, torch.float32) == num_rows, f"{values.shape} for {num_rows} rows"
        _require(weight, (size,), torch.float32)
        self._kernels.add_rms_norm(x.data_ptr(), values.data_ptr(), weight.data_ptr(), num_rows, size, eps)

    def attention(
        self, batch: Batch, page_size: int, cos: torch.Tensor, sin: torch.Tensor, *, window: int | None = None
    ) -> "NativeAttention":
        step = _cpu.Step(
            heads=self._heads,
            pool=(_num_pages(batch), page_size),
            scale=self._scale,
            window=window or 0,
            positions=batch.positions,
            slots=batch.slots,
            qo_indptr=batch.qo_indptr,
            page_indptr=batch.page_indptr,
            page_indices=batch.page_indices,
            cos=cos.contiguous().numpy(),
            sin=sin.contiguous().numpy(),
        )
        return NativeAttention(self._kernels, step, self._heads, num_tokens=batch.num_tokens, page_size=page_size)


class NativeAttention:
    def __init__(
        self, kernels: _cpu.Kernels, step: _cpu.Step, heads: tuple[int, int, int], *, num_tokens: int, page_size: int
    ) -> None:
        self._kernels = kernels
        self._step = step
        self._num_tokens = num_tokens
        self._page_size = page_size
        self._num_heads, self._num_kv_heads, self._head_dim = heads

    def append(self, qkv: torch.Tensor, view: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        width = (self._num_heads + 2 * self._num_kv_heads) * self._head_dim
        assert _rows_of(qkv, width, torch.float32) == self._num_tokens, f"{qkv.shape} for {self._num_tokens} tokens"
        q = torch.empty(self._num_tokens, self._num_heads, self._head_dim, dtype=torch.bfloat16)
        self._require_view(view)
        for weight in () if norms is None else (norms.q, norms.k):
            _require(weight, (self._head_dim,), torch.float32)
        weights = None if norms is None else (norms.q.data_ptr(), norms.k.data_ptr(), norms.eps)
        self._kernels.append(self._step, qkv.data_ptr(), view.data_ptr(), q.data_ptr(), weights)
        return q

    def attend(self, q: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        _require(q, (self._num_tokens, self._num_heads, self._head_dim), torch.bfloat16)
        self._require_view(view)
        out = torch.empty(self._num_tokens, self._num_heads * self._head_dim, dtype=torch.bfloat16)
        self._kernels.attend(self._step, q.data_ptr(), view.data_ptr(), out.data_ptr())
        return out

    def _require_view(self, view: torch.Tensor) -> None:
        """The number of pages is the model's to check: it is the same for all layers."""
        _require(view, (len(view), self._num_kv_heads, 2, self._page_size, self._head_dim), torch.bfloat16)


def _num_pages(batch: Batch) -> int:
    """The model has checked that the views hold them all."""
    return int(batch.page_indices.max(initial=0)) + 1


def _require(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    right = tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous()
    assert right, f"{tensor.shape} {tensor.dtype} for {shape}"


def _rows_of(tensor: torch.Tensor, width: int, dtype: torch.dtype) -> int:
    num_rows, found = tensor.shape
    assert found == width and tensor.dtype is dtype and tensor.is_contiguous(), f"{tensor.shape} {tensor.dtype}"
    return num_rows
