"""From a GGUF file to a Hugging Face directory: configuration, bf16 weights, tokenizer.

Owns what families share: quantised blocks become bf16, under Hugging Face's names. Runs in the command-line process,
hence without torch. Knows neither where the file came from nor whether the directory is whole: the caller moves it to
its place when this returns.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from headrace.errors import InputError
from headrace.model.gguf.family import ID_FIELDS, Config, Fields, GgufFamily, Rows
from headrace.model.gguf.file import GgufTensor, read_gguf
from headrace.model.gguf.gemma3 import GEMMA3
from headrace.model.gguf.llama import LLAMA
from headrace.model.progress import Progress

FAMILIES: Mapping[str, GgufFamily] = {family.architecture: family for family in (LLAMA, GEMMA3)}

MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
UNTIED_TENSOR = {"output.weight": "lm_head.weight"}

BLOCK_VALUES = 1 << 22
"""Values that are taken apart at once: an embedding of 170 million would take 2 GB on its way to bf16."""


def convert(source: Path, directory: Path, stage: str, progress: Progress) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files into `directory`.

    Raises InputError, naming field or tensor, for a file that this conversion is not made for."""
    file = read_gguf(source)
    family = family_of(file.fields)
    config = family.config(file.fields, "output.weight" not in file.tensors)
    total_bytes = 2 * sum(tensor.num_values for tensor in file.tensors.values())
    progress(stage, 0, total_bytes)  # first: the tokenizer of a large vocabulary takes seconds
    family.write_tokenizer(file.fields, directory)
    write_json(directory / "config.json", config)
    write_json(
        directory / "generation_config.json",
        {name: config[name] for name in ID_FIELDS.values()},
    )
    weights = bf16_weights(file.tensors, family, config, lambda done_bytes: progress(stage, done_bytes, total_bytes))
    serialize_file(
        {
            name: TensorSpec(dtype="bfloat16", shape=weight.shape, data_ptr=weight.ctypes.data, data_len=weight.nbytes)
            for name, weight in weights.items()
        },
        directory / "model.safetensors",
        metadata={"format": "pt"},  # transformers asks for it
    )


def family_of(fields: Fields) -> GgufFamily:
    name = "general.architecture"
    if fields.get(name) not in FAMILIES:
        raise InputError(name, f"must be {' or '.join(FAMILIES)}, is {fields.get(name)!r}")
    return FAMILIES[fields[name]]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def tensor_names(config: Config, family: GgufFamily) -> dict[str, str]:
    """GGUF names and Hugging Face names of all tensors that such a model has."""
    layers = {
        f"blk.{layer}.{theirs}.weight": f"model.layers.{layer}.{ours}.weight"
        for layer in range(config["num_hidden_layers"])
        for theirs, ours in family.layer_tensors.items()
    }
    return {**MODEL_TENSORS, **layers, **({} if config["tie_word_embeddings"] else UNTIED_TENSOR)}


def bf16_weights(
    tensors: Mapping[str, GgufTensor], family: GgufFamily, config: Config, report: Callable[[int], None]
) -> dict[str, Rows]:
    """All tensors under their Hugging Face names; `report` counts the bytes of the result."""
    names = tensor_names(config, family)
    if missing := sorted(set(names) - set(tensors)):
        raise InputError(missing[0], "must be in the file, is not")
    if unknown := sorted(set(tensors) - set(names)):
        raise InputError(unknown[0], "is a tensor that is not understood")
    weights: dict[str, Rows] = {}
    done_bytes = 0
    for theirs, ours in names.items():
        blocks = []
        for block in dequantized(tensors[theirs]):
            blocks.append(to_bf16(block - family.less(theirs)))
            done_bytes += blocks[-1].nbytes
            report(done_bytes)
        weights[ours] = family.ordered(theirs, np.concatenate(blocks), config)
    return weights


def dequantized(tensor: GgufTensor) -> Iterator[NDArray[np.float32]]:
    """The tensor's values, some rows at a time."""
    if len(tensor.shape) == 1:
        yield quants.dequantize(tensor.data, tensor.kind)
        return
    num_rows = max(1, BLOCK_VALUES // (tensor.num_values // len(tensor.data)))
    for begin in range(0, len(tensor.data), num_rows):
        yield quants.dequantize(tensor.data[begin : begin + num_rows], tensor.kind)


def to_bf16(values: NDArray[np.float32]) -> Rows:
    """The upper halves of finite floats, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
