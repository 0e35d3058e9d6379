"""A GGUF file as it lies: its fields as Python values, its tensors as rows of packed bytes.

Owns the reading of the container; what is packed in a row, the gguf library takes apart. That library reads files too,
but an array as one numpy object per element: 262,144 pieces with their scores and types took it half a minute.
Source: docs/gguf.md of ggml, versions 2 and 3.

    magic, version, num_tensors, num_fields | fields | tensors: name, dims, type, offset | padding | data
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from headrace.errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
UINT32, UINT64 = 4, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """`shape` is in numpy's order; `data` are its rows, `[.., bytes of a row] uint8`, mapped from the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def num_values(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Raises InputError for what is no whole GGUF file."""
    try:
        with path.open("rb") as file:
            return _read(_Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (ValueError, KeyError, struct.error) as error:  # it ends early, or holds a type that there is none of
        raise InputError("model", f"{path} must be a whole GGUF file, is not: {error}") from error


class _Cursor:
    """A place in the file that moves on with each value."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.at = 0

    def scalar(self, kind: int) -> int | float | bool:
        value: int | float | bool
        (value,) = struct.unpack_from("<" + SCALARS[kind], self.content, self.at)
        self.at += struct.calcsize("<" + SCALARS[kind])
        return value

    def uint32(self) -> int:
        return int(self.scalar(UINT32))

    def uint64(self) -> int:
        return int(self.scalar(UINT64))

    def string(self) -> str:
        size = self.uint64()
        self.at += size
        return self.content[self.at - size : self.at].decode()

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        return self.array() if kind == ARRAY else self.scalar(kind)

    def array(self) -> list[object]:
        kind, size = self.uint32(), self.uint64()
        if kind not in SCALARS:
            return [self.value(kind) for _ in range(size)]
        values = np.frombuffer(self.content, "<" + SCALARS[kind], size, self.at)
        self.at += values.nbytes
        return list(values.tolist())


def _read(cursor: _Cursor) -> GgufFile:
    magic, version = cursor.uint32().to_bytes(4, "little"), cursor.uint32()
    if magic != MAGIC or version not in VERSIONS:
        raise ValueError(f"it begins with {magic!r}, version {version}")
    num_tensors, num_fields = cursor.uint64(), cursor.uint64()
    fields: dict[str, Any] = {cursor.string(): cursor.value(cursor.uint32()) for _ in range(num_fields)}
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    data = -(-cursor.at // alignment) * alignment
    return GgufFile(
        fields=fields,
        tensors={
            name: GgufTensor(name=name, kind=kind, shape=shape, data=_rows(cursor.content, data + begin, kind, shape))
            for name, kind, shape, begin in infos
        },
    )


def _tensor_info(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.string()
    shape = tuple(reversed([cursor.uint64() for _ in range(cursor.uint32())]))  # theirs begins with the row
    return name, GGMLQuantizationType(cursor.uint32()), shape, cursor.uint64()


def _rows(content: mmap.mmap, begin: int, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_values:
        raise ValueError(f"a row of {shape[-1]} values is no whole number of {kind.name} blocks")
    row_bytes = shape[-1] // block_values * block_bytes
    num_bytes = int(np.prod(shape[:-1])) * row_bytes
    return np.frombuffer(content, np.uint8, num_bytes, begin).reshape(*shape[:-1], row_bytes)
