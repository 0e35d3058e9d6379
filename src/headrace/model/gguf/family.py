"""What the conversion of a GGUF file has to know of a family, and the strict reading of the file's fields.

Owns nothing. Runs in the command-line process, without torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError

Fields = Mapping[str, Any]
Config = dict[str, Any]
Rows = NDArray[np.uint16]

ID_FIELDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """`config`: of the file's fields, and whether the head is tied, what config.json says. `layer_tensors`: names in a
    layer, theirs and Hugging Face's. `less`: what a tensor's values, by its name there, have too much. `ordered`: its
    rows, bf16, as Hugging Face orders them."""

    architecture: str
    config: Callable[[Fields, bool], Config]
    layer_tensors: Mapping[str, str]
    less: Callable[[str], float]
    ordered: Callable[[str, Rows, Config], Rows]
    write_tokenizer: Callable[[Fields, Path], None]


def require_values(fields: Fields, expected: Mapping[str, object]) -> None:
    """Fields with the one value that a conversion is right for. Raises InputError, naming the field."""
    for name, value in expected.items():
        if fields.get(name) != value:
            raise InputError(name, f"must be {value!r}, is {fields.get(name)!r}")


def read_numbers(
    fields: Fields, architecture: str, *, counts: Mapping[str, str], floats: Mapping[str, str]
) -> dict[str, Any]:
    """The architecture's fields and the named tokens, by their Hugging Face names: all of them, and no others that we
    would leave out. Raises InputError, naming the field."""
    known = {*counts, *floats}
    if unknown := sorted(name for name in fields if name.startswith(f"{architecture}.") and name not in known):
        raise InputError(unknown[0], f"is not understood; what is: {', '.join(sorted(known))}")
    if missing := sorted({*known, *ID_FIELDS} - set(fields)):
        raise InputError(missing[0], "must be in the file, is not")
    numbers: dict[str, Any] = {ours: int(fields[theirs]) for theirs, ours in {**counts, **ID_FIELDS}.items()}
    return numbers | {ours: shortest(fields[theirs]) for theirs, ours in floats.items()}


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
