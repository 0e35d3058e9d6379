"""An endpoint over a memory of its own, for the benchmarks that need no more."""

import os
from contextlib import ExitStack

from headrace.fabric.native import NativeFabric

MEMORY_BYTES = 4 << 20


def endpoint(stack: ExitStack) -> NativeFabric:
    fd = os.memfd_create("headrace-bench")
    stack.callback(os.close, fd)
    os.ftruncate(fd, MEMORY_BYTES)
    fabric = NativeFabric(fd, MEMORY_BYTES)
    stack.callback(fabric.close)
    return fabric


def positive(word: str) -> int:
    """An argparse type."""
    number = int(word)
    if number < 1:
        raise ValueError(word)
    return number
