"""An endpoint over a memory of its own, for the benchmarks that need no more, and options that several have."""

import argparse
import os
from contextlib import ExitStack

from headrace.fabric.native import NativeFabric, Transport

MEMORY_BYTES = 4 << 20
TRANSPORTS: tuple[Transport, ...] = ("mapped", "tcp")


def endpoint(stack: ExitStack, transport: Transport) -> NativeFabric:
    fd = os.memfd_create("headrace-bench", os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    os.ftruncate(fd, MEMORY_BYTES)
    fabric = NativeFabric(fd, MEMORY_BYTES, transports=(transport,))
    stack.callback(fabric.close)
    return fabric


def add_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0], help="how KV travels")


def positive(word: str) -> int:
    """An argparse type."""
    number = int(word)
    if number < 1:
        raise ValueError(word)
    return number
