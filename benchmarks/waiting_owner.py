"""What a waiting owner thread costs the compute on its core: nothing, or something?

One process, pinned to one core with all its threads. Workload: a memory-bound product, 64 MiB of fp32 weights times a
vector, as a decode step has it. Blocks of it run alternately with no fabric and with a fabric that waits on that core:
a peer connected, a counter armed, a step program waiting for its layer. Printed: the ratio of the two times (median of
the pairs, lowest and highest), and the processor time that the owner took meanwhile.

    python benchmarks/waiting_owner.py [--pairs 15] [--block-s 0.5] [--transport mapped]
"""

import argparse
import os
import statistics
import time
from contextlib import ExitStack

import numpy as np
import torch
from _endpoint import add_transport, endpoint, positive

from headrace.fabric.interface import Imm, Pages, PageWrites
from headrace.fabric.native import NativeFabric, Transport


def wait_for_everything(stack: ExitStack, transport: Transport) -> NativeFabric:
    """A writer with a program that waits for the layer counter, a reader with an armed counter."""
    writer, reader = endpoint(stack, transport), endpoint(stack, transport)
    descriptor = reader.grant(reader.add_peer(writer.address))
    peer = writer.add_peer(reader.address)
    writer.connect(peer, descriptor)
    reader.arm(Imm(1), 2)
    pages = Pages(offset=0, layer_stride=0, page_stride=4096, indices=np.arange(2, dtype=np.int64))
    writes = PageWrites(src=pages, dst=pages, positions=pages.indices, layer_begin=0, layer_end=1, length=4096)
    writer.submit_program(1, [(writer.open_transfer(peer, Imm(1)), writes)])
    writer.send(peer, b"so that the connection stands")
    return writer


def products_in(seconds: float, weights: torch.Tensor, vector: torch.Tensor) -> float:
    """Seconds per product."""
    count, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        torch.mv(weights, vector)
        count += 1
    return passed / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=positive, help="how many ratios the median is of", default=15)
    parser.add_argument("--block-s", type=float, default=0.5)
    add_transport(parser)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    weights, vector = torch.randn(4096, 4096), torch.randn(4096)
    products_in(1.0, weights, vector)
    ratios, owner_share = [], []
    for _ in range(arguments.pairs):
        alone = products_in(arguments.block_s, weights, vector)
        with ExitStack() as stack:
            writer = wait_for_everything(stack, arguments.transport)
            time.sleep(0.1)
            before, begin = writer.owner_cpu_ns(), time.monotonic_ns()
            beside = products_in(arguments.block_s, weights, vector)
            owner_share.append((writer.owner_cpu_ns() - before) / (time.monotonic_ns() - begin))
        ratios.append(beside / alone)
    print(f"time per product beside a waiting owner ({arguments.transport}) / alone:", end=" ")
    print(f"{statistics.median(ratios):.3f}", end=" ")
    print(f"({min(ratios):.3f}-{max(ratios):.3f}, {len(ratios)} pairs)")
    print(f"the owner's share of the core meanwhile: {statistics.median(owner_share):.4%} (max {max(owner_share):.4%})")


if __name__ == "__main__":
    main()
