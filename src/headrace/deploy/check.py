"""A deployment against its model: what each rank holds and what fits, or the number that breaks it. Pure; no device."""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.deploy.file import Deployment
from headrace.deploy.memory import PoolMemory, plan_memory, sharding_of
from headrace.deploy.weights import Held, TensorShapes, rank_shapes
from headrace.kvcache.layout import KVLayout
from headrace.model.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """`weight_bytes` are the whole model's as they are published: in bf16, but for those in blocks of FP8, of
    `weight_block_size`. `kv` is the whole model's, `token_bytes` of one token in it. `assumed`: what the numbers stand
    on, and leave out."""

    deployment: Deployment
    architecture: str
    has_experts: bool
    max_model_len: int
    weight_bytes: int
    weight_block_size: tuple[int, int] | None
    kv: KVLayout
    token_bytes: int
    pools: dict[str, PoolMemory]
    assumed: tuple[str, ...]


def check_deployment(deployment: Deployment, shape: ModelShape, tensor_shapes: TensorShapes) -> Checked:
    """Raises InputError: the key, and the number that breaks it."""
    kv = shape.kv_layout(deployment.page_size, deployment.dtype)
    held = Held.on_device(shape, deployment.device.kind, deployment.dtype)
    weight_bytes = {}
    for name, pool in deployment.pools.items():
        sharding_of(pool, kv, name)
        weight_bytes[name] = held.num_bytes(rank_shapes(tensor_shapes, shape, pool, name=name))
    return Checked(
        deployment=deployment,
        architecture=shape.architecture,
        has_experts=shape.experts is not None,
        max_model_len=shape.max_model_len,
        weight_bytes=Held.on_disk(shape).num_bytes(tensor_shapes(shape)),
        weight_block_size=shape.weight_block_size,
        kv=kv,
        token_bytes=kv.token_bytes,
        pools=plan_memory(deployment, shape, weight_bytes),
        assumed=tuple(_assumed(deployment, shape)),
    )


def _assumed(deployment: Deployment, shape: ModelShape) -> Iterator[str]:
    device = deployment.device
    if device.kind == "cpu":
        yield "All instances are on one host; processes that hold the same weights share one copy (native kernels do)."
        yield f"The reserve, {1 - device.usable:.0%} of memory, is for activations, Python and the system."
        if shape.tie_word_embeddings:
            yield "Embedding and head are one tensor, counted once; native kernels hold the head a second time, packed."
    else:
        yield "This is arithmetic: headrace computes on CPUs so far, no engine of its has run on such a device."
        yield f"The reserve, {1 - device.usable:.0%} of memory, is for activations, communication and the driver."
        yield "Each device has NICs, memory and a fabric of its own; writes take its NICs by turns."
    if shape.weight_block_size is not None:
        rows, columns = shape.weight_block_size
        if Held.on_device(shape, device.kind, deployment.dtype).block_size:
            yield f"FP8 weights stay in their blocks of {rows} x {columns} with fp32 scales; all others are bf16."
        else:
            yield f"FP8 weights become {deployment.dtype} when they are loaded."
    if shape.num_mtp_layers:
        yield "Nothing reads the layers that predict further tokens (MTP): they are not counted."
    yield "Times are at the NICs' full rate. How long a prefill takes, behind which they hide, is not known here."
