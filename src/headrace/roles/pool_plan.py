"""How large an instance's KV pools are, and what fits into one. Loads no torch: the command line asks before it
starts."""

from headrace.errors import InputError
from headrace.kvcache.layout import PoolLayout
from headrace.kvcache.sharding import Sharding
from headrace.messenger.aux import aux_slot_bytes
from headrace.model.shape import ModelShape
from headrace.model.shard import Shard
from headrace.roles.options import InstanceOptions


def plan_sharding(shape: ModelShape, options: InstanceOptions) -> Sharding:
    """Raises InputError where the ranks cannot share the model, or its KV."""
    Shard(tp=options.tp, dp=options.dp).of(shape)
    return Sharding(kv=shape.kv_layout(options.page_size, options.dtype), tp=options.tp, dp=options.dp)


def plan_pool(shape: ModelShape, options: InstanceOptions) -> tuple[PoolLayout, int]:
    """-> the pools that fit into kv_memory_bytes, one for each group of ranks, and the longest request that fits into
    model and pool."""
    sharding = plan_sharding(shape, options)
    kv = sharding.local
    wanted = options.max_model_len or shape.max_model_len
    if wanted > shape.max_model_len:
        raise InputError("max_model_len", f"must be at most {shape.max_model_len} (the model's), is {wanted}")
    bytes_per_page = sharding.num_ranks * kv.num_layers * kv.page_bytes
    num_pages = options.kv_memory_bytes // bytes_per_page
    if num_pages < 2:
        each = "" if sharding.num_ranks == 1 else f" on each of {sharding.num_ranks} ranks"
        raise InputError(
            "kv_memory",
            f"must hold at least 2 pages of {options.page_size} tokens{each}, {2 * bytes_per_page:,} bytes, "
            f"is {options.kv_memory_bytes:,}",
        )
    max_model_len = min(wanted, num_pages * options.page_size)
    layout = sharding.pool(
        num_pages=num_pages,
        # Twice: a cancelled ticket keeps its slot until nothing of it can land any more.
        num_aux_slots=2 * options.dp * options.max_running,
        aux_slot_bytes=aux_slot_bytes(max_model_len, options.page_size),
    )
    return layout, max_model_len
