"""What a request's KV costs on the link: writes and bytes, who sends to whom, and how long the NICs take. Pure.

The writes are those of `messenger.plan`, which prefiller and decoder count by. A time is that of the rank whose NICs
have the most to carry, at their stated rate; how much of it a prefill hides is not known here.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.deploy.file import Deployment, Link
from headrace.deploy.memory import PoolMemory, sharding_of
from headrace.errors import InputError
from headrace.kvcache.layout import KVLayout
from headrace.messenger.aux import aux_slot_bytes
from headrace.messenger.plan import PromptPages, Side, TransferPlan, plan_transfer

LINE_RATE_BYTES = 32 << 10
"""Writes of so many bytes and more reach line rate on real NICs (DESIGN, "KV layout and sharded transfer")."""
DEFAULT_PROMPT_TOKENS = 4096

_PAGE_SIZES = 16  # suggested ones are multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """By one source rank, to `dst_rank`, of each page in each layer: one write."""

    src_rank: int
    dst_rank: int
    write_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTransfer:
    """Of a prompt of `prompt_tokens` that nobody has in a prefix index. `is_drawn`: which source ranks send it differs
    from request to request, `sent` shows one that may be. `line_rate_page_size`: the page_size whose writes would reach
    line rate over RDMA; None where they do, or no RDMA is there."""

    prompt_tokens: int
    num_pages: int
    write_bytes: int
    writes_per_layer: int
    bytes_per_layer: int
    num_writes: int
    num_bytes: int
    sent: tuple[Sent, ...]
    nic_pairs: tuple[tuple[int, int], ...]  # of a sending rank's with a taking one's, by turns
    is_drawn: bool
    busiest_bytes: int  # of one rank's NICs, of all ranks' on a cpu
    link_gbps: float
    time_s: float
    line_rate_page_size: int | None


def plan_request(
    deployment: Deployment, kv: KVLayout, memory: Mapping[str, PoolMemory], prompt_tokens: int | None = None
) -> RequestTransfer:
    """None: a prompt of 4,096 tokens, or of what fits. Raises InputError for one that does not."""
    longest = min(held.longest for held in memory.values())
    prompt_tokens = min(DEFAULT_PROMPT_TOKENS, longest) if prompt_tokens is None else prompt_tokens
    if prompt_tokens > longest:
        raise InputError("prompt_tokens", f"must be at most {longest:,}, which is what fits, is {prompt_tokens:,}")
    src = _side(deployment, kv, memory, "prefillers")
    dst = _side(deployment, kv, memory, "decoders")
    plan = plan_transfer(src, dst, group=0, seed=0)
    pages = PromptPages(num_tokens=prompt_tokens, cached_len=0, page_size=kv.page_size)
    sent = tuple(
        Sent(src_rank=route.src_rank, dst_rank=route.dst_rank, write_bytes=route.length) for route in plan.routes
    )
    num_bytes = pages.num_sent * kv.num_layers * sum(route.length for route in plan.routes)
    write_bytes = min(route.length for route in plan.routes)
    busiest = num_bytes if deployment.device.kind == "cpu" else _busiest(plan) * pages.num_sent * kv.num_layers
    link_gbps = deployment.link.nics * deployment.link.nic_gbps
    return RequestTransfer(
        prompt_tokens=prompt_tokens,
        num_pages=pages.num_sent,
        write_bytes=write_bytes,
        writes_per_layer=pages.num_sent * len(plan.routes),
        bytes_per_layer=num_bytes // kv.num_layers,
        num_writes=plan.num_messages(pages.num_sent),
        num_bytes=num_bytes,
        sent=sent,
        nic_pairs=tuple((nic, nic) for nic in range(deployment.link.nics)),
        is_drawn=plan != plan_transfer(src, dst, group=0, seed=1),
        busiest_bytes=busiest,
        link_gbps=link_gbps,
        time_s=busiest * 8 / (link_gbps * 1e9) + deployment.link.latency_us / 1e6,
        line_rate_page_size=_line_rate_page_size(deployment.link, write_bytes, kv.page_size),
    )


def _side(deployment: Deployment, kv: KVLayout, memory: Mapping[str, PoolMemory], name: str) -> Side:
    pool, held = deployment.pools[name], memory[name]
    sharding = sharding_of(pool, kv, name)
    layout = sharding.pool(
        num_pages=held.num_pages,
        num_aux_slots=2 * pool.dp * pool.max_running,
        aux_slot_bytes=aux_slot_bytes(held.longest, kv.page_size),
    )
    return Side(sharding=sharding, pool=layout)


def _busiest(plan: TransferPlan) -> int:
    """Bytes of one page in one layer that the rank which has most of them sends or takes."""
    loads: Counter[tuple[str, int]] = Counter()
    for route in plan.routes:
        loads["sends", route.src_rank] += route.length
        loads["takes", route.dst_rank] += route.length
    return max(loads.values())


def _line_rate_page_size(link: Link, write_bytes: int, page_size: int) -> int | None:
    if write_bytes >= LINE_RATE_BYTES or not {"efa", "verbs"} & set(link.transports):
        return None
    tokens = -(-LINE_RATE_BYTES * page_size // write_bytes)
    return -(-tokens // _PAGE_SIZES) * _PAGE_SIZES
