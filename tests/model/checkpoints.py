"""Tiny checkpoints on disk, whole and broken."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from aligned_file import save_aligned
from llama_oracle import Oracle
from safetensors.torch import load_file

WHOLE = "model.safetensors"


def saved(oracle: Oracle, directory: Path) -> Path:
    """As transformers writes it, in one file."""
    oracle.model.save_pretrained(directory)
    change_tensors(directory, {})  # aligned
    assert (directory / WHOLE).is_file()
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    """`...` takes a field out."""
    config = {**json.loads((directory / "config.json").read_text()), **changes}
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...})
    )


def change_tensors(directory: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """None takes a tensor out."""
    tensors = {**load_file(directory / WHOLE), **changes}
    (directory / WHOLE).unlink()  # what has mapped the old file keeps it
    save_aligned({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / WHOLE)


def shard(directory: Path, *, num_files: int) -> list[Path]:
    """Spread the tensors over files, with an index."""
    tensors = load_file(directory / WHOLE)
    (directory / WHOLE).unlink()
    files = [directory / f"model-{number}.safetensors" for number in range(num_files)]
    names = sorted(tensors, reverse=True)
    for number, file in enumerate(files):
        save_aligned({name: tensors[name] for name in names[number::num_files]}, file)
    file_of = {name: files[place % num_files].name for place, name in enumerate(names)}
    write_index(directory, {"metadata": {}, "weight_map": file_of})
    return files


def write_index(directory: Path, index: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def raw_safetensors(header: object, data: bytes) -> bytes:
    """A file with any header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
