"""Which kernels compute a model in this process, their threads, and the packed weights that they read.

Owns the choice and what it opens; a model that was opened here ends with the context. Synchronous, for start-up. What
was chosen, and why, is one line of the log each.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.model import _cpu
from headrace.model.checkpoint import read_shape, stored_tensors
from headrace.model.interface import Model
from headrace.model.native_ops import NativeOps, why_not_native
from headrace.model.ops import Ops
from headrace.model.options import ComputeOptions
from headrace.model.packed import load_packed
from headrace.model.parallel import ALONE, Parallel
from headrace.model.shape import ModelShape
from headrace.model.torch_ops import TorchOps
from headrace.model.weights import load_model

WrapOps = Callable[[Ops, str], Ops]
"""Puts something around the operations, and is told which kernels compute them and where."""

_PACKING = 1
"""Of packed weights: rises when their form, or the order in which a family packs them, changes."""

_log = logging.getLogger(__name__)


def as_they_are(ops: Ops, told: str) -> Ops:
    """Puts nothing around them."""
    return ops


@contextmanager
def open_model(
    directory: Path,
    *,
    fingerprint: str,
    dtype: KVDtype,
    options: ComputeOptions,
    wrap: WrapOps = as_they_are,
    parallel: Parallel = ALONE,
) -> Iterator[Model]:
    """The rank's part of the directory's model, whose fingerprint is known, and what computes it. Raises InputError,
    naming what is wrong."""
    shape = parallel.shard.of(read_shape(directory))
    reason = _why_torch(shape, dtype, options)
    if reason is not None:
        torch.set_num_threads(options.threads)
        told = f"torch ({reason}), {_placed(options)}"
        _log.info("kernels: %s", told)
        yield load_model(directory, dtype=dtype, ops=wrap(TorchOps(shape, dtype), told), parallel=parallel)
        return
    torch.set_num_threads(1)  # what is left to it is small, and its idle threads spin
    kernels = _cpu.Kernels(_cpu.instruction_sets()[0], options.cpus, options.threads)
    told = f"native ({kernels.instruction_set}), {_placed(options)}"
    _log.info("kernels: %s", told)
    with closing(kernels):
        begin = time.monotonic()
        model, packed = load_packed(
            _packed_key(fingerprint, parallel),
            lambda packed: load_model(
                directory, dtype="bf16", ops=wrap(NativeOps(shape, kernels, packed.region), told), parallel=parallel
            ),
            capacity_bytes=_capacity_bytes(directory),
            directory=options.share_in,
            read=_read_gbps,
        )
        _log.info("weights: %s", packed.told(time.monotonic() - begin))
        with closing(packed):
            yield model


def _packed_key(fingerprint: str, parallel: Parallel) -> str:
    """Names what is packed: of several ranks, each packs its part."""
    shard = parallel.shard
    part = f" rank {shard.rank} of {shard.dp} x {shard.tp}" if shard.num_ranks > 1 else ""
    return f"{fingerprint} packing {_PACKING}{part}"


def _capacity_bytes(directory: Path) -> int:
    """More than packed weights take: each is filled up to whole 32 rows and columns, and tied ones are packed too."""
    sizes = [np.prod([-(-size // 32) * 32 for size in entry.shape]) for entry in stored_tensors(directory).values()]
    return 4 * int(sum(sizes))


def _read_gbps(array: NDArray[np.uint8]) -> float:
    return _cpu.read(array, 1) / 1e9


def _placed(options: ComputeOptions) -> str:
    where = f"CPUs {', '.join(map(str, options.cpus))}" if options.cpus else "any CPU"
    return f"{options.threads} thread{'s' if options.threads > 1 else ''} on {where}"


def _why_torch(shape: ModelShape, dtype: KVDtype, options: ComputeOptions) -> str | None:
    if options.kernels == "torch":
        return "as --kernels says"
    reason = "native ones compute in bf16" if dtype != "bf16" else why_not_native(shape)
    if reason is not None and options.kernels == "native":
        raise InputError("kernels", f"must be auto or torch here: {reason}")
    return reason
