"""Checkpoints whose tensors begin at whole cache lines: all but those of odd sizes, which come last.

torch's products on some CPUs (AMD's) depend on where a matrix begins, in the last bit. Files that hold the same values
are compared bit by bit: so where their tensors lie must not differ by the length of a header, or by what comes first.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

LINE = 64
LENGTH = 8
"""Bytes that tell the header's."""


def save_aligned(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """As safetensors' own, in another order, with blanks behind the header."""
    whole = save(dict(tensors), metadata={"format": "pt"})
    begin = LENGTH + int.from_bytes(whole[:LENGTH], "little")
    header, values = json.loads(whole[LENGTH:begin]), whole[begin:]
    parts = {"__metadata__": header.pop("__metadata__")}
    data = bytearray()
    for name in sorted(header, key=lambda name: _is_odd(header[name])):  # else as they were, the widest first
        first, last = header[name]["data_offsets"]
        parts[name] = header[name] | {"data_offsets": [len(data), len(data) + last - first]}
        data += values[first:last]
    text = json.dumps(parts).encode()
    text += b" " * (-(LENGTH + len(text)) % LINE)
    file.write_bytes(len(text).to_bytes(LENGTH, "little") + text + data)


def _is_odd(entry: Mapping[str, list[int]]) -> bool:
    first, last = entry["data_offsets"]
    return (last - first) % LINE != 0
