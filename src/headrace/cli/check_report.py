"""What `headrace check` shows of a deployment that fits: tables that can be read as they are. Pure."""

from collections.abc import Iterator

from headrace.cli.tables import aligned
from headrace.deploy.check import Checked
from headrace.deploy.file import Deployment, Pool
from headrace.deploy.memory import PoolMemory
from headrace.deploy.transfer import LINE_RATE_BYTES, RequestTransfer


def rendered(checked: Checked, request: RequestTransfer, file: str) -> str:
    """Markdown."""
    lines = [
        f"{file} fits.",
        "",
        *_head(checked),
        "",
        *aligned(list(_memory_rows(checked))),
        "",
        f"A prompt of {request.prompt_tokens:,} tokens that is in no prefix index, from prefiller to decoder:",
        "",
        *aligned(list(_transfer_rows(request))),
        "",
        *_link(checked.deployment, request),
        "",
        *aligned(list(_sender_rows(request))),
        "",
        *_below_senders(checked.deployment, request),
        *_list("Worth knowing", tuple(_remarks(request))),
        *_list("Taken for granted", checked.assumed),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _head(checked: Checked) -> Iterator[str]:
    deployment, device = checked.deployment, checked.deployment.device
    yield f"model: {deployment.model}, {checked.architecture}, up to {checked.max_model_len:,} tokens"
    form = "bf16" if checked.weight_block_size is None else "blocks of FP8, the rest in bf16"
    yield f"weights: {_gb(checked.weight_bytes)} GB in {form}"
    yield f"KV: {checked.token_bytes:,} bytes a token in {deployment.dtype}, pages of {deployment.page_size} tokens"
    for name, pool in deployment.pools.items():
        degrees = _parallel(pool, has_experts=checked.has_experts)
        yield f"{name}: {pool.count} x {degrees}, on {_some(checked.pools[name].num_hosts, 'host')}"
    where = "of the host" if device.kind == "cpu" else f"of each device, {device.per_host} on a host"
    yield f"memory: {_gb(device.memory_bytes)} GB {where}, {device.usable:.0%} of it usable ({device.kind})"


def _parallel(pool: Pool, *, has_experts: bool) -> str:
    """As people write it: TP8, DP8/EP8."""
    degrees = (("TP", pool.tp), ("DP", pool.dp), ("EP", pool.num_ranks if has_experts else 1))
    return "/".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "one rank"


def _memory_rows(checked: Checked) -> Iterator[list[str]]:
    pools, device = checked.pools.values(), checked.deployment.device
    yield ["", *checked.pools]
    yield ["weights of a rank, GB", *(_gb(pool.weight_bytes) for pool in pools)]
    yield ["KV pages of a rank, GB", *(_gb(pool.kv_bytes) for pool in pools)]
    if device.kind == "cuda":
        reserve = device.memory_bytes - device.usable_bytes
        yield ["reserve of a rank, GB", *(_gb(reserve) for _ in pools)]
    yield ["page of one layer on a rank, bytes", *(f"{pool.page_bytes:,}" for pool in pools)]
    yield ["pages of a group", *(f"{pool.num_pages:,}" for pool in pools)]
    yield ["tokens of a group", *(f"{pool.num_tokens:,}" for pool in pools)]
    yield ["tokens of an instance", *(f"{pool.num_tokens * of.dp:,}" for pool, of in _with_pools(checked))]
    yield ["longest request, tokens", *(f"{pool.longest:,}" for pool in pools)]


def _with_pools(checked: Checked) -> Iterator[tuple[PoolMemory, Pool]]:
    for name, pool in checked.pools.items():
        yield pool, checked.deployment.pools[name]


def _transfer_rows(request: RequestTransfer) -> Iterator[list[str]]:
    yield ["", "each layer", "all layers"]
    yield ["writes", f"{request.writes_per_layer:,}", f"{request.num_writes:,}, the aux write too"]
    yield ["bytes", f"{request.bytes_per_layer:,}", f"{request.num_bytes:,}"]


def _link(deployment: Deployment, request: RequestTransfer) -> Iterator[str]:
    link = deployment.link
    whose = "the host's" if deployment.device.kind == "cpu" else "a device's"
    pairs = ", ".join(f"{ours}-{theirs}" for ours, theirs in request.nic_pairs)
    nics = f"{link.nics} x {link.nic_gbps:g} Gbit/s, pairs {pairs}"
    yield f"transports: {', '.join(link.transports)}; {whose} NICs: {nics}"
    busiest = "all" if deployment.device.kind == "cpu" else "the busiest rank's"
    yield f"time: {request.time_s * 1e3:.2f} ms, for {busiest} {request.busiest_bytes:,} bytes"


def _sender_rows(request: RequestTransfer) -> Iterator[list[str]]:
    yield ["prefiller rank", "decoder ranks", "bytes of a write"]
    for rank in sorted({sent.src_rank for sent in request.sent}):
        to = [sent for sent in request.sent if sent.src_rank == rank]
        sizes = sorted({sent.write_bytes for sent in to})
        yield [str(rank), " ".join(str(sent.dst_rank) for sent in to), ", ".join(f"{size:,}" for size in sizes)]


def _below_senders(deployment: Deployment, request: RequestTransfer) -> Iterator[str]:
    """What the table of senders does not say by itself."""
    lines = []
    if request.is_drawn:
        lines.append("Which ranks send is drawn for each request, all as often: this is one of them.")
    if deployment.decoders.dp > 1:
        lines.append("The decoder's ranks are those of its first group; the others take theirs alike.")
    yield from lines
    if lines:
        yield ""


def _remarks(request: RequestTransfer) -> Iterator[str]:
    if (page_size := request.line_rate_page_size) is not None:
        least = f"less than the {LINE_RATE_BYTES:,} that reach line rate over RDMA"
        yield f"The smallest write is {request.write_bytes:,} bytes, {least}. A page_size of {page_size} would."


def _list(title: str, lines: tuple[str, ...]) -> Iterator[str]:
    if lines:
        yield from (f"{title}:", "", *(f"- {line}" for line in lines), "")


def _some(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f}"
