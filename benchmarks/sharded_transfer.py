"""How fast KV goes between instances of different shardings, beside equal ones, at the same bytes and message length.

Workload: 31 pages of 4 layers, 8 heads of 64 KiB each (128 tokens, head_dim 128, bf16): 62 MiB, every page once in a
seeded random order, over the plan's routes, one imm on each write. From 8 ranks to 8 each message is a whole page of
its rank, elsewhere a range of heads; between less than 8 ranks on both sides messages are longer. Each pair of degrees
in turn, `--runs` times after one run to warm up. Clock: CLOCK_MONOTONIC from the submit in the writer to the counter's
target in the reader. Cells are medians with the lowest and highest; the last column is of each run's figure over that
of 8 to 8 in the same run. Two processes, wherever the scheduler puts them.

    python benchmarks/sharded_transfer.py [--runs 15] [--transport mapped] [--digests]
"""

import argparse
import random

import numpy as np
from _endpoint import add_transport, positive
from _figures import spread
from fabric_rates import MEMORY_BYTES, Bench

from headrace.fabric.interface import PageWrites
from headrace.kvcache.layout import KVLayout
from headrace.kvcache.sharding import Sharding
from headrace.messenger.plan import Side, plan_transfer

KV = KVLayout(num_layers=4, num_kv_heads=8, page_size=128, head_dim=128, dtype="bf16")
NUM_PAGES = 31
EQUAL = (8, 8)
DEGREES = (EQUAL, (8, 4), (4, 8), (8, 2), (2, 8), (8, 1), (1, 8), (4, 4), (1, 1))


def side(tp: int) -> Side:
    sharding = Sharding(kv=KV, tp=tp)
    pool = sharding.pool(num_pages=NUM_PAGES, num_aux_slots=1, aux_slot_bytes=64)
    assert pool.total_bytes <= MEMORY_BYTES, f"{pool.total_bytes} bytes are more than the memory has"
    return Side(sharding=sharding, pool=pool)


def records(src_tp: int, dst_tp: int) -> list[PageWrites]:
    rng, positions = random.Random(7), np.arange(NUM_PAGES, dtype=np.int64)
    src_pages, dst_pages = (np.array(rng.sample(range(NUM_PAGES), NUM_PAGES), dtype=np.int64) for _ in range(2))
    plan = plan_transfer(side(src_tp), side(dst_tp), group=0, seed=0)
    return [route.writes(src_pages=src_pages, dst_pages=dst_pages, positions=positions) for route in plan.routes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, help="how many figures a cell is of", default=15)
    parser.add_argument("--digests", action="store_true", help="hash every page on the way")
    add_transport(parser)
    arguments = parser.parse_args()
    bench = Bench(digests=arguments.digests)
    writes = {degrees: records(*degrees) for degrees in DEGREES}
    figures: dict[tuple[int, int], list[float]] = {degrees: [] for degrees in DEGREES}
    for run in range(arguments.runs + 1):
        for degrees in DEGREES:
            rate = bench.written(arguments.transport, writes[degrees])
            if run > 0:
                figures[degrees].append(rate)
    bench.close()
    print(f"| {arguments.transport}: ranks | messages, KiB | GB/s | of 8 to 8 |")
    print("|---|---|---|---|")
    for degrees, rates in figures.items():
        [length] = {record.length for record in writes[degrees]}
        beside = [rate / equal for rate, equal in zip(rates, figures[EQUAL], strict=True)]
        print(f"| {degrees[0]} to {degrees[1]} | {length >> 10} | {spread(rates, 2)} | {spread(beside, 2)} |")


if __name__ == "__main__":
    main()
