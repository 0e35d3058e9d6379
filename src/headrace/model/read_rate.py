"""How fast this machine's threads read memory: the bound of a decode step, which reads all weights once.

Owns nothing. Takes a second; only where the native module is built.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headrace.model import _cpu

_ROUNDS = 5


def read_rate(num_bytes: int, *, num_threads: int) -> float:
    """Bytes per second, the fastest of some rounds, in which so many bytes are read by all threads together, in order
    and each its part."""
    parts = np.array_split(np.ones(num_bytes, dtype=np.uint8), num_threads)
    with ThreadPoolExecutor(num_threads, "read") as threads:
        return max(_rate(threads, parts) for _ in range(_ROUNDS))


def _rate(threads: ThreadPoolExecutor, parts: list[np.ndarray]) -> float:
    began_ns = time.monotonic_ns()
    list(threads.map(_cpu.read, parts, [1] * len(parts)))
    return sum(part.nbytes for part in parts) / (time.monotonic_ns() - began_ns) * 1e9
