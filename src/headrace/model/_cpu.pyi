"""The CPU kernels' contract, written by hand and checked against the built module by a test.

Arithmetic is bf16 products with fp32 sums. A row's result depends on nothing but that row: neither on the other rows of
a call, nor on how many there are, nor on the number of threads; the same instructions compute it in the same order.

Addresses are of the first byte of contiguous arrays that live during the call; nothing checks them. `kernels` does.
Calls release the GIL and are made by one thread at a time for one `Kernels`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def instruction_sets() -> list[str]:
    """Those of "amx_bf16" and "avx512_bf16" that this CPU and this build have, fastest first; none elsewhere."""

def packed_bytes(num_outputs: int, num_inputs: int) -> int:
    """Of a packed weight `[N, K]`: K is filled up to whole 32, N to whole 32, with zeros."""

def packed_gated_bytes(num_outputs: int, num_inputs: int) -> int:
    """Of gate and up, `[N, K]` each."""

def pack(packed: int, weight: int, first_output: int, num_outputs: int, num_inputs: int) -> None:
    """Place rows `[num_outputs, K] bf16` at [first_output, ..) of a packed weight, whose bytes were zero."""

def pack_gated(packed: int, gate: int, up: int, num_outputs: int, num_inputs: int) -> None: ...
def read(array: NDArray[np.uint8], passes: int) -> float:
    """Read all of it `passes` times, in order -> bytes per second of the fastest pass."""

class Kernels:
    """One set of instructions and the threads that share each call. The threads sleep when there is no work."""

    def __init__(self, instruction_set: str, cpus: Sequence[int], num_threads: int) -> None:
        """The caller is the first of `num_threads` threads; the others are pinned to `cpus[1:]` where it is not empty.
        Raises InputError."""

    @property
    def instruction_set(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def close(self) -> None:
        """End the threads. Idempotent."""

    def linear(self, weight: Weight, inputs: int, num_rows: int, out: int) -> None:
        """`[n, K] bf16` -> `[n, N] fp32`."""

    def linear_add(self, weight: Weight, inputs: int, num_rows: int, x: int) -> None: ...
    def gated_linear(self, weight: GatedWeight, inputs: int, num_rows: int, out: int) -> None:
        """`[n, K] bf16` -> `[n, N] bf16`."""

    def rms_norm(self, x: int, weight: int, num_rows: int, size: int, eps: float, out: int) -> None: ...
    def add_rms_norm(self, x: int, values: int, weight: int, num_rows: int, size: int, eps: float) -> None: ...
    def append(self, step: Step, qkv: int, view: int, q: int, norms: tuple[int, int, float] | None) -> None:
        """`norms`: addresses of q's and k's weights `[D] fp32`, and eps."""

    def attend(self, step: Step, q: int, view: int, out: int) -> None: ...

class Weight:
    """A packed weight's place and shape; keeps `packed` alive. Raises InputError when it is too small."""

    def __init__(
        self, packed: NDArray[np.uint8], num_outputs: int, num_inputs: int, bias: NDArray[np.float32] | None
    ) -> None: ...

class GatedWeight:
    def __init__(self, packed: NDArray[np.uint8], num_outputs: int, num_inputs: int, activation: str) -> None: ...

class Step:
    """What a step's attention needs, whatever the layer: copies of the batch's arrays, checked against the pool.

    Raises InputError for whatever would be read or written outside of a view `[P, G, 2, S, D] bf16`.
    """

    def __init__(
        self,
        *,
        heads: tuple[int, int, int],
        pool: tuple[int, int],
        scale: float,
        window: int,
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        qo_indptr: NDArray[np.int64],
        page_indptr: NDArray[np.int64],
        page_indices: NDArray[np.int64],
        cos: NDArray[np.float32],
        sin: NDArray[np.float32],
    ) -> None:
        """`heads`: H, G, D. `pool`: P, S. `window` 0: none. The other shapes as in `batch` and `ops`."""
