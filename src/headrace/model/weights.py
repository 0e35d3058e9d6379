"""From a Hugging Face directory to a model that computes. Owns the checks that its tensors are the family's.

Tensors are mapped from their files, not read: a file's pages are in memory once, however many processes load it, and a
tensor is cast (from blocks of FP8: dequantised) and packed when the model asks for it. A rank of several reads its part
of each alone. Synchronous, for start-up.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.model import block_fp8
from headrace.model.checkpoint import StoredTensor, read_shape, stored_tensors
from headrace.model.families import FAMILIES
from headrace.model.interface import Model
from headrace.model.ops import Ops
from headrace.model.parallel import ALONE, Parallel
from headrace.model.tensors import as_computed
from headrace.model.torch_ops import TorchOps

_STORED_DTYPES = ("BF16", "F16", "F32", block_fp8.STORED_DTYPE)

_DERIVED = re.compile(r"rotary_emb\.inv_freq$")
"""Old checkpoints carry the rotary frequencies, which follow from the configuration."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_model(directory: Path, *, dtype: KVDtype, ops: Ops | None = None, parallel: Parallel = ALONE) -> Model:
    """The rank's part of the directory's model, computing in `dtype` by `ops` (of that part's heads), plain torch where
    there are none. Raises InputError, naming field or file and tensor."""
    shape, shard = read_shape(directory), parallel.shard
    own = shard.of(shape)
    stored = stored_tensors(directory)
    family = FAMILIES[shape.architecture]
    scales = block_fp8.require_scales(stored, shape.weight_block_size)
    weights = {name: entry for name, entry in stored.items() if name not in scales}
    wanted, unread = family.tensor_shapes(shape), family.unread(shape)
    if not unread.keys().isdisjoint(weights):
        wanted |= unread  # all of them or none
    _require_the_familys(directory, weights, wanted, tied=shape.tie_word_embeddings)
    sizes = family.tensor_shapes(own)
    ops = ops or TorchOps(own, dtype)
    with ExitStack() as opened:
        files = {
            file: opened.enter_context(safe_open(file, "pt")) for file in {entry.file for entry in stored.values()}
        }
        values = _StoredValues(stored=stored, files=files, block_size=shape.weight_block_size, dtype=ops.dtype)

        def tensor(name: str) -> torch.Tensor:
            axes = zip(stored[name].shape, sizes[name], strict=True)
            return values.part(name, tuple(shard.part(whole, size) for whole, size in axes))

        if (
            shape.tie_word_embeddings
            and _HEAD in stored
            and not torch.equal(values.whole(_HEAD), values.whole(_EMBEDDING))
        ):
            said = f"must equal {_EMBEDDING}, as tie_word_embeddings says, or be absent; it differs"
            raise InputError("model", f"{stored[_HEAD].file}: {_HEAD} {said}")
        return family.model(own, tensor, ops, parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredValues:
    """What tensors stand for, in `dtype`; of a part no more than it is read."""

    stored: Mapping[str, StoredTensor]
    files: Mapping[Path, Any]  # opened by safetensors
    block_size: tuple[int, int] | None
    dtype: torch.dtype

    def whole(self, name: str) -> torch.Tensor:
        return self.part(name, _all_of(self.stored[name]))

    def part(self, name: str, part: tuple[range, ...]) -> torch.Tensor:
        own = self._as_stored(name, part)
        if own.dtype != block_fp8.DTYPE:
            return as_computed(own, self.dtype)
        assert self.block_size is not None, f"scales of {name}"
        rows, columns = part
        scales = self._as_stored(block_fp8.scales_of(name), block_fp8.blocks_of((rows, columns), self.block_size))
        begin = (rows.start, columns.start)
        return block_fp8.dequantized(own, scales, self.block_size, self.dtype, begin=begin)

    def _as_stored(self, name: str, part: tuple[range, ...]) -> torch.Tensor:
        entry = self.stored[name]
        file = self.files[entry.file]
        if part == _all_of(entry):
            whole: torch.Tensor = file.get_tensor(name)
            return whole
        cut: torch.Tensor = file.get_slice(name)[tuple(slice(axis.start, axis.stop) for axis in part)]
        return cut.contiguous()


def _all_of(entry: StoredTensor) -> tuple[range, ...]:
    return tuple(map(range, entry.shape))


def _require_the_familys(
    directory: Path, stored: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]], *, tied: bool
) -> None:
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise InputError("model", f"{directory} must have {len(wanted)} tensors, {len(missing)} miss: {_some(missing)}")
    for name, entry in stored.items():
        if name in wanted and entry.shape != wanted[name]:
            said = f"must be {list(wanted[name])} by config.json, is {list(entry.shape)}"
            raise InputError("model", f"{entry.file}: {name} {said}")
        if name in wanted and entry.dtype not in _STORED_DTYPES:
            raise InputError("model", f"{entry.file}: {name} must be {', '.join(_STORED_DTYPES)}, is {entry.dtype}")
        if name not in wanted and not _DERIVED.search(name) and not (tied and name == _HEAD):
            raise InputError("model", f"{entry.file}: {name} must not be there: this family has no such tensor")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", .." if len(names) > 3 else "")
