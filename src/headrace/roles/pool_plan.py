"""How large an instance's KV pool is, and what fits into it. Loads no torch: the command line asks before it starts."""

from headrace.errors import InputError
from headrace.kvcache.layout import PoolLayout
from headrace.messenger.aux import aux_slot_bytes
from headrace.model.shape import ModelShape
from headrace.roles.options import InstanceOptions


def plan_pool(shape: ModelShape, options: InstanceOptions) -> tuple[PoolLayout, int]:
    """-> the pool that fits into kv_memory_bytes, and the longest request that fits into model and pool."""
    kv = shape.kv_layout(options.page_size, options.dtype)
    wanted = options.max_model_len or shape.max_model_len
    if wanted > shape.max_model_len:
        raise InputError("max_model_len", f"must be at most {shape.max_model_len} (the model's), is {wanted}")
    num_pages = options.kv_memory_bytes // (kv.num_layers * kv.page_bytes)
    if num_pages < 2:
        raise InputError(
            "kv_memory",
            f"must hold at least 2 pages of {options.page_size} tokens, {2 * kv.num_layers * kv.page_bytes:,} bytes, "
            f"is {options.kv_memory_bytes:,}",
        )
    max_model_len = min(wanted, num_pages * options.page_size)
    layout = PoolLayout(
        kv=kv,
        num_pages=num_pages,
        # Twice: a cancelled ticket keeps its slot until nothing of it can land any more.
        num_aux_slots=2 * options.max_running,
        aux_slot_bytes=aux_slot_bytes(max_model_len, options.page_size),
    )
    return layout, max_model_len
