"""A process that calls every kernel on arrays with forbidden memory on one side, then on the other: a read or a write
there ends it. Sanitizers do not see those by masks and tiles. Prints the number of calls at the end."""

import ctypes
import itertools
import mmap
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.model import _cpu

PAGE = mmap.PAGESIZE
FORBIDDEN = 0  # PROT_NONE, which mmap does not name
ROWS = (1, 2, 11, 12, 13, 15, 16, 17, 31, 32, 33, 47, 64, 100, 400)
SIZES = [(1, 1), (15, 31), (16, 32), (17, 33), (33, 2), (40, 65), (64, 64)]

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Guarded:
    """Arrays of zeros, right behind forbidden memory or, `at_end`, right before it."""

    def __init__(self, at_end: bool) -> None:
        self._at_end = at_end

    def __call__(self, size: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
        num_bytes = int(np.prod(size)) * np.dtype(dtype).itemsize
        whole = -(-num_bytes // PAGE) * PAGE
        memory = mmap.mmap(-1, whole + 2 * PAGE)
        raw = np.frombuffer(memory, np.uint8)
        for begin in (raw.ctypes.data, raw.ctypes.data + PAGE + whole):
            assert libc.mprotect(begin, PAGE, FORBIDDEN) == 0, ctypes.get_errno()
        begin = PAGE + (whole - num_bytes if self._at_end else 0)
        return raw[begin : begin + num_bytes].view(dtype).reshape(size)


def at(array: NDArray[Any]) -> int:
    return array.ctypes.data


def linear_calls(kernels: _cpu.Kernels, guarded: Guarded) -> int:
    for n, k in SIZES:
        weight, other = guarded((n, k), np.uint16), guarded((n, k), np.uint16)
        packed = guarded(_cpu.packed_bytes(n, k), np.uint8)
        _cpu.pack(at(packed), at(weight), 0, n, k)
        gated = guarded(_cpu.packed_gated_bytes(n, k), np.uint8)
        _cpu.pack_gated(at(gated), at(weight), at(other), n, k)
        linear = _cpu.Weight(packed, n, k, guarded(n, np.float32))
        gate = _cpu.GatedWeight(gated, n, k, "gelu_tanh")
        for rows in ROWS:
            inputs, out = guarded((rows, k), np.uint16), guarded((rows, n), np.float32)
            out_of_gate = guarded((rows, n), np.uint16)
            kernels.linear(linear, at(inputs), rows, at(out))
            kernels.linear_add(linear, at(inputs), rows, at(out))
            kernels.gated_linear(gate, at(inputs), rows, at(out_of_gate))
    return 3 * len(SIZES) * len(ROWS)


def norm_calls(kernels: _cpu.Kernels, guarded: Guarded) -> int:
    sizes = (1, 15, 16, 17, 33, 64, 65, 127)
    for size, rows in itertools.product(sizes, (1, 3, 32, 40)):
        x, values, weight = (guarded(each, np.float32) for each in ((rows, size), (rows, size), size))
        out = guarded((rows, size), np.uint16)
        kernels.rms_norm(at(x), at(weight), rows, size, 1e-5, at(out))
        kernels.add_rms_norm(at(x), at(values), at(weight), rows, size, 1e-5)
    return 2 * 4 * len(sizes)


def attention_calls(kernels: _cpu.Kernels, guarded: Guarded) -> int:
    """A row's last page is the pool's last, or its first the pool's first; either may end in the middle."""
    batches = ([(0, 1)], [(16, 1)], [(0, 33)], [(40, 1), (0, 5)], [(70, 30), (31, 1)])
    choices = (batches, (1, 3, 16, 24, 32), (0, 20), (32, 96), ((1, 1), (6, 2), (17, 1)), (False, True))
    num_calls = 0
    for rows, page_size, window, dim, (heads, kv_heads), falling in itertools.product(*choices):
        needed = [-(-(begin + count) // page_size) for begin, count in rows]
        pages = np.arange(sum(needed))[:: -1 if falling else 1]
        positions = np.concatenate([np.arange(begin, begin + count) for begin, count in rows])
        page_indptr, num_tokens = np.cumsum([0, *needed]), len(positions)
        row_of = np.repeat(np.arange(len(rows)), [count for _, count in rows])
        slots = pages[page_indptr[row_of] + positions // page_size] * page_size + positions % page_size
        step = _cpu.Step(
            heads=(heads, kv_heads, dim),
            pool=(len(pages), page_size),
            scale=0.1,
            window=window,
            positions=positions,
            slots=slots,
            qo_indptr=np.cumsum([0, *(count for _, count in rows)]),
            page_indptr=page_indptr,
            page_indices=pages.copy(),
            cos=np.ones((num_tokens, dim // 2), np.float32),
            sin=np.zeros((num_tokens, dim // 2), np.float32),
        )
        view = guarded((len(pages), kv_heads, 2, page_size, dim), np.uint16)
        qkv = guarded((num_tokens, heads + 2 * kv_heads, dim), np.float32)
        q, out = guarded((num_tokens, heads, dim), np.uint16), guarded((num_tokens, heads, dim), np.uint16)
        norm = guarded(dim, np.float32)
        kernels.append(step, at(qkv), at(view), at(q), (at(norm), at(norm), 1e-5))
        kernels.attend(step, at(q), at(view), at(out))
        num_calls += 2
    return num_calls


def main() -> None:
    num_calls = 0
    for name, at_end in itertools.product(_cpu.instruction_sets(), (False, True)):
        with closing(_cpu.Kernels(name, (), 2)) as kernels:
            for calls in (linear_calls, norm_calls, attention_calls):
                num_calls += calls(kernels, Guarded(at_end))
    print(num_calls)


if __name__ == "__main__":
    main()
