"""A Hugging Face directory on disk: its configuration, which tensor lies where, and a fingerprint of all of it.

Owns the reading of config.json and of safetensors headers, and what is said when they are broken. Knows no family and
loads no torch: whoever wants a model's numbers, not the model, stays light. Synchronous, for start-up.
"""

import hashlib
import json
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace.errors import InputError
from headrace.kvcache.layout import KVDtype
from headrace.model.shape import ModelShape

_CONFIG = "config.json"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor's bytes are: [begin, end) of `file`, in safetensors' name of their dtype."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_shape(directory: Path) -> ModelShape:
    """Raises InputError, naming the file or the field of config.json that is wrong."""
    return ModelShape.from_config(_read_object(directory / _CONFIG))


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of the directory's safetensors files, by name. Raises InputError, naming the file."""
    whole, index = directory / _WHOLE, directory / _INDEX
    if whole.is_file():
        return _read_header(whole)
    if not index.is_file():
        raise InputError("model", f"{directory} must have {_WHOLE} or {_INDEX}, has neither")
    file_of = _weight_map(index)
    stored: dict[str, StoredTensor] = {}
    for name in sorted(set(file_of.values())):
        header = _read_header(directory / name)
        promised = {tensor for tensor, file in file_of.items() if file == name}
        for tensor in sorted(promised ^ header.keys()):
            raise InputError("model", f"{directory / name} must have the tensors that {_INDEX} says; {tensor} differs")
        stored |= header
    return stored


def fingerprint(directory: Path, *, dtype: KVDtype) -> str:
    """32 hex digits that are equal on two hosts whose models are: over all numbers of the shape, the dtype, and every
    byte of every tensor, in order of name. How tensors are spread over files and config.json is written is left out.

    Blocks of FP8 and the values that they stand for are two models: whoever wrote the values may have rounded
    otherwise, and to find them equal, every start would dequantise everything.

    Samples would be faster, and would miss a checkpoint of which one layer was trained on. All of it takes 0.3 s for
    270 MB, and what it reads from disk, loading finds in memory. Raises InputError.
    """
    shape, stored = read_shape(directory), stored_tensors(directory)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(["headrace model 1", dtype, asdict(shape)], sort_keys=True).encode())
    with ExitStack() as opened:
        bytes_of = {file: opened.enter_context(_mapped(file)) for file in {tensor.file for tensor in stored.values()}}
        for name, tensor in sorted(stored.items()):
            digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
            digest.update(bytes_of[tensor.file][tensor.begin : tensor.end])
    return digest.hexdigest()


def _mapped(file: Path) -> memoryview:
    with _naming(file), file.open("rb") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with _naming(file):
        with safe_open(file, framework="numpy"):  # the library checks all of it, also against the file's length
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    data = 8 + length
    return {
        name: StoredTensor(
            file=file,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            begin=data + entry["data_offsets"][0],
            end=data + entry["data_offsets"][1],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _weight_map(index: Path) -> dict[str, str]:
    file_of = _read_object(index).get("weight_map")
    if not isinstance(file_of, dict) or not all(_is_weights_name(name) for name in file_of.values()):
        raise InputError("model", f"{index} must have a weight_map of tensors to safetensors files beside it")
    return file_of


def _is_weights_name(name: object) -> bool:
    """Names only, no paths: an index that came with a download points into its own directory."""
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _read_object(file: Path) -> dict[str, Any]:
    with _naming(file):
        value = json.loads(file.read_bytes())
    if not isinstance(value, dict):
        raise InputError("model", f"{file} must be a JSON object, is {type(value).__name__}")
    return value


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Whatever reading the file raises is said of the file."""
    try:
        yield
    except OSError as error:
        raise InputError("model", f"{file} must be a file that can be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise InputError("model", f"{file} must be a whole safetensors file, is not: {error}") from error
    except ValueError as error:  # of json: no JSON, or no UTF-8
        raise InputError("model", f"{file} must be JSON, is not: {error}") from error
