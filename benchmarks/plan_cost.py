"""How long a ticket's plan takes: the routes, and what both sides make of them for 100,000 pages of 61 layers.

Clock: perf_counter around planning and the records of both halves (the prefiller's writes, the decoder's reads), page
tables given as the tuples that messages carry; nothing is cached. Cells are medians with the lowest and highest.

    python benchmarks/plan_cost.py [--runs 15] [--pages 100000]
"""

import argparse
import random
import time

import numpy as np
from _endpoint import positive
from _figures import spread

from headrace.kvcache.layout import KVLayout
from headrace.kvcache.sharding import Sharding
from headrace.messenger.plan import Side, plan_transfer

GQA = KVLayout(num_layers=61, num_kv_heads=8, page_size=64, head_dim=128, dtype="bf16")
MLA = KVLayout(num_layers=61, num_kv_heads=1, page_size=64, head_dim=576, dtype="bf16", kind="mla")
PAIRS = {
    "8 heads, tp 8 to tp 8": (Sharding(kv=GQA, tp=8), Sharding(kv=GQA, tp=8)),
    "8 heads, tp 8 to tp 2": (Sharding(kv=GQA, tp=8), Sharding(kv=GQA, tp=2)),
    "8 heads, tp 4 to tp 16": (Sharding(kv=GQA, tp=4), Sharding(kv=GQA, tp=16)),
    "mla, tp 8 to dp 8": (Sharding(kv=MLA, tp=8), Sharding(kv=MLA, dp=8)),
}


def planned_ms(src: Side, dst: Side, src_table: tuple[int, ...], dst_table: tuple[int, ...]) -> float:
    begin = time.perf_counter()
    plan = plan_transfer(src, dst, group=0, seed=5)
    positions = np.arange(len(src_table), dtype=np.int64)
    src_pages, dst_pages, landing = (np.array(table, dtype=np.int64) for table in (src_table, dst_table, dst_table))
    for route in plan.routes:
        route.writes(src_pages=src_pages, dst_pages=dst_pages, positions=positions)
        route.reads(landing, positions)
    plan.num_messages(len(src_table))
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=positive, help="how many figures a cell is of", default=15)
    parser.add_argument("--pages", type=positive, help="of the ticket", default=100_000)
    arguments = parser.parse_args()
    rng = random.Random(7)
    tables = [tuple(rng.sample(range(arguments.pages), arguments.pages)) for _ in range(2)]
    print(f"| {arguments.pages:,} pages | routes | ms: median (lowest-highest) |")
    print("|---|---|---|")
    for name, shardings in PAIRS.items():
        src, dst = (
            Side(
                sharding=sharding,
                pool=sharding.pool(num_pages=arguments.pages, num_aux_slots=1, aux_slot_bytes=64),
            )
            for sharding in shardings
        )
        figures = [planned_ms(src, dst, tables[0], tables[1]) for _ in range(arguments.runs)]
        num_routes = len(plan_transfer(src, dst, group=0, seed=5).routes)
        print(f"| {name} | {num_routes} | {spread(figures, 2)} |")


if __name__ == "__main__":
    main()
