"""Weights stored as FP8 (e4m3) in blocks that share a scale: which tensors they are, and their values.

Owns the form of such a checkpoint: beside `X.weight` lies `X.weight_scale_inv`, which despite its name is multiplied
with. Knows no family and no file's path to a tensor. Only weights are stored so: what is computed with their values, in
the dtype of the model, rounds no activation to FP8.
"""

from collections.abc import Mapping

import torch

from headrace.errors import InputError
from headrace.model.checkpoint import StoredTensor

STORED_DTYPE = "F8_E4M3"
DTYPE = torch.float8_e4m3fn

Part = tuple[range, range]
"""Rows and columns of a matrix."""

_SUFFIX = "_scale_inv"
_SCALE_DTYPES = ("F32", "BF16")

_VALUES = torch.arange(256, dtype=torch.uint8).view(DTYPE).float()
"""Of each byte: looked up, four times as fast as torch casts them (450 M/s and 110 M/s on one core)."""


def scales_of(name: str) -> str:
    return f"{name}{_SUFFIX}"


def require_scales(stored: Mapping[str, StoredTensor], block_size: tuple[int, int] | None) -> set[str]:
    """The names of the scales, when every FP8 weight has its own and no other tensor has any. Raises InputError, naming
    file and tensor."""
    quantized = {name: entry for name, entry in stored.items() if entry.dtype == STORED_DTYPE}
    for name, entry in quantized.items():
        _require_blocks(name, entry, stored.get(scales_of(name)), block_size)
    scales = {scales_of(name) for name in quantized}
    for name, entry in stored.items():
        if name.endswith(_SUFFIX) and name not in scales:
            weight = name.removesuffix(_SUFFIX)
            raise InputError("model", f"{entry.file}: {name} must not be there, as {weight} is not {STORED_DTYPE}")
    return scales


def _require_blocks(
    name: str, entry: StoredTensor, scales: StoredTensor | None, block_size: tuple[int, int] | None
) -> None:
    if block_size is None:
        said = f"must come with a quantization_config in config.json, as it is {STORED_DTYPE}; there is none"
        raise InputError("model", f"{entry.file}: {name} {said}")
    if len(entry.shape) != 2:
        said = f"must be a matrix to be {STORED_DTYPE}, as its blocks are, is {list(entry.shape)}"
        raise InputError("model", f"{entry.file}: {name} {said}")
    if scales is None:
        raise InputError(
            "model", f"{entry.file}: {name} must have {scales_of(name)} beside it, as it is {STORED_DTYPE}"
        )
    wanted = tuple(-(-size // step) for size, step in zip(entry.shape, block_size, strict=True))
    if scales.shape != wanted:
        said = f"must be {list(wanted)}, one for each block of {list(block_size)}, is {list(scales.shape)}"
        raise InputError("model", f"{scales.file}: {scales_of(name)} {said}")
    if scales.dtype not in _SCALE_DTYPES:
        said = f"must be {', '.join(_SCALE_DTYPES)}, is {scales.dtype}"
        raise InputError("model", f"{scales.file}: {scales_of(name)} {said}")


def blocks_of(part: Part, block_size: tuple[int, int]) -> Part:
    """The rows and columns of scales that a part of a weight is in, wherever it is cut."""
    rows, columns = (range(own.start // size, -(-own.stop // size)) for own, size in zip(part, block_size, strict=True))
    return rows, columns


def dequantized(
    weight: torch.Tensor,
    scales: torch.Tensor,
    block_size: tuple[int, int],
    dtype: torch.dtype,
    *,
    begin: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """`weight` `[R, C] fp8` times the `scales` `[blocks of R, blocks of C]` of its blocks -> `[R, C] dtype`, rounded
    once, from fp32. A part of a weight says where in the whole it begins, and has the scales of `blocks_of` it. By rows
    of blocks: beside the result, only one of them is in memory."""
    num_rows, num_columns = block_size
    cut_rows, cut_columns = begin[0] % num_rows, begin[1] % num_columns
    result = torch.empty(weight.shape, dtype=dtype)
    for number, scale in enumerate(scales.float()):
        rows = slice(max(0, number * num_rows - cut_rows), (number + 1) * num_rows - cut_rows)
        of_columns = scale.repeat_interleave(num_columns)[cut_columns:][: weight.shape[1]]
        result[rows] = _values(weight[rows]) * of_columns
    return result


def _values(stored: torch.Tensor) -> torch.Tensor:
    return _VALUES.index_select(0, stored.view(torch.uint8).int().flatten()).view(stored.shape)
